"""Collectives as tables: bandwidth by size with the slowest and the fastest rank, and the latency and bandwidth that they fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.config.collective import CollectiveConfig
from trainstep.records.bandwidth import LatencyFit, bandwidth, fit_latency
from trainstep.records.ranks import rank_spread
from trainstep.records.summary import doubts, summarize
from trainstep.report.forms import (
    ABSENT,
    failure_sentence,
    failure_word,
    in_ms,
    milliseconds,
    needed_words,
    percent,
    three_digits,
)
from trainstep.report.hand_built import Column
from trainstep.report.quantities import quantities
from trainstep.report.rows import Row, machines
from trainstep.report.tables import Entry, Table

WORKLOAD = "collective"
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


def collective_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of this workload."""
    return [row for row in rows if row.record.workload == WORKLOAD]


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
        [record.fact("payload_bytes") for record in done],
        [summarize(record.samples["time"]).median for record in done],
    )


def collective_tables(rows: Sequence[Row]) -> list[Table]:
    """Every cell, and what each series fits."""
    mine = collective_rows(rows)
    return [cells_table(mine), *fit_tables(mine)] if mine else []


def cells_table(rows: Sequence[Row]) -> Table:
    """One row a cell."""
    more = [name for name in dict.fromkeys(name for row in rows for name in row.point) if name not in (*LABEL, "mib")]
    known_link = any((found := bandwidth(row.record)) and found.link_share is not None for row in rows)
    numbers = [
        "size",
        "time (ms)",
        "slowest rank (ms)",
        "fastest rank (ms)",
        "algorithm (GB/s)",
        "bus (GB/s)",
        *(["of the link (%)"] if known_link else []),
    ]
    return Table(
        title="Collectives",
        columns=(
            *(Column(title=name, number=name == "ranks") for name in (*LABEL, *more)),
            *(Column(title=name, number=True) for name in numbers),
            Column(title="doubts"),
        ),
        entries=tuple(
            (
                *(Entry(text=str(row.record.config[name]), sort=_number(row.record.config[name])) for name in LABEL),
                *(Entry(text=str(row.point.get(name, ""))) for name in more),
                *_entries(row, known_link),
            )
            for row in rows
        ),
        raw=tuple(_raw(row) for row in rows),
        note=" ".join(
            [_HOW, *([_ALONE] if any(row.record.config["ranks"] == 1 for row in rows) else []), *_links(rows)]
        ),
    )


def fit_tables(rows: Sequence[Row]) -> list[Table]:
    """A line a series with enough sizes."""
    found = [(mine[0], fit) for mine in series_of(rows).values() if (fit := fit_of(mine))]
    if not found:
        return []
    numbers = ("ranks", "sizes", "latency (µs)", "bandwidth (GB/s)", "R²", "off by at most (%)")
    return [
        Table(
            title="Latency and bandwidth",
            columns=tuple(Column(title=title, number=title in numbers) for title in (*LABEL, *numbers[1:])),
            entries=tuple(_fit_entries(row, fit) for row, fit in found),
            note=_FIT,
        )
    ]


def _fit_entries(row: Row, fit: LatencyFit) -> tuple[Entry, ...]:
    numbers = (fit.sizes, fit.alpha_s * 1e6, fit.beta_bytes_per_s / 1e9, fit.r_squared, fit.worst)
    texts = (
        str(fit.sizes),
        three_digits(fit.alpha_s * 1e6),
        three_digits(fit.beta_bytes_per_s / 1e9),
        f"{fit.r_squared:.3f}",
        percent(fit.worst),
    )
    return (
        *(Entry(text=str(row.record.config[name])) for name in LABEL),
        *(Entry(text=text, sort=number) for text, number in zip(texts, numbers, strict=True)),
    )


def _entries(row: Row, known_link: bool) -> tuple[Entry, ...]:
    record = row.record
    payload_bytes = CollectiveConfig(**record.config).payload_bytes
    size = Entry(text=size_words(payload_bytes), sort=payload_bytes)
    if record.failure is not None:
        failed = Entry(text=failure_word(record.failure), failure=record.failure)
        return (
            size,
            *([failed] * (6 if known_link else 5)),
            Entry(text=failure_sentence(record.failure), failure=record.failure),
        )
    time = summarize(record.samples["time"])
    spread, speed = rank_spread(record, "time"), bandwidth(record)
    return (
        size,
        Entry(text=milliseconds(time.mean, time.std), sort=in_ms(time.mean)),
        *(
            Entry(text=ABSENT)
            if spread is None
            else Entry(text=f"{milliseconds(value)} (rank {rank})", sort=in_ms(value))
            for rank, value in (
                ((spread.slowest, spread.slowest_value), (spread.fastest, spread.fastest_value))
                if spread
                else ((0, 0.0),) * 2
            )
        ),
        *(
            Entry(text=ABSENT) if rate is None else Entry(text=three_digits(rate / 1e9), sort=rate)
            for rate in ((speed.algorithm_bytes_per_s, speed.bus_bytes_per_s) if speed else (None, None))
        ),
        *([_share(speed.link_share if speed else None)] if known_link else []),
        Entry(text="; ".join(doubts(record))),
    )


def size_words(payload_bytes: float) -> str:
    """`1.00 KiB`, `16.0 MiB` or `1.00 GiB`."""
    if payload_bytes < 2**20:
        return f"{three_digits(payload_bytes / 2**10)} KiB"
    return needed_words(payload_bytes)


def _share(share: float | None) -> Entry:
    return Entry(text=ABSENT) if share is None else Entry(text=percent(share), sort=share)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


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
