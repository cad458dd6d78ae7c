"""Where the time of one training step goes: a cell of the workload `profile`."""

from dataclasses import dataclass

from trainstep.config.fields import check_integer, described
from trainstep.config.run import ATTENTIONS, RunConfig


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(RunConfig):
    """A run, timed as a run is, and the steps that the profiler watches afterwards. Raises ValueError naming the field."""

    attention: str = described(
        "attention of the built-in model; written out, its parts stand apart", "plain", ATTENTIONS
    )
    profiled_steps: int = described("steps watched by the profiler, after the timed ones; three show outliers", 3)
    keep_trace: str | None = described(
        "folder for the trace of one step, a .json.gz that opens in Perfetto (https://ui.perfetto.dev) and in --from",
        None,
    )
    graph_replay: bool = described(
        "replay the step as one CUDA graph, beside the sum of its kernels; needs a GPU", False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graph_replay and self.device == "cpu":
            raise ValueError("graph_replay: a CUDA graph needs a GPU; leave it out on a CPU")
        if self.capture != "none":
            raise ValueError(
                "capture: the kernels of a graph have no phases in a trace; leave it at none, or take graph_replay"
            )
        check_integer(self, "profiled_steps", at_least=1, at_most=100)
