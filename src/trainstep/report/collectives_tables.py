"""Collectives as tables and charts: bandwidth by size with the slowest and fastest rank, and what latency and bandwidth they fit;
on the page, bus bandwidth and time against size, a line a number of ranks and dtype."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.records.bandwidth import LatencyFit, bandwidth, fit_latency
from trainstep.records.ranks import rank_spread
from trainstep.records.record import Record
from trainstep.records.summary import doubts, summarize
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
    milliseconds,
    needed_words,
    seconds_words,
    three_digits,
)
from trainstep.report.rows import Row, machines, quantities, words
from trainstep.report.tables import Column, Line, Table, doubts_column, point_columns, rank_columns, row_of

LABEL = ("operation", "backend", "ranks", "dtype")
_HOW = (
    "Time: the slowest rank's, mean ± standard deviation. Algorithm bandwidth: size over median time; bus bandwidth: what a ring's "
    "busiest rank sends over it, to hold against one link in one direction."
)
_FIT = (
    "Median time of a call = latency + size / bandwidth, fitted over the sizes of one run by least squares of relative residuals. "
    "A negative latency says that these sizes do not show one."
)
_ALONE = "Times of one rank are the cost of the call: nothing is sent."
Key = tuple[Any, ...]


def series_of(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that differ in size alone, smallest first: operation, backend, ranks, dtype, device and machine are the key."""
    labels = {environment: label for label, environment in machines(rows).items()}
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        config, environment = row.record.config, row.record.environment
        machine = labels.get(environment, environment.gpu or environment.cpu)
        found.setdefault((*(config[name] for name in LABEL), config["device"], machine, row.file), []).append(row)
    return {key: sorted(mine, key=lambda row: row.record.config["mib"]) for key, mine in found.items()}


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
    columns = [
        *_NAMED,
        *point_columns(rows, without=(*LABEL, "mib")),
        Column("size", Form(text=size_words), _payload_bytes, failed=None),
        Column("time (ms)", MS_STD, _time),
        *rank_columns("time"),
        Column("algorithm (GB/s)", GIGA, _speed("algorithm_bytes_per_s")),
        Column("bus (GB/s)", GIGA, _speed("bus_bytes_per_s")),
        Column("of the link (%)", PERCENT, _speed("link_share"), optional=True),
        doubts_column(lambda row: "; ".join(doubts(row.record))),
    ]
    return Table.of("Collectives", rows, columns, note=" ".join([_HOW, *alone, *_links(rows)]), raw=map(_raw, rows))


def fit_tables(rows: Sequence[Row]) -> list[Table]:
    """A line a series with enough sizes."""
    lines = [Line(mine[0], fit) for mine in series_of(rows).values() if (fit := fit_of(mine))]
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
    return Column(name, form, lambda row: row_of(row).record.config[name], failed=None)


_NAMED = [_named(name) for name in LABEL]


def _payload_bytes(row: Row) -> int:
    return int(row.record.fact("payload_bytes", row.record.config["mib"] * 2**20))


def _time(row: Row) -> tuple[float, float]:
    time = summarize(row.record.samples["time"])
    return time.mean, time.std


def _speed(name: str) -> Callable[[Row], float | None]:
    def get(row: Row) -> float | None:
        speed = bandwidth(row.record)
        return None if speed is None else getattr(speed, name)

    return get


def size_words(payload_bytes: float) -> str:
    """`1.00 KiB`, `16.0 MiB` or `1.00 GiB`."""
    if payload_bytes < 2**20:
        return f"{three_digits(payload_bytes / 2**10)} KiB"
    return needed_words(payload_bytes)


def _links(rows: Sequence[Row]) -> list[str]:
    """Where the link's speed is from."""
    sources = {found.link_source for row in rows if (found := bandwidth(row.record)) and found.link_source}
    return (
        [f"The link: NVLink one way, {' and '.join(sorted(sources))}; a switch that adds up by itself can pass it."]
        if sources
        else []
    )


def _raw(row: Row) -> Mapping[str, Any]:
    """For programs: the row's quantities, with what is computed here."""
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
    if spread is not None:
        numbers |= {
            "slowest_rank": spread.slowest,
            "slowest_rank_median_s": spread.slowest_value,
            "fastest_rank": spread.fastest,
            "fastest_rank_median_s": spread.fastest_value,
        }
    return numbers


def collective_sections(rows: Sequence[Row]) -> list[Section]:
    """The part of the page that these records fill."""
    done = {
        key: held for key, each in series_of(rows).items() if (held := [row for row in each if bandwidth(row.record)])
    }
    charts = (
        [
            _chart(done, "Bus bandwidth by size", "bus bandwidth (GB/s)", _bus, "Higher is better. {}"),
            _chart(
                done,
                "Time of a call by size",
                "time of a call (ms)",
                lambda record: in_ms(summarize(record.samples["time"]).median),
                "Lower is better. {}",
            ),
        ]
        if done
        else []
    )
    return [
        Section(
            title="Collectives",
            paragraphs=tuple(_sentences(done)),
            charts=tuple(charts),
            tables=tuple(collective_tables(rows)),
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


def _bus(record: Record) -> float:
    found = bandwidth(record)
    return found.bus_bytes_per_s / 1e9 if found else 0.0


def _words(record: Record) -> str:
    time = summarize(record.samples["time"])
    return (
        f"{size_words(record.fact('payload_bytes'))}: {milliseconds(time.median, time.std)} ms, "
        f"{three_digits(_bus(record))} GB/s on the bus"
    )
