"""Tables, charts and sentences about collectives: time and bandwidth by size, and the fitted latency and bandwidth."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.config.collective import CollectiveConfig
from trainstep.grouping import grouped
from trainstep.records.derive import LatencyFit, bandwidth, fit_latency
from trainstep.records.ranks import rank_spread
from trainstep.records.record import Record
from trainstep.records.summary import summarize
from trainstep.report.kit.charts import (
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
from trainstep.report.kit.forms import (
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
from trainstep.report.kit.ranking import mean_column, median_and_range, median_words
from trainstep.report.kit.rows import Row, machines, quantities, words
from trainstep.report.kit.tables import Column, Line, Table, doubts_column, point_columns, rank_columns, row_of
from trainstep.report.parallel.links import level_words, links_tables, slowest_words

LABEL = ("operation", "backend", "ranks", "dtype")
_PLACED = ("nodes", "level")
"""What else tells series apart where ranks are on several nodes."""
_SENT = ("transport", "inbox_mib")
"""The same where messages go by copies."""
_HOW = (
    "Time: of the slowest rank, median ± half the interquartile range. Algorithm bandwidth: size over median time. Bus "
    "bandwidth: bytes that a ring's busiest rank sends over median time, comparable with one direction of a link."
)
_FIT = (
    "Median time of a call = latency + size / algorithm bandwidth, fitted over the sizes of one run by least squares of relative "
    "residuals. A negative latency means that these sizes do not show a latency."
)
_BETWEEN = "What each node sends to the next at the fitted bandwidth, if messages go in rings."
_ALONE = "With one rank nothing is sent, so the time is the cost of the call."
Key = tuple[Any, ...]
"""The values that the sizes of a series share: LABEL, nodes, level, transport, then device, machine and file."""


def series_of(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """Groups of rows that differ only in size, smallest first."""
    labels = {environment: label for label, environment in machines(rows).items()}

    def key_of(row: Row) -> Key:
        config, environment = row.record.config, row.record.environment
        machine = labels.get(environment, environment.gpu or environment.cpu)
        placed = config.get("nodes", 1), level_words(config), transport_words(config)
        return *(config[name] for name in LABEL), *placed, config["device"], machine, row.file

    return {
        key: sorted(alike, key=lambda row: row.record.config["mib"]) for key, alike in grouped(rows, key_of).items()
    }


def fit_of(rows: Sequence[Row]) -> LatencyFit | None:
    """Latency and bandwidth fitted to the cells that did not fail; None if their sizes are too few."""
    done = [row.record for row in rows if bandwidth(row.record)]
    return fit_latency(
        [record.fact("payload_bytes") for record in done], [summarize(record.samples["time"]).median for record in done]
    )


def collective_tables(rows: Sequence[Row]) -> list[Table]:
    """The table of cells, and the table of each series' fit."""
    return [cells_table(rows), *fit_tables(rows), *links_tables(list(series_of(rows).values()))]


def cells_table(rows: Sequence[Row]) -> Table:
    """One row per cell."""
    alone = [_ALONE] if any(row.record.config["ranks"] == 1 for row in rows) else []
    lines = [Line(row, _numbers(row)) for row in rows]
    columns = [
        *_NAMED,
        *_PLACE_COLUMNS,
        *point_columns(rows, without=(*LABEL, *_PLACED, *_SENT, "mib")),
        # A cell that failed early did not record its bytes.
        Column(
            "size",
            Form(text=size_words),
            lambda line: int(line.value["payload_bytes"] or line.value["mib"] * 2**20),
            failed=None,
            names=True,
        ),
        Column("time (ms)", MS_STD, median_and_range("time")),
        *rank_columns("time"),
        Column("algorithm (GB/s)", GIGA, "algorithm_bytes_per_s", more=True),
        Column("bus (GB/s)", GIGA, "bus_bytes_per_s"),
        Column("of the link (%)", PERCENT, "link_ratio", optional=True),
        mean_column("time", "time"),
        doubts_column("doubts"),
    ]
    note = " ".join([_HOW, *alone, *_links(rows)])
    return Table.of("Collectives", lines, columns, note=note, raw=[line.value for line in lines])


def fit_tables(rows: Sequence[Row]) -> list[Table]:
    """One row per series with enough sizes."""
    lines = [Line(alike[0], fit) for alike in series_of(rows).values() if (fit := fit_of(alike))]
    columns = [
        *_NAMED,
        *_PLACE_COLUMNS,
        Column("sizes", COUNT),
        Column("latency (µs)", DIGITS, lambda line: line.value.alpha_s * 1e6),
        Column("algorithm (GB/s)", DIGITS, lambda line: line.value.beta_bytes_per_s / 1e9),
        Column(
            "between nodes (GB/s)",
            DIGITS,
            lambda line: None if (s := node_bytes_per_s(line.row.record, line.value)) is None else s / 1e9,
            optional=True,
            help=_BETWEEN,
        ),
        Column("R²", RATIO, "r_squared"),
        Column("largest error (%)", PERCENT, "worst"),
    ]
    return [Table.of("Latency and bandwidth", lines, columns, note=_FIT)] if lines else []


def _named(name: str) -> Column:
    form = Form(text=str, sort=float) if name == "ranks" else TEXT
    return Column(name, form, lambda row: row_of(row).record.config[name], failed=None, names=True)


_NAMED = [_named(name) for name in LABEL]


def _place_column(name: str, form: Form, value: Callable[[Record], Any]) -> Column:
    return Column(name, form, lambda row: value(row_of(row).record) or None, failed=None, names=True, optional=True)


