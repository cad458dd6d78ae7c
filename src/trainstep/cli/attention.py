"""`trainstep attention`: which attention is fastest here, how much memory it needs, and whether it is right."""

import sys
from collections.abc import Mapping
from typing import Any

from trainstep.cli.options import GridOptions, check_cells, is_installed, limits, this_machine, with_fields
from trainstep.config.attention import IMPLEMENTATIONS, PACKAGES, TILE_FIELDS, AttentionConfig
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.parsing import build_config

_ON_A_CPU = (
    "On a CPU, trainstep's attention is algorithm.py, the kernels' algorithm in PyTorch: the kernels are not measured."
)
_SLOW_TO_COMPILE = ("plain_compiled",)
"""Left out on a CPU unless requested: the C++ compiler takes longer than everything else."""
_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cpu": {"seq": [128, 512], "batch": [1], "heads": [4], "steps": [10]},
    "cuda": {"seq": [1024, 4096], "dtype": ["bf16"]},
}
"""Small sizes on a CPU, published sizes on a GPU."""
_IN_HELP = {device: {**fields, "implementation": ["all that run here"]} for device, fields in _DEFAULTS.items()}


@with_fields(AttentionConfig, _IN_HELP)
def attention(
    *,
    compare: str | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time implementations of attention on the same inputs, with their memory, their error, and the kernels that ran.

    Without options: every implementation that runs here, forward and backward, at two lengths. An implementation that cannot run
    a case, or runs out of memory, is a cell with its reason; a table of the memory that is needed follows. flash_attn and
    flash_attn_4 run where the packages flash-attn and flash-attn-4 are installed.

    trainstep is our own FlashAttention; flash is another name for it, here and in `trainstep bench --attention`. Its tiles come
    from a table; --block-q, --block-k, --num-warps and --num-stages replace them for whole passes. To search for the fastest
    tiles of each kernel, use `trainstep tune`.

    Examples:

        trainstep attention --seq 1024,16384 --head-dim 64,128 --dtype bf16

        trainstep attention --implementation plain,trainstep --direction forward,backward --mask causal,full

        trainstep attention --compare implementation --implementation sdpa_flash,trainstep --steps 40

        trainstep attention --block-q 64,128 --block-k 32,64,128 --direction forward

    Parameters
    ----------
    compare
        The option whose values are compared: their processes are interleaved, so that drift affects all values equally.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        GiB of memory that a CPU cell may use; by default 90 % of the machine's.
    """
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    bounds = limits(timeout_s, memory_limit_gib)
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    cells = expand({"workload": ["attention"], **with_defaults(grid, device)}, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, compare)

    from trainstep.cli.cells import measure_grid

    code = measure_grid(groups, "attention", bounds, how, here, compare=compare)
    on_cpu = any((cell.config["device"], cell.config["implementation"]) == ("cpu", "trainstep") for cell in cells)
    if on_cpu and not how.dry_run:
        print(_ON_A_CPU, file=sys.stderr if how.json else sys.stdout)
    return code


def with_defaults(grid: Mapping[str, list[Any]], device: str) -> dict[str, list[Any]]:
    """The grid, completed with the device's defaults."""
    no_heads = {"heads": [1]} if grid.get("layout") == ["BSD"] else {}
    full = {**_DEFAULTS[device], **no_heads, **grid}
    return {**full, "implementation": grid.get("implementation") or runnable(full, device)}


def runnable(grid: Mapping[str, list[Any]], device: str) -> list[str]:
    """Implementations that can run at least one of the grid's dtypes here; only trainstep if the grid sets its tiles."""
    if any(name in grid for name in TILE_FIELDS):
        return ["trainstep"]
    absent = [name for name, package in PACKAGES.items() if not is_installed(package)]
    left_out = [*absent, *(_SLOW_TO_COMPILE if device == "cpu" else ())]
    return [
        name
        for name in IMPLEMENTATIONS
        if name not in left_out
        and any(
            build_config("attention", {"implementation": name, "dtype": dtype, "device": device}).refusal is None
            for dtype in grid.get("dtype", ["fp32"])
        )
    ]
