"""`trainstep collectives`: bandwidth and latency of the interconnect, by operation, size and number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.cli.options import GridOptions, check_nodes, limits, this_machine, with_fields, with_nodes
from trainstep.config.collective import LEVELS, CollectiveConfig
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.records.record import Environment

_SIZES: dict[str, list[float]] = {
    "gloo": [0.001, 0.016, 0.25, 1, 4, 16],
    "nccl": [0.001, 0.016, 0.25, 1, 4, 16, 64, 256, 1024],
}
"""Sizes in MiB: small sizes show the latency, large sizes the bandwidth."""
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    "cpu": {"mib": _SIZES["gloo"], "ranks": [2]},
    "cuda": {"backend": ["nccl"], "mib": _SIZES["nccl"], "ranks": ["all GPUs"]},
}


@with_fields(CollectiveConfig, _IN_HELP)
def collectives(
    *,
    kib: str | None = None,
    compare: str | None = None,
    timeout_s: float = 600.0,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time collectives: bandwidth by size, latency, slowest and fastest rank, share of the link's speed where that is known.

    Without options: all-reduce with NCCL over all GPUs if there are two or more, else with gloo between two CPU processes.
    Each call starts from a barrier. Every rank times its own call, and the slowest rank's time counts. Over several nodes each
    level is measured (inside nodes, across nodes, all), and the slowest link is named.

    Examples:

        trainstep collectives

        trainstep collectives --backend gloo --ranks 2,4,6 --mib 1,16,64 --kib 1,64

        trainstep collectives --backend nccl --ranks 2,4,8 --operation all_reduce,all_gather,reduce_scatter --mib 1,64,1024

        trainstep collectives --compare transport --transport library,copies --mib 16,64,256

        trainstep collectives --compare dtype --dtype fp32,bf16 --mib 16 --page report.html

        srun --nodes 2 --ntasks-per-node 1 trainstep collectives --level in_nodes,across_nodes

    Parameters
    ----------
    kib
        Sizes in KiB, in addition to those in MiB.
    compare
        The option whose values are compared: their processes are interleaved, so that drift affects all values equally.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    """
    grid = grid_from_text(fields)
    bounds = limits(timeout_s, None, nodes=how.nodes)
    requested_device = ",".join(map(str, grid.pop("device", []))) or _device_of(grid)
    instead = "--backend gloo --device cpu" if "nccl" in grid.get("backend", ()) else "--device cpu"
    here, device = this_machine(requested_device, instead=instead, forks=False)
    if device == "cpu" or "nccl" in grid.get("backend", ["nccl"]):
        grid = with_nodes(grid, device, here, how.nodes)
    grid = _with_defaults(grid, _sizes_in_mib(kib), device, here)
    _check_gpus(grid, device, here)
    if device == "cuda" and grid["backend"] == ["gloo"] and fields.get("device") is None:
        device = "cpu"
    cells = expand({"workload": ["collective"], **grid}, {"device": device})
    check_nodes(cells, how, here)
    groups = groups_along(cells, compare)
    from trainstep.cli.cells import measure_grid

    return measure_grid(groups, "collectives", bounds, how, here, compare=compare)


def _device_of(grid: Mapping[str, Sequence[Any]]) -> str | None:
    """The device that the grid's backends need: cuda if nccl is one of them; None if the grid names no backend."""
    backends = grid.get("backend")
    if backends is None:
        return None
    return "cuda" if "nccl" in backends else "cpu"


def _with_defaults(
    grid: Mapping[str, list[Any]], small_mib: list[float], device: str, here: Environment
) -> dict[str, list[Any]]:
    """The grid, completed with defaults, in an order in which cells with the same ranks follow each other."""
    several = device == "cuda" and (here.gpu_count > 1 or grid.get("nodes", [1]) != [1])
    backend = grid.get("backend", ["nccl" if several else "gloo"])
    ranks = grid.get("ranks", [here.gpu_count if several and "nccl" in backend else 2])
    mib = small_mib + grid.get("mib", []) or _SIZES["nccl" if "nccl" in backend else "gloo"]
    rest = {name: values for name, values in grid.items() if name not in ("backend", "ranks", "mib")}
    if grid.get("nodes", [1]) != [1] and "level" not in grid:
        rest["level"] = _levels(ranks, grid["nodes"])
    return {"backend": backend, "ranks": ranks, **rest, "mib": mib}


def _levels(ranks: Sequence[Any], nodes: Sequence[Any]) -> list[str]:
    """The levels that all of these cells have."""
    if 1 in nodes:
        return ["all"]
    return ["all", "across_nodes"] if set(ranks) & set(nodes) else list(LEVELS)


def _sizes_in_mib(kib: str | None) -> list[float]:
    sizes = grid_from_text({"kib": kib}).get("kib", [])
    for size in sizes:
        if not isinstance(size, int | float) or not size > 0:
            raise ValueError(f"kib: must be positive numbers, not {size!r}")
    return [size / 1024 for size in sizes]


def _check_gpus(grid: Mapping[str, list[Any]], device: str, here: Environment) -> None:
    """ValueError for more NCCL ranks than GPUs: this is bad input, not failed cells."""
    nodes = min((count for count in grid.get("nodes", [1]) if isinstance(count, int) and count > 0), default=1)
    most = max((ranks // nodes for ranks in grid["ranks"] if isinstance(ranks, int)), default=0)
    if device == "cuda" and "nccl" in grid["backend"] and most > here.gpu_count:
        raise ValueError(
            f"ranks: {most} NCCL ranks need a GPU each, but {here.gpu_count} {'is' if here.gpu_count == 1 else 'are'} visible; "
            f"take fewer, or the CPU: trainstep collectives --backend gloo --ranks {most}"
        )