def transport_words(config: Mapping[str, Any]) -> str:
    """`copies` or `copies, inbox 64 MiB`; empty where the library sends."""
    if config.get("transport", "library") == "library":
        return ""
    inbox_mib = config["inbox_mib"]
    return "copies" if inbox_mib == CollectiveConfig.inbox_mib else f"copies, inbox {inbox_mib} MiB"


def _nodes(record: Record) -> int | None:
    nodes = int(record.config.get("nodes", 1))
    return nodes if nodes > 1 else None


_PLACE_COLUMNS = [
    _place_column("nodes", COUNT, _nodes),
    _place_column("level", TEXT, lambda record: level_words(record.config)),
    _place_column("transport", TEXT, lambda record: transport_words(record.config)),
]


def node_bytes_per_s(record: Record, fit: LatencyFit) -> float | None:
    """Bytes a second that each node sends to the next at the fitted bandwidth; None inside nodes. `record`: one of the series."""
    sent = record.fact("node_bytes")
    return float(fit.beta_bytes_per_s * sent / record.fact("payload_bytes")) if sent else None


def size_words(payload_bytes: float) -> str:
    """`1.00 KiB`, `16.0 MiB` or `1.00 GiB`."""
    if payload_bytes < 2**20:
        return f"{three_digits(payload_bytes / 2**10)} KiB"
    return needed_words(payload_bytes)


def _links(rows: Sequence[Row]) -> list[str]:
    """The source of the link's bandwidth, as a sentence; empty if it is unknown."""
    sources = {speed.link_source for row in rows if (speed := bandwidth(row.record)) and speed.link_source}
    sentence = f"The link: NVLink in one direction, {' and '.join(sorted(sources))}; a switch that reduces by itself can exceed it."
    return [sentence] if sources else []


def _numbers(row: Row) -> Mapping[str, Any]:
    """The row's quantities, with its bandwidths and its slowest and fastest rank."""
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
    """The section of the page that these records fill."""
    ran = {key: [row for row in alike if bandwidth(row.record)] for key, alike in series_of(rows).items()}
    done = {key: alike for key, alike in ran.items() if alike}
    charts = tuple(_chart(done, *options) for options in (_CHARTS if done else ()))
    sentences = tuple(_sentence(key, alike) for key, alike in done.items())
    return [Section(title="Collectives", paragraphs=sentences, charts=charts, tables=tuple(collective_tables(rows)))]


def _sentence(key: Key, rows: Sequence[Row]) -> str:
    """The best bandwidth of a series, and its fitted latency."""
    best = max((row.record for row in rows), key=_bus)
    sentence = (
        f"{_name(key)}: at most {three_digits(_bus(best))} GB/s on the bus, at {size_words(best.fact('payload_bytes'))}"
    )
    fit = fit_of(rows)
    latency = f"; the latency of a call is {seconds_words(fit.alpha_s)}" if fit and fit.alpha_s > 0 else ""
    slowest = f"; {words}" if (words := slowest_words(rows)) else ""
    return f"{sentence}{latency}{slowest}."


def _chart(
    series: dict[Key, list[Row]], title: str, y_title: str, value: Callable[[Record], float], better: str
) -> Chart:
    """A panel per operation and backend, with a line per series; both axes are logarithmic."""
    panel_keys = list(dict.fromkeys(key[:2] for key in series))[:MAXIMUM_PANELS]
    names = dict(zip(series, short_labels([_rest(key, series) for key in series]), strict=True))
    styles = {name: series_style(index) for index, name in enumerate(dict.fromkeys(names.values()))}
    records = [row.record for rows in series.values() for row in rows]
    panels = Panels(
        titles=short_labels([" ".join(map(str, key)) for key in panel_keys]),
        columns=min(panel_columns(len(panel_keys), 8), 2),
        x_title="size (MiB)",
        y_title=y_title,
        axis=logarithmic([value(record) for record in records]),
        x_axis=logarithmic([_mib(record) for record in records]),
    )
    for key, rows in series.items():
        if key[:2] in panel_keys:
            hover = [lines_of(label(_name(key)), label(_words(row.record))) for row in rows]
            x, y = [_mib(row.record) for row in rows], [value(row.record) for row in rows]
            panels.add(panel_keys.index(key[:2]), line(names[key], x, y, style=styles[names[key]], hover=hover))
    return panels.chart(title, f"{better} is better. Each mark is the slowest rank's median over the calls.")


def _rest(key: Key, series: dict[Key, list[Row]]) -> str:
    """The name of a series in its panel: always its ranks, and other values that differ between series."""
    parts = [f"{key[2]} rank{'s' if key[2] > 1 else ''}"]
    parts += [words(key[place]) for place in range(3, len(key)) if len({other[place] for other in series}) > 1]
    return " ".join(parts)


def _name(key: Key) -> str:
    operation, backend, ranks, dtype, _, level, transport, *_ = key
    return ", ".join([f"{operation} by {transport or backend}, {ranks} ranks, {dtype}", *([level] if level else [])])


def _mib(record: Record) -> float:
    return float(record.fact("payload_bytes")) / 2**20


def _bus(record: Record) -> float:
    speed = bandwidth(record)
    return speed.bus_bytes_per_s / 1e9 if speed else 0.0


_CHARTS: tuple[tuple[str, str, Callable[[Record], float], str], ...] = (
    ("Bus bandwidth by size", "bus bandwidth (GB/s)", _bus, "Higher"),
    (
        "Time of a call by size",
        "time of a call (ms)",
        lambda record: in_ms(summarize(record.samples["time"]).median),
        "Lower",
    ),
)


def _words(record: Record) -> str:
    size = size_words(record.fact("payload_bytes"))
    return f"{size}: {median_words(record, 'time')}, {three_digits(_bus(record))} GB/s on the bus"
