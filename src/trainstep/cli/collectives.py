"""`trainstep collectives`: what the interconnect does, by operation, size and number of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import limits, this_machine, with_fields
from trainstep.cli.run_options import GridOptions
from trainstep.config.collective import CollectiveConfig
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.records.record import Environment

_SIZES: dict[str, list[float]] = {
    "gloo": [0.001, 0.016, 0.25, 1, 4, 16],
    "nccl": [0.001, 0.016, 0.25, 1, 4, 16, 64, 256, 1024],
}
"""MiB: small ones for the latency, large ones for the bandwidth."""
_WITHOUT_A_GPU = "--backend gloo --device cpu"
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    "cpu": {"mib": _SIZES["gloo"], "ranks": [2]},
    "cuda": {"backend": ["nccl"], "mib": _SIZES["nccl"], "ranks": ["all GPUs"]},
}


@with_fields(CollectiveConfig, _IN_HELP)
def collectives(
    *,
    kib: str | None = None,
    compare: str | None = None,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float = 600.0,
    json: Annotated[bool, Parameter(negative=())] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time collectives: bandwidth by size, latency, slowest and fastest rank, share of the link where its speed is known.

    Without options: all-reduce by NCCL over all GPUs where there are two or more, else by gloo between two processes on the CPU.
    Each call starts from a barrier; every rank times its own, and the slowest rank's time is the cell's.

    Examples:

        trainstep collectives

        trainstep collectives --backend gloo --ranks 2,4,6 --mib 1,16,64 --kib 1,64

        trainstep collectives --backend nccl --ranks 2,4,8 --operation all_reduce,all_gather,reduce_scatter --mib 1,64,1024

        trainstep collectives --compare dtype --dtype fp32,bf16 --mib 16 --page report.html

    Parameters
    ----------
    kib
        Sizes in KiB, beside those in MiB.
    compare
        The option whose values are compared: their processes take turns, so that drift falls on all alike.
    out
        File of records to append to; by default a new one under ./runs/.
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    grid = grid_from_text(fields)
    bounds = limits(timeout_s, None)
    asked_device = ",".join(map(str, grid.pop("device", []))) or _device_of(grid)
    sends_between_gpus = "nccl" in grid.get("backend", ())
    here, device = this_machine(
        asked_device, instead=_WITHOUT_A_GPU if sends_between_gpus else "--device cpu", forks=False
    )
    grid = _with_defaults(grid, _sizes_in_mib(kib), device, here)
    _check_gpus(grid, device, here)
    if device == "cuda" and grid["backend"] == ["gloo"] and fields.get("device") is None:
        device = "cpu"
    groups = groups_along(expand({"workload": ["collective"], **grid}, {"device": device}), compare)

    from trainstep.cli.cells import check_page, run_here, show, unfinished
    from trainstep.cli.dry_run import show_cells

    store = how.store(out, "collectives")
    check_page(page, store.path)
    if how.dry_run:
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=json)
    records = run_here(groups, store, bounds, how, here=here)
    code = show(records, store, page, compare=compare, as_json=json, every=how.every)
    return unfinished(groups, records, store, how) or code


def _device_of(grid: Mapping[str, Sequence[Any]]) -> str | None:
    """Gloo alone needs no GPU, nccl needs one; None where neither is said."""
    backends = grid.get("backend")
    if backends is None:
        return None
    return "cuda" if "nccl" in backends else "cpu"


def _with_defaults(
    grid: Mapping[str, list[Any]], small_mib: list[float], device: str, here: Environment
) -> dict[str, list[Any]]:
    """The grid with what it leaves open, in an order that lets cells of the same ranks follow each other."""
    several = device == "cuda" and here.gpu_count > 1
    backend = grid.get("backend", ["nccl" if several else "gloo"])
    ranks = grid.get("ranks", [here.gpu_count if several and "nccl" in backend else 2])
    asked_mib = small_mib + grid.get("mib", [])
    mib = asked_mib or _SIZES["nccl" if "nccl" in backend else "gloo"]
    rest = {name: values for name, values in grid.items() if name not in ("backend", "ranks", "mib")}
    return {"backend": backend, "ranks": ranks, **rest, "mib": mib}


def _sizes_in_mib(kib: str | None) -> list[float]:
    sizes = grid_from_text({"kib": kib}).get("kib", [])
    for size in sizes:
        if not isinstance(size, int | float) or not size > 0:
            raise ValueError(f"kib: must be positive numbers, not {size!r}")
    return [size / 1024 for size in sizes]


def _check_gpus(grid: Mapping[str, list[Any]], device: str, here: Environment) -> None:
    """More NCCL ranks than GPUs are bad input, not cells that failed."""
    numbers = [ranks for ranks in grid["ranks"] if isinstance(ranks, int)]
    most = max(numbers, default=0)
    if device == "cuda" and "nccl" in grid["backend"] and most > here.gpu_count:
        raise ValueError(
            f"ranks: {most} NCCL ranks need a GPU each, and {here.gpu_count} {'is' if here.gpu_count == 1 else 'are'} visible; "
            f"take fewer, or the CPU: trainstep collectives --backend gloo --ranks {most}"
        )
