"""Collectives as tables and charts: bandwidth by size with the slowest and fastest rank, and what latency and bandwidth they fit;
on the page, bus bandwidth and time against size, a line a number of ranks and dtype."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.records.bandwidth import LatencyFit, bandwidth, fit_latency
from trainstep.records.ranks import rank_spread
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
from trainstep.report.forms import (
    COUNT,
    DIGITS,
    GIGA,
    MS_STD,
    PERCENT,
    RATIO,
    TEXT,
    Form,
    in_ms,
    needed_words,
    seconds_words,
    three_digits,
)
from trainstep.report.ratios import mean_column, median_and_range, median_words
from trainstep.report.rows import Row, grouped, machines, quantities, words
from trainstep.report.tables import Column, Line, Table, doubts_column, point_columns, rank_columns, row_of

LABEL = ("operation", "backend", "ranks", "dtype")
_HOW = (
    "Time: the slowest rank's, median ± half the interquartile range. Algorithm bandwidth: size over median time; bus "
    "bandwidth: what a ring's busiest rank sends over it, to hold against one link in one direction."
)
_FIT = (
    "Median time of a call = latency + size / bandwidth, fitted over the sizes of one run by least squares of relative residuals. "
    "A negative latency says that these sizes do not show one."
)
_ALONE = "Times of one rank are the cost of the call: nothing is sent."
Key = tuple[Any, ...]
"""What the sizes of a series share: LABEL, then device, machine and file."""


def series_of(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """Rows that differ in size alone, smallest first."""
    labels = {environment: label for label, environment in machines(rows).items()}

    def key_of(row: Row) -> Key:
        config, environment = row.record.config, row.record.environment
        machine = labels.get(environment, environment.gpu or environment.cpu)
        return *(config[name] for name in LABEL), config["device"], machine, row.file

    return {
        key: sorted(alike, key=lambda row: row.record.config["mib"]) for key, alike in grouped(rows, key_of).items()
    }


def fit_of(rows: Sequence[Row]) -> LatencyFit | None:
    """Of the cells that did not fail."""
    done = [row.record for row in rows if bandwidth(row.record)]
    return fit_latency(
        [record.fact("payload_bytes") for record in done], [summarize(record.samples["time"]).median for record in done]
    )


def collective_tables(rows: Sequence[Row]) -> list[Table]:
    """Every cell, and what each series fits."""
    return [cells_table(rows), *fit_tables(rows)]


def cells_table(rows: Sequence[Row]) -> Table:
    """One row a cell."""
    alone = [_ALONE] if any(row.record.config["ranks"] == 1 for row in rows) else []
    lines = [Line(row, _numbers(row)) for row in rows]
    columns = [
        *_NAMED,
        *point_columns(rows, without=(*LABEL, "mib")),
        Column("size", Form(text=size_words), _asked_bytes, failed=None, names=True),
        Column("time (ms)", MS_STD, median_and_range("time")),
        *rank_columns("time"),
        Column("algorithm (GB/s)", GIGA, "algorithm_bytes_per_s", more=True),
        Column("bus (GB/s)", GIGA, "bus_bytes_per_s"),
        Column("of the link (%)", PERCENT, "link_ratio", optional=True),
        mean_column("time", "time"),
        doubts_column("doubts"),
    ]
    note = " ".join([_HOW, *alone, *_links(rows)])
    return Table.of("Collectives", lines, columns, note=note, raw=[line.of for line in lines])


def fit_tables(rows: Sequence[Row]) -> list[Table]:
    """A line a series with enough sizes."""
    lines = [Line(alike[0], fit) for alike in series_of(rows).values() if (fit := fit_of(alike))]
    columns = [
        *_NAMED,
        Column("sizes", COUNT),
        Column("latency (µs)", DIGITS, lambda line: line.of.alpha_s * 1e6),
        Column("bandwidth (GB/s)", DIGITS, lambda line: line.of.beta_bytes_per_s / 1e9),
        Column("R²", RATIO, "r_squared"),
        Column("off by at most (%)", PERCENT, "worst"),
    ]
    return [Table.of("Latency and bandwidth", lines, columns, note=_FIT)] if lines else []


def _named(name: str) -> Column:
    form = Form(text=str, sort=float) if name == "ranks" else TEXT
    return Column(name, form, lambda row: row_of(row).record.config[name], failed=None, names=True)


_NAMED = [_named(name) for name in LABEL]


def _asked_bytes(line: Line) -> int:
    """Also of a cell that failed before it said its bytes."""
    return int(line.of["payload_bytes"] or line.of["mib"] * 2**20)


def size_words(payload_bytes: float) -> str:
    """`1.00 KiB`, `16.0 MiB` or `1.00 GiB`."""
    if payload_bytes < 2**20:
        return f"{three_digits(payload_bytes / 2**10)} KiB"
    return needed_words(payload_bytes)


def _links(rows: Sequence[Row]) -> list[str]:
    """Where the link's speed is from."""
    sources = {found.link_source for row in rows if (found := bandwidth(row.record)) and found.link_source}
    said = f"The link: NVLink one way, {' and '.join(sorted(sources))}; a switch that adds up by itself can pass it."
    return [said] if sources else []


