"""The config of `trainstep profile`: a timed run and its profiled steps."""

from dataclasses import dataclass

from trainstep.config.fields import check_integer, described
from trainstep.config.run import ATTENTIONS, RunConfig


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(RunConfig):
    """A timed run, and the number of steps that are profiled after it. ValueError names the field."""

    attention: str = described(
        "attention of the built-in model; plain shows the parts of attention separately", "plain", ATTENTIONS
    )
    profiled_steps: int = described("profiled steps, after the timed steps; three show outliers", 3)
    keep_trace: str | None = described(
        "folder for the trace of one step, a .json.gz that opens in Perfetto (https://ui.perfetto.dev) and in --from",
        None,
    )
    graph_replay: bool = described(
        "replay the step as one CUDA graph and compare its time with the sum of its kernels; needs a GPU", False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graph_replay and self.device == "cpu":
            raise ValueError("graph_replay: a CUDA graph needs a GPU; leave it out on a CPU")
        if self.graph_replay and self.capture != "none":
            raise ValueError("graph_replay: with capture the step is a graph already; leave one of them out")
        check_integer(self, "profiled_steps", at_least=1, at_most=100)
