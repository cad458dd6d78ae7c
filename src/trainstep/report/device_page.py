"""What a page shows of the device: the roofline of each profiled cell, what bounds its work, and the numbers."""

from collections.abc import Sequence

from trainstep.report.device_ceilings import Ceilings, ceilings_of
from trainstep.report.device_roofline import roofline
from trainstep.report.device_words import bound_words, device_sentences
from trainstep.report.device_work import CountedWork, work_of
from trainstep.report.forms import ABSENT, in_ms, milliseconds, percent, rate_words, three_digits
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.profile_tables import DETAILED_CELLS, profile_rows
from trainstep.report.rows import Row
from trainstep.report.section import Section
from trainstep.report.tables import Entry, Table

_COLUMNS = (
    Column(title="work", help="kinds of work whose FLOPs and bytes have a formula"),
    Column(title="phase"),
    Column(title="calls", number=True, help="kernels a step; on a CPU ops"),
    Column(title="time (ms)", number=True, help="of a step"),
    Column(title="GFLOP", number=True, help="floating-point operations of a step, from the shapes"),
    Column(title="GB", number=True, help="the least bytes read and written in a step, from the shapes"),
    Column(title="FLOP/byte", number=True),
    Column(title="FLOP/s", number=True, help="achieved"),
    Column(title="bytes/s", number=True, help="achieved"),
    Column(title="of the roof (%)", number=True, help="of the most FLOP/s that its FLOP per byte allow here"),
    Column(title="bound by"),
)


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
    points = point_columns(cells)
    entries = []
    for row in cells:
        ceilings = ceilings_of(row.record, rows)
        start = [make(row) for _, make in points]
        entries += [(*start, *_entries(one, ceilings)) for one in work_of(row.record)]
    if not entries:
        return []
    columns = (*(column for column, _ in points), *_COLUMNS)
    return [Table(title="Work against its ceilings", columns=columns, entries=tuple(entries))]


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


def _entries(one: CountedWork, ceilings: Ceilings | None) -> tuple[Entry, ...]:
    share = ceilings.share(one) if ceilings else None
    return (
        Entry(text=one.name),
        Entry(text=one.phase),
        Entry(text=f"{one.calls:,.4g}", sort=one.calls),
        Entry(text=milliseconds(one.time_s), sort=in_ms(one.time_s)),
        Entry(text=three_digits(one.flops / 1e9), sort=one.flops),
        Entry(text=three_digits(one.bytes / 1e9), sort=one.bytes),
        Entry(text=three_digits(one.intensity), sort=one.intensity),
        Entry(text=rate_words(one.flops_per_s, "flop/s"), sort=one.flops_per_s),
        Entry(text=rate_words(one.bytes_per_s, "bytes/s"), sort=one.bytes_per_s),
        Entry(text=ABSENT) if share is None else Entry(text=percent(share), sort=share),
        Entry(text=bound_words(one, ceilings) if ceilings else ABSENT),
    )
