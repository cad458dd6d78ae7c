"""`trainstep numerics`: the error that each precision causes in a model, beside its cost in time."""

from typing import Any

from trainstep.cli.options import GridOptions, check_cells, limits, this_machine, with_fields
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.numerics import NumericsConfig

_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cpu": {"model": ["toy", "tiny"], "context": [64], "precision": ["fp32", "bf16_autocast", "fp16_autocast", "bf16"]},
    "cuda": {"model": ["toy", "small"], "precision": ["fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16"]},
}


@with_fields(NumericsConfig, _DEFAULTS)
def numerics(
    *,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Compare each precision's logits, loss and gradients with fp64 (same weights, same batch), and time a step.

    Also shown: the dtype in which each module computes, and why autocast had no effect where it had none; the share of fp16
    gradients that is lost without loss scaling, and the scale at which GradScaler settles; the error of sums in 16 bits.

    Without options: the toy and a tiny model at context 64, on a GPU small at 256, in every precision of the device.

    Examples:

        trainstep numerics

        trainstep numerics --model small --precision fp32,bf16_autocast --context 512

        trainstep numerics --model my_package.my_module:build --page report.html

        trainstep report runs/numerics.jsonl --format markdown

    Parameters
    ----------
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        GiB of memory that a CPU cell may use; by default 90 % of the machine's.
    """
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    bounds = limits(timeout_s, memory_limit_gib)
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    grid = {"workload": ["numerics"], **_DEFAULTS[device], **grid}
    cells = expand(grid, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    from trainstep.cli.cells import measure_grid

    return measure_grid(groups_along(cells, None), "numerics", bounds, how, here)
