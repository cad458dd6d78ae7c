"""`trainstep numerics`: what each precision does to a model's numbers, beside what it costs."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import check_cells, limits, this_machine, with_fields
from trainstep.cli.run_options import GridOptions
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.numerics import NumericsConfig

_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cpu": {
        "model": ["toy", "tiny"],
        "context": [64],
        "precision": ["fp32", "bf16_autocast", "fp16_autocast", "bf16"],
    },
    "cuda": {
        "model": ["toy", "small"],
        "precision": ["fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16"],
    },
}


@with_fields(NumericsConfig, _DEFAULTS)
def numerics(
    *,
    out: Path | None = None,
    page: Path | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Hold each precision's logits, loss and gradients to fp64: same weights, same batch, beside the time of a step.

    Also: which dtype each module computes in, and why autocast had no effect where it had none; how much of fp16's
    gradients is lost without a scaled loss, and where GradScaler settles; what sums lose in 16 bits.

    Without options: the toy and a tiny model at context 64, on a GPU small at 256, in every precision that the device has.

    Examples:

        trainstep numerics

        trainstep numerics --model small --precision fp32,bf16_autocast --context 512

        trainstep numerics --model my_package.my_module:build --page report.html

        trainstep report runs/numerics.jsonl --format markdown

    Parameters
    ----------
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
    grid = {"workload": ["numerics"], **_DEFAULTS[device], **grid}
    cells = expand(grid, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, None)

    from trainstep.cli.cells import check_page, run_here, show, unfinished
    from trainstep.cli.dry_run import show_cells

    store = how.store(out, "numerics")
    check_page(page, store.path)
    if how.dry_run:
        return show_cells(groups, store, here=here, anew=not how.resume, as_json=json)
    records = run_here(groups, store, bounds, how, here=here)
    code = show(records, store, page, as_json=json, every=how.every)
    return unfinished(groups, records, store, how) or code
