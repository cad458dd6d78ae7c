"""What a page shows of collectives: bus bandwidth and time against size, a line a number of ranks and dtype."""

from collections.abc import Callable, Sequence
from typing import Any

from trainstep.records.bandwidth import bandwidth
from trainstep.records.record import Record
from trainstep.records.summary import summarize
from trainstep.report.charts import (
    MAXIMUM_PANELS,
    Chart,
    Panels,
    Section,
    label,
    line,
    lines_of,
    logarithmic,
    panel_columns,
    series_style,
    short_labels,
)
from trainstep.report.collectives_tables import LABEL, collective_rows, collective_tables, fit_of, series_of, size_words
from trainstep.report.forms import in_ms, milliseconds, seconds_words, three_digits
from trainstep.report.rows import Row, words

Key = tuple[Any, ...]


def collective_sections(rows: Sequence[Row]) -> list[Section]:
    """The part of the page that these records fill."""
    mine = collective_rows(rows)
    if not mine:
        return []
    done = {
        key: held for key, each in series_of(mine).items() if (held := [row for row in each if bandwidth(row.record)])
    }
    charts = (
        [
            _chart(done, "Bus bandwidth by size", "bus bandwidth (GB/s)", _bus, "Higher is better. {}"),
            _chart(done, "Time of a call by size", "time of a call (ms)", _ms, "Lower is better. {}"),
        ]
        if done
        else []
    )
    return [
        Section(
            title="Collectives",
            paragraphs=tuple(_sentences(done)),
            charts=tuple(charts),
            tables=tuple(collective_tables(mine)),
        )
    ]


def _sentences(series: dict[Key, list[Row]]) -> list[str]:
    """The best bandwidth of each series and the latency that it fits."""
    said = []
    for key, rows in series.items():
        speeds = [(found.bus_bytes_per_s, row) for row in rows if (found := bandwidth(row.record))]
        best, row = max(speeds, key=lambda pair: pair[0])
        size = size_words(row.record.fact("payload_bytes"))
        sentence = f"{_name(key)}: at most {three_digits(best / 1e9)} GB/s on the bus, at {size}"
        fit = fit_of(rows)
        if fit and fit.alpha_s > 0:
            sentence += f"; a call takes {seconds_words(fit.alpha_s)} whatever its size"
        said.append(f"{sentence}.")
    return said


def _chart(
    series: dict[Key, list[Row]], title: str, y_title: str, value: Callable[[Record], float], caption: str
) -> Chart:
    """A panel an operation and backend, a line for what else differs; both axes logarithmic."""
    panels_of = list(dict.fromkeys(key[:2] for key in series))[:MAXIMUM_PANELS]
    names = dict(zip(series, short_labels([_rest(key, series) for key in series]), strict=True))
    styles = {name: series_style(index) for index, name in enumerate(dict.fromkeys(names.values()))}
    records = [row.record for rows in series.values() for row in rows]
    panels = Panels(
        titles=short_labels([" ".join(map(str, one)) for one in panels_of]),
        columns=min(panel_columns(len(panels_of), 8), 2),
        x_title="size (MiB)",
        y_title=y_title,
        axis=logarithmic([value(record) for record in records]),
        x_axis=logarithmic([_mib(record) for record in records]),
    )
    for key, rows in series.items():
        if key[:2] not in panels_of:
            continue
        hover = [lines_of(label(_name(key)), label(_words(row.record))) for row in rows]
        x, y = [_mib(row.record) for row in rows], [value(row.record) for row in rows]
        panels.add(panels_of.index(key[:2]), line(names[key], x, y, style=styles[names[key]], hover=hover))
    return panels.chart(title, caption.format("Each mark is the slowest rank's median over the calls."))


def _rest(key: Key, series: dict[Key, list[Row]]) -> str:
    """What tells the series of a panel apart: always the ranks, the rest where it differs."""
    said = [f"{key[2]} rank{'s' if key[2] > 1 else ''}"]
    said += [words(key[place]) for place in range(3, len(key)) if len({one[place] for one in series}) > 1]
    return " ".join(said)


def _name(key: Key) -> str:
    named = dict(zip(LABEL, key, strict=False))
    return f"{named['operation']} by {named['backend']}, {named['ranks']} ranks, {named['dtype']}"


def _mib(record: Record) -> float:
    return float(record.fact("payload_bytes")) / 2**20


def _ms(record: Record) -> float:
    return in_ms(summarize(record.samples["time"]).median)


def _bus(record: Record) -> float:
    found = bandwidth(record)
    return found.bus_bytes_per_s / 1e9 if found else 0.0


def _words(record: Record) -> str:
    time = summarize(record.samples["time"])
    return (
        f"{size_words(record.fact('payload_bytes'))}: {milliseconds(time.median, time.std)} ms, "
        f"{three_digits(_bus(record))} GB/s on the bus"
    )