def _numbers(row: Row) -> Mapping[str, Any]:
    """The row's quantities, with what is computed here."""
    record = row.record
    numbers = {name: record.config[name] for name in (*LABEL, "mib")} | quantities(row)
    numbers |= {name: record.fact(name) for name in ("payload_bytes", "ring_bytes")}
    speed, spread = bandwidth(record), rank_spread(record, "time")
    if speed is not None:
        numbers |= {
            "algorithm_bytes_per_s": speed.algorithm_bytes_per_s,
            "bus_bytes_per_s": speed.bus_bytes_per_s,
            "link_ratio": speed.link_share,
        }
    for end in ("slowest", "fastest") if spread else ():
        numbers |= {f"{end}_rank": getattr(spread, end), f"{end}_rank_median_s": getattr(spread, f"{end}_value")}
    return numbers


def collective_sections(rows: Sequence[Row]) -> list[Section]:
    """The part of the page that these records fill."""
    ran = {key: [row for row in alike if bandwidth(row.record)] for key, alike in series_of(rows).items()}
    done = {key: alike for key, alike in ran.items() if alike}
    charts = tuple(_chart(done, *drawn) for drawn in (_DRAWN if done else ()))
    said = tuple(_sentence(key, alike) for key, alike in done.items())
    return [Section(title="Collectives", paragraphs=said, charts=charts, tables=tuple(collective_tables(rows)))]


def _sentence(key: Key, rows: Sequence[Row]) -> str:
    """The best bandwidth of a series and the latency that it fits."""
    best = max((row.record for row in rows), key=_bus)
    sentence = (
        f"{_name(key)}: at most {three_digits(_bus(best))} GB/s on the bus, at {size_words(best.fact('payload_bytes'))}"
    )
    fit = fit_of(rows)
    latency = f"; a call takes {seconds_words(fit.alpha_s)} whatever its size" if fit and fit.alpha_s > 0 else ""
    return f"{sentence}{latency}."


def _chart(
    series: dict[Key, list[Row]], title: str, y_title: str, value: Callable[[Record], float], better: str
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
        if key[:2] in panels_of:
            hover = [lines_of(label(_name(key)), label(_words(row.record))) for row in rows]
            x, y = [_mib(row.record) for row in rows], [value(row.record) for row in rows]
            panels.add(panels_of.index(key[:2]), line(names[key], x, y, style=styles[names[key]], hover=hover))
    return panels.chart(title, f"{better} is better. Each mark is the slowest rank's median over the calls.")


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


def _bus(record: Record) -> float:
    found = bandwidth(record)
    return found.bus_bytes_per_s / 1e9 if found else 0.0


def _ms(record: Record) -> float:
    return in_ms(summarize(record.samples["time"]).median)


_DRAWN = (
    ("Bus bandwidth by size", "bus bandwidth (GB/s)", _bus, "Higher"),
    ("Time of a call by size", "time of a call (ms)", _ms, "Lower"),
)


def _words(record: Record) -> str:
    size = size_words(record.fact("payload_bytes"))
    return f"{size}: {median_words(record, 'time')}, {three_digits(_bus(record))} GB/s on the bus"
