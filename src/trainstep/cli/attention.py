"""`trainstep attention`: which attention is fastest here, what it holds in memory, and whether it is right."""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import check_cells, limits, this_machine, with_fields
from trainstep.cli.run_options import GridOptions
from trainstep.config.attention import IMPLEMENTATIONS, PACKAGES, TILE_FIELDS, AttentionConfig
from trainstep.config.cell import Cell
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.parsing import build_config

_ON_A_CPU = (
    "On a CPU trainstep's attention is algorithm.py, its kernels' algorithm in PyTorch: no measure of the kernels."
)
_SLOW_TO_COMPILE = ("plain_compiled",)
"""Left out on a CPU unless asked for: a compiler of C++ takes longer than everything else."""
_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cpu": {"seq": [128, 512], "batch": [1], "heads": [4], "steps": [10]},
    "cuda": {"seq": [1024, 4096], "dtype": ["bf16"]},
}
"""Something small on a CPU, published sizes on a GPU."""
_IN_HELP = {device: {**fields, "implementation": ["all that run here"]} for device, fields in _DEFAULTS.items()}


@with_fields(AttentionConfig, _IN_HELP)
def attention(
    *,
    compare: str | None = None,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time implementations of attention on the same inputs, with their memory, their error, and what really ran.

    Without options: every implementation that runs here, forward and backward, at two lengths. One that does not take a case,
    or runs out of memory, is a cell with its reason; the table of what memory is needed stands below. flash_attn and
    flash_attn_4 take part where the packages flash-attn and flash-attn-4 are installed.

    trainstep is our own FlashAttention; flash is another name of it, here and in `trainstep bench --attention`. Its tiles come
    from a table; --block-q, --block-k, --num-warps and --num-stages put others in their place, for whole passes. To search
    for the fastest tiles of each kernel, use `trainstep tune`.

    Examples:

        trainstep attention --seq 1024,16384 --head-dim 64,128 --dtype bf16

        trainstep attention --implementation plain,trainstep --direction forward,backward --mask causal,full

        trainstep attention --compare implementation --implementation sdpa_flash,trainstep --steps 40

        trainstep attention --block-q 64,128 --block-k 32,64,128 --direction forward

    Parameters
    ----------
    compare
        The option whose values are compared: their processes take turns, so that drift falls on all alike.
    out
        File of records to append to; by default a new one under ./runs/.
    page
        Also write the page here, over an earlier page of trainstep's but over no other file.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        Memory a CPU cell may take; by default 90 % of the machine's.
    json
        Print JSON: `answer`, and the tables as `rows` with plain numbers, units in the names.
    """
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    bounds = limits(timeout_s, memory_limit_gib)
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    cells = expand({"workload": ["attention"], **with_defaults(grid, device)}, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, compare)

    from trainstep.cli.cells import check_page, run_here, show, unfinished
    from trainstep.cli.dry_run import show_cells

    store = how.store(out, "attention")
    check_page(page, store.path)
    if how.dry_run:
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=json)
    records = run_here(groups, store, bounds, how, here=here)
    code = show(records, store, page, compare=compare, as_json=json, every=how.every)
    if _runs_algorithm(cells):
        print(_ON_A_CPU, file=sys.stderr if json else sys.stdout)
    return unfinished(groups, records, store, how) or code


def with_defaults(grid: Mapping[str, list[Any]], device: str) -> dict[str, list[Any]]:
    """The grid with what it leaves open."""
    no_heads = {"heads": [1]} if grid.get("layout") == ["BSD"] else {}
    full = {**_DEFAULTS[device], **no_heads, **grid}
    return {**full, "implementation": grid.get("implementation") or runnable(full, device)}


def runnable(grid: Mapping[str, list[Any]], device: str) -> list[str]:
    """Implementations that take at least one of the grid's dtypes here; trainstep alone where its tiles are set."""
    if any(name in grid for name in TILE_FIELDS):
        return ["trainstep"]
    absent = [name for name, package in PACKAGES.items() if not _is_installed(package)]
    left_out = [*absent, *(_SLOW_TO_COMPILE if device == "cpu" else ())]
    known = [name for name in IMPLEMENTATIONS if name not in left_out]
    return [
        name
        for name in known
        if any(
            build_config("attention", {"implementation": name, "dtype": dtype, "device": device}).refusal is None
            for dtype in grid.get("dtype", ["fp32"])
        )
    ]


def _is_installed(package: str) -> bool:
    """By its metadata: two packages share the module flash_attn, and importing either loads torch."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _runs_algorithm(cells: Sequence[Cell]) -> bool:
    return any((cell.config["device"], cell.config["implementation"]) == ("cpu", "trainstep") for cell in cells)
