"""The config of `trainstep bench`: a training step in one process, taken alone or by several processes at the same time."""

from dataclasses import dataclass

from trainstep.config.fields import check_integer, described
from trainstep.config.nodes import check_nodes
from trainstep.config.run import RunConfig

_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class BenchConfig(RunConfig):
    """The step that every rank takes by itself, without messages. ValueError names the field and the remedy."""

    ranks: int = described(
        "processes that take this step at the same time, each by itself, on a GPU of its own where there are GPUs; over several "
        "nodes the default is one for each of their GPUs, on CPUs one a node",
        1,
    )
    nodes: int = described(
        "nodes that these processes are spread over; more than one needs --slurm, or a launch by srun or torchrun, whose nodes are "
        "the default there",
        1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "ranks", at_least=1, at_most=_MOST_RANKS)
        check_nodes(self.ranks, self.nodes)
