"""What a page shows of the device: the roofline of each profiled cell, what bounds its work, and the numbers."""

from collections.abc import Sequence

from trainstep.report.charts import Section
from trainstep.report.device_roofline import roofline
from trainstep.report.device_words import bound_words, device_sentences
from trainstep.report.device_work import ceilings_of, work_of
from trainstep.report.forms import BYTE_RATE, DIGITS, FLOP_RATE, GIGA, MS, PERCENT, TEXT, Form
from trainstep.report.profile_tables import DETAILED_CELLS, HELP, profile_rows
from trainstep.report.rows import Row
from trainstep.report.tables import Column, Line, Table, point_columns


def device_sections(rows: Sequence[Row]) -> list[Section]:
    """The parts of the page that profiles fill: one a cell while they are few, then their numbers in one table."""
    ran = [row for row in profile_rows(rows) if row.record.failure is None and row.record.tables.get("classes")]
    if not ran:
        return []
    if len(ran) > DETAILED_CELLS:
        said = f"Rooflines are drawn for up to {DETAILED_CELLS} cells; this table has the numbers of all {len(ran)}."
        return [Section(title="What bounds the device", paragraphs=(said,), tables=tuple(work_tables(ran, rows)))]
    return [_cell(row, rows, alone=len(ran) == 1) for row in ran]


def work_tables(cells: Sequence[Row], rows: Sequence[Row]) -> list[Table]:
    """Each kind of work of these cells against its ceiling; `rows`: all records, measured ceilings among them."""
    over = {id(row): ceilings_of(row.record, rows) for row in cells}
    lines = [Line(row, work) for row in cells for work in work_of(row.record)]

    def share(line: Line) -> float | None:
        ceilings = over[id(line.row)]
        return ceilings.share(line.of) if ceilings else None

    def bound(line: Line) -> str | None:
        ceilings = over[id(line.row)]
        return bound_words(line.of, ceilings) if ceilings else None

    of_roof = "of the most FLOP/s that its FLOP per byte allow here"
    columns = [
        *point_columns(cells),
        *_WORK,
        Column("of the roof (%)", PERCENT, share, help=of_roof),
        Column("bound by", TEXT, bound),
    ]
    return [Table.of("Work against its ceilings", lines, columns)] if lines else []


def _cell(row: Row, rows: Sequence[Row], *, alone: bool) -> Section:
    work, ceilings = work_of(row.record), ceilings_of(row.record, rows)
    kind = str(row.record.config.get("device"))
    chip = row.record.environment.gpu if kind == "cuda" else row.record.environment.cpu
    return Section(
        title=f"The device, {chip}" if alone else f"The device, {chip}: {row.label()}",
        paragraphs=tuple(device_sentences(row.record, work, ceilings)),
        charts=(roofline(work, ceilings, name=row.label(), kind=kind),) if work else (),
        tables=tuple(work_tables([row], rows)),
    )


_WORK = (
    Column("work", TEXT, "name", help="kinds of work whose FLOPs and bytes have a formula"),
    Column("phase"),
    Column("calls", Form(text=lambda calls: f"{calls:,.4g}"), help="kernels a step; on a CPU ops"),
    Column("time (ms)", MS, "time_s", help="of a step"),
    Column("GFLOP", GIGA, "flops", help=HELP["flops"]),
    Column("GB", GIGA, "bytes", help=HELP["bytes"]),
    Column("FLOP/byte", DIGITS, "intensity"),
    Column("FLOP/s", FLOP_RATE, "flops_per_s", help="achieved"),
    Column("bytes/s", BYTE_RATE, "bytes_per_s", help="achieved"),
)
