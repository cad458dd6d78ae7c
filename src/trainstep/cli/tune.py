"""`trainstep tune`: find the fastest tiles of the attention kernels, as rows for ops/flash_attention/portable/tiles.py."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainstep.cli.options import RunOptions, limits, this_machine, with_fields
from trainstep.config.attention import GENERATED, KERNELS, AttentionTilesConfig
from trainstep.config.grid import Cell, expand, grid_from_text, groups_along
from trainstep.records.record import Record
from trainstep.records.store import Store

_NO_GPU = "device: tune needs a GPU, but none is visible here: tiles are chosen by timing them on their GPU"
_NO_INTERPRETER = "device: a CPU runs these kernels in Triton's interpreter only, for tests; set TRITON_INTERPRET=1"
_DEFAULTS = {
    "arithmetic": "bf16",
    "head_dim": "64,128",
    "mask": "causal",
    "kernel": ",".join(KERNELS),
    "shape": "4x16x4096,1x16x16384",
}
"""The order lets neighbouring cells share compiled kernels."""
_IN_HELP = {
    device: {name: [text] for name, text in {**_DEFAULTS, "device": "cuda"}.items()} for device in ("cpu", "cuda")
}


@with_fields(AttentionTilesConfig, _IN_HELP)
def tune(
    *,
    out: Path | None = None,
    top: int = 5,
    timeout_s: float = 600.0,
    retry_failed: Annotated[bool, Parameter(negative=())] = False,
    how: RunOptions = RunOptions(),
    **fields: str | None,
) -> int:
    """Try tiles of the attention kernels: compile and check them in parallel, time the correct tiles interleaved, rank them.

    This needs a GPU. Without options: every kernel in bf16, head widths 64 and 128, causal, at two lengths. The last output is
    rows to paste into the table of tiles, each for all given lengths and masks. To time whole passes with a tile of your own, use
    `trainstep attention --block-q 64 --block-k 64`.

    Examples:

        trainstep tune

        trainstep tune --head-dim 64,128 --mask causal,full --shape 4x16x4096,1x16x16384

        trainstep tune --arithmetic tf32x3,ieee --shape 1x1x16384 --out runs/tiles.jsonl

        trainstep tune --kernel forward --head-dim 64 --candidates 128x64x8x3,64x64x4x3x24

    Parameters
    ----------
    out
        File of records; cells that it has are not run again. By default a new file in ./runs/.
    top
        Number of candidates shown for each cell; the records have all.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    retry_failed
        Run cells again that crashed, were killed or timed out.
    """
    if top < 1:
        raise ValueError(f"top: must be at least 1, not {top}")
    if retry_failed and out is None:
        raise ValueError("retry_failed: a new file holds no cell that failed; name the file with --out")
    cells = _cells(fields)
    bounds = limits(timeout_s, None)
    on_cpu = fields.get("device") == "cpu"
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(_NO_INTERPRETER)
    here, device = this_machine("cpu" if on_cpu else "auto", forks=not how.dry_run)
    if device == "cpu" and not on_cpu:
        raise ValueError(_NO_GPU)

    from trainstep.cli.cells import run_cells, show_dry_run, unfinished
    from trainstep.measure.harness.local import run_groups

    store = how.store(out, "tune")
    groups = groups_along(cells, None)
    if how.dry_run:
        return show_dry_run(groups, store, environment=here, options=how, retry_failed=retry_failed)
    records = run_cells(
        groups,
        store,
        lambda waiting, tell: run_groups(waiting, bounds, tell),
        environment=here,
        options=how,
        retry_failed=retry_failed,
    )
    code = _show(records, cells, store, top, every=how.every)
    return unfinished(groups, records, store, how) or code


def _cells(fields: Mapping[str, str | None]) -> list[Cell]:
    options = {name: text for name, text in fields.items() if text is not None}
    candidates = options.pop("candidates", GENERATED)  # its commas separate tiles, not cells
    grid = grid_from_text({**_DEFAULTS, **options})
    return expand({"workload": ["attention_tiles"], **grid, "candidates": [candidates]}, {})


def _show(records: list[Record], cells: list[Cell], store: Store, top: int, *, every: bool) -> int:
    """Print the answer, each cell's ranking, the failures, the path of the records and the table's rows. Returns the exit code."""
    from trainstep.cli.cells import FAULTED
    from trainstep.cli.streams import outliving_reader
    from trainstep.report.answers import answers
    from trainstep.report.attention.tiles import summary_table, table_rows, tile_tables
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.notes import notes
    from trainstep.report.kit.rows import rows_of
    from trainstep.report.kit.terminal import print_tables
    from trainstep.report.kit.visible import one_line

    rows = rows_of([(str(store.path), record) for record in records])
    failed = [row for row in rows if row.record.failure is not None]
    with outliving_reader(sys.stdout):
        print_answers(answers(rows), sys.stdout)
        print_tables([*tile_tables(rows, most=top), *summary_table(rows)], notes(rows), sys.stdout, every=every)
        for row in failed:
            print(one_line(f"{row.label()}: {row.record.failure.message if row.record.failure else ''}"))
        print(f"records: {store.path}\n")
        print(table_rows(rows, record=str(store.path)), flush=True)
    return FAULTED if failed or len(records) < len(cells) else 0
