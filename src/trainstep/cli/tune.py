"""`trainstep tune`: the fastest tiles of the attention kernels on this GPU, as rows for ops/flash_attention/tiles.py."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trainstep.cli.options import limits, this_machine, with_fields
from trainstep.cli.run_options import RunOptions
from trainstep.config.attention_tiles import GENERATED, KERNELS, AttentionTilesConfig
from trainstep.config.cell import Cell
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.records.record import Record
from trainstep.records.store import Store

_NO_GPU = "device: tune needs a GPU, and none is visible here: tiles are chosen by timing on the GPU they are for"
_NO_INTERPRETER = "device: a CPU runs these kernels in Triton's interpreter only, for tests; set TRITON_INTERPRET=1"


_WHEN_NOT_ASKED = {
    "arithmetic": "bf16",
    "head_dim": "64,128",
    "mask": "causal",
    "kernel": ",".join(KERNELS),
    "shape": "4x16x4096,1x16x16384",
}
"""In this order, so that neighbouring cells share compiled kernels."""
_IN_HELP = {
    device: {name: [text] for name, text in {**_WHEN_NOT_ASKED, "device": "cuda"}.items()} for device in ("cpu", "cuda")
}


@with_fields(AttentionTilesConfig, _IN_HELP)
def tune(
    *,
    out: Path | None = None,
    top: int = 5,
    timeout_s: float = 600.0,
    allow_mixed: Annotated[bool, Parameter(negative=())] = False,
    retry_failed: Annotated[bool, Parameter(negative=())] = False,
    how: RunOptions = RunOptions(),
    **fields: str | None,
) -> int:
    """Try tiles of the attention kernels: compile and check them side by side, time the right ones in turns, rank them.

    Needs a GPU: tiles are chosen by timing. Without options: every kernel in bf16, head widths 64 and 128, causal, at two
    lengths. Prints, last, rows to paste into the table of tiles, each for all lengths and masks it was asked for. To time
    whole passes at a tile of your own, use `trainstep attention --block-q 64 --block-k 64`.

    Examples:

        trainstep tune

        trainstep tune --head-dim 64,128 --mask causal,full --shape 4x16x4096,1x16x16384

        trainstep tune --arithmetic tf32x3,ieee --shape 1x1x16384 --out runs/tiles.jsonl

        trainstep tune --kernel forward --head-dim 64 --candidates 128x64x8x3,64x64x4x3x24

    Parameters
    ----------
    out
        File of records: cells it holds are not run again. By default a new one under ./runs/.
    top
        Candidates shown of each cell; the records hold all.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    allow_mixed
        Go on although the records there were made with another GPU, torch or commit.
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
    here, found = this_machine("cpu" if on_cpu else "auto", forks=not how.dry_run)
    if found == "cpu" and not on_cpu:
        raise ValueError(_NO_GPU)

    from trainstep.cli.cells import run_cells, unfinished
    from trainstep.measure.executor_local import run_groups

    store = how.store(out, "tune")
    groups = groups_along(cells, None)
    if how.dry_run:
        from trainstep.cli.dry_run import show_cells

        return show_cells(groups, store, here=here, allow_mixed=allow_mixed, retry_failed=retry_failed)
    records = run_cells(
        groups,
        store,
        lambda waiting, tell: run_groups(waiting, bounds, tell),
        here=here,
        how=how,
        allow_mixed=allow_mixed,
        retry_failed=retry_failed,
    )
    code = _show(records, cells, store, top, every=how.every)
    return unfinished(groups, records, store, how) or code


def _cells(fields: Mapping[str, str | None]) -> list[Cell]:
    """The grid; the commas of --candidates part tiles, not cells."""
    asked = {name: text for name, text in fields.items() if text is not None}
    candidates = asked.pop("candidates", GENERATED)
    grid = grid_from_text({**_WHEN_NOT_ASKED, **asked})
    return expand({"workload": ["attention_tiles"], **grid, "candidates": [candidates]}, {})


def _show(records: list[Record], cells: list[Cell], store: Store, top: int, *, every: bool) -> int:
    """The answer, the ranking of each cell, what failed, where the records are and, last, the rows. Returns the exit code."""
    from trainstep.cli.streams import outliving_reader
    from trainstep.report.answer_text import print_answers
    from trainstep.report.answers import answers
    from trainstep.report.notes import notes
    from trainstep.report.rows import rows_of
    from trainstep.report.terminal import print_tables
    from trainstep.report.tiles_page import summary_table, table_rows, tile_tables
    from trainstep.report.visible import one_line

    rows = rows_of([(str(store.path), record) for record in records])
    failed = [row for row in rows if row.record.failure is not None]
    with outliving_reader(sys.stdout):
        print_answers(answers(rows), sys.stdout)
        print_tables([*tile_tables(rows, most=top), *summary_table(rows)], notes(rows), sys.stdout, every=every)
        for row in failed:
            print(one_line(f"{row.label()}: {row.record.failure.message if row.record.failure else ''}"))
        print(f"records: {store.path}\n")
        print(table_rows(rows, record=str(store.path)), flush=True)
    return 3 if failed or len(records) < len(cells) else 0
