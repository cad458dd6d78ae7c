"""The field `nodes` of configs with ranks: over how many nodes a cell's ranks are spread."""

NODES_HELP = (
    "nodes that the ranks are spread over, in equal numbers; more than one needs --slurm, or a launch by srun or torchrun, "
    "whose nodes are the default there"
)


def check_nodes(ranks: int, nodes: object) -> None:
    """ValueError unless this many ranks are spread over `nodes` in equal numbers."""
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise ValueError(f"nodes: must be a whole number of at least 1, not {nodes!r}")
    if ranks % nodes:
        raise ValueError(
            f"nodes: {ranks} rank{'s' * (ranks > 1)} cannot be spread evenly over {nodes} nodes; take a multiple of {nodes}"
        )
