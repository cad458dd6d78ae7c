"""The answers of what a machine reaches: collectives by size, matmuls and copies against the data sheet."""

from collections.abc import Sequence

from trainstep.config.machine import machine_spec
from trainstep.records.bandwidth import bandwidth
from trainstep.records.record import Record
from trainstep.report.answers import Answer
from trainstep.report.collectives_tables import fit_of, series_of, size_words
from trainstep.report.forms import in_percent, listed, percent, rate_words, seconds_words, three_digits
from trainstep.report.rows import Row

_NEAR_FULL = 0.9
"""The share of the best bandwidth that a message should reach."""
_SERIES = 3
"""Series that are spoken of one by one."""


def collectives_answer(rows: Sequence[Row]) -> Answer | None:
    """The bandwidth of each series, what latency it has and from which size on bandwidth counts."""
    series = [alike for alike in series_of(rows).values() if any(bandwidth(row.record) for row in alike)]
    if not series:
        alone = min(rows, key=lambda row: row.record.config["mib"])
        return Answer(workload="collective", verdict=f"{_name(alone)} sends nothing: a rank on its own.")
    more = [f"The tables have {len(series) - _SERIES} more."] if len(series) > _SERIES else []
    return Answer(
        workload="collective",
        verdict=" ".join([*map(_series_words, series[:_SERIES]), *more]),
        suggestion=_message_size(series[0]),
    )


def _series_words(rows: Sequence[Row]) -> str:
    """`all_reduce of fp32 on 2 ranks by nccl: 370 GB/s on the bus at 1.00 GiB (82.2 % of the link); latency 25 µs.`"""
    best, rate, share = _best(rows)
    link = f", {percent(share)} % of the link" if share else ""
    fit = fit_of(rows)
    latency = f", and {seconds_words(fit.alpha_s)} a call beside that" if fit and fit.alpha_s > 0 else ""
    return f"{_name(best)}: {rate_words(rate, 'bytes/s')} on the bus at {_size(best)}{link}{latency}."


def _message_size(rows: Sequence[Row]) -> str:
    """The sizes that reach half and nearly all of the best bandwidth: what buckets should have."""
    _, rate, _ = _best(rows)
    seen = [(row, found.bus_bytes_per_s / rate) for row in rows if (found := bandwidth(row.record))]
    half, most = (next(row for row, share in seen if share >= least) for least in (0.5, _NEAR_FULL))
    small, _ = seen[0]
    if half is small:
        return ""
    shares = {id(row): f"{_size(row)} reaches {three_digits(in_percent(share))} %" for row, share in seen}
    sizes = dict.fromkeys(id(row) for row in (small, half, most))
    return (
        f"Send messages of {_size(half)} or more (`--bucket-mib {half.record.config['mib']:g}`): of the best rate of "
        f"{rows[0].record.config['operation']}, {listed(shares[size] for size in sizes)}."
    )


def _best(rows: Sequence[Row]) -> tuple[Row, float, float | None]:
    """The row of the highest bus bandwidth, that, and its share of the link."""
    found = [(row, seen) for row in rows if (seen := bandwidth(row.record))]
    row, best = max(found, key=lambda pair: pair[1].bus_bytes_per_s)
    return row, best.bus_bytes_per_s, best.link_share


def _name(row: Row) -> str:
    config = row.record.config
    return f"{config['operation']} of {config['dtype']} on {config['ranks']} ranks by {config['backend']}"


def _size(row: Row) -> str:
    return size_words(row.record.fact("payload_bytes", 0))


def ceilings_answer(rows: Sequence[Row]) -> Answer | None:
    """What each kind of work reached, and its share of the data sheet."""
    reached = [row.record for row in rows if row.record.fact("rate")]
    if not reached:
        return None
    return Answer(
        workload="ceiling",
        verdict=f"This machine reaches {'; '.join(map(_ceiling_words, reached))}.",
        suggestion="A report of this file together with profiles draws their rooflines against these.",
    )


def _ceiling_words(record: Record) -> str:
    """`693 TFLOP/s in matmul bf16, 70.0 % of the data sheet`."""
    kind, dtype, rate = record.config["kind"], record.config.get("dtype"), record.fact("rate")
    spec = machine_spec(record.environment.gpu)
    if kind == "matmul":
        words, sheet = f"{rate_words(rate, 'flop/s')} in {dtype} matmuls", spec and spec.peak_flops.get(str(dtype))
    else:
        words = f"{rate_words(rate, 'bytes/s')} in {kind.replace('_', ' ')}"
        sheet = spec.memory_bytes_per_s if spec and kind == "copy" else None
    return f"{words} ({percent(rate / sheet)} % of the data sheet)" if sheet else words
