"""The tables of `trainstep parallel`: each way's step against the yardstick's, what it sends, hides and holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.costs.strategies import YARDSTICK
from trainstep.records.ranks import rank_spread
from trainstep.records.summary import doubts, summarize
from trainstep.report.parallel_memory import driver_table, points_table
from trainstep.report.parallel_rows import Way, median_of, name_columns, ways_of
from trainstep.report.quantities import quantities
from trainstep.report.rows import Row
from trainstep.report.tables import (
    ABSENT,
    Column,
    Entry,
    Table,
    byte_unit,
    failure_sentence,
    failure_word,
    in_ms,
    milliseconds,
    percent,
    ratio_words,
)

_DETAILED = 2
"""Cells whose messages are listed outside the page."""
_FACTS = (
    "communication_s",
    "waiting_s",
    "transfer_s",
    "exposed_s",
    "tail_s",
    "wire_bytes",
    "expected_wire_bytes",
    "expected_peak_bytes",
    "expected_peak_point",
    "context_bytes",
    "nccl_bytes",
    "agreement",
)
_STEPS = (
    "Median ± standard deviation, of the slowest rank. Window: steps in a row, timed as one, so that what a way leaves for the "
    f"next step counts. Ratio: to sync {YARDSTICK}, in which ranks do not talk, from pairs of turns (so it need not be the "
    "medians' quotient), with its 99 % interval; a doubt says where they took no turns."
)
_COMMUNICATION = (
    "Of one profiled step, beside steps that were not. Sent: tensors' bytes; on the wire: what a rank sends at most by a "
    "ring. In brackets: the formula's, where it differs. "
    "From rank 0's trace: under way, the time with at least one message; of that, waiting for the last rank to join; and exposed, "
    "nothing computing meanwhile. Longer than none: the medians' difference, what the whole step feels, slower kernels beside "
    "messages included."
)


def parallel_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that these records hold."""
    ways = ways_of(rows)
    if not ways:
        return []
    few = len(ways) <= _DETAILED
    return [
        steps_table(ways),
        *communication_table(ways),
        *ranks_table(ways),
        *traffic_table(ways),
        *memory_tables(ways),
    ] + (message_tables(ways) if few else [])


def memory_tables(ways: Sequence[Way]) -> list[Table]:
    """What ranks hold, by formula and as seen."""
    return [*points_table(ways), *driver_table(ways)]


def steps_table(ways: Sequence[Way]) -> Table:
    """One row a way: the step, synchronised and in windows."""
    points = name_columns(ways)
    titles = (
        *("step (ms)", "ratio", "99 % interval", "window, a step (ms)", "window's ratio", "99 % of that"),
        *("slowest rank (ms)", "fastest rank (ms)", "tokens/s", "peak"),
    )
    unit = byte_unit(_peak_bytes(way) for way in ways)
    entries = []
    for way in ways:
        named = [make(way.row) for _, make in points]
        failure = way.record.failure
        if failure is not None:
            cells = [Entry(text=failure_word(failure), failure=failure)] * len(titles)
            entries.append((*named, *cells, Entry(text=failure_sentence(failure), failure=failure)))
            continue
        numbers = [*_time(way, "step"), *_time(way, "window_step"), *_ranks(way), *_rates(way, unit)]
        trouble = [f"no trace: {said}"] if (said := way.record.fact("trace_failed")) else []
        if (found := way.ratio("step")) is not None and found.interleaving == "none":
            trouble.append(f"took no turns with {YARDSTICK}")
        entries.append((*named, *numbers, Entry(text="; ".join([*doubts(way.record), *trouble]))))
    columns = [column for column, _ in points] + [Column(title=title, number=True) for title in titles]
    return Table(
        title="Ways of going parallel",
        columns=(*columns, Column(title="doubts")),
        entries=tuple(entries),
        note=f"{_STEPS} Peak: {unit.name}, of rank 0.",
        raw=tuple(_raw(way) for way in ways),
    )


def communication_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way: what is sent, and how much of it is hidden."""
    found = [way for way in ways if way.record.failure is None and way.record.config["ranks"] > 1]
    if not found:
        return []
    points = name_columns(found)
    unit = byte_unit(way.record.fact("wire_bytes") for way in found)
    times = ("under way", "waiting", "transfer", "exposed")
    titles = ["messages", f"sent ({unit.name})", f"on the wire ({unit.name})", *(f"{name} (ms)" for name in times)]
    titles += ["hidden (%)", "step longer than none (ms)", "window longer than none (ms)"]
    entries = []
    for way in found:
        counted, formula = (_totals(way, prefix) for prefix in ("", "expected_"))
        wire = [way.record.fact(name) for name in ("wire_bytes", "expected_wire_bytes")]
        under_way, exposed = (way.record.fact(name) for name in ("communication_s", "exposed_s"))
        seconds = [way.record.fact(name) for name in ("communication_s", "waiting_s", "transfer_s", "exposed_s")]
        longer = [way.longer_s(name) for name in ("step", "window_step")]
        entries.append(
            (
                *(make(way.row) for _, make in points),
                beside(counted and counted[0], formula and formula[0], lambda count: f"{count:,}"),
                beside(counted and counted[1], formula and formula[1], unit.words),
                beside(wire[0], wire[1], unit.words),
                *(_ms(value) for value in seconds),
                Entry(text=ABSENT) if not under_way else _percent(1 - exposed / under_way),
                *(_ms(value) for value in longer),
            )
        )
    columns = [column for column, _ in points] + [Column(title=title, number=True) for title in titles]
    return [Table(title="Communication of a step", columns=tuple(columns), entries=tuple(entries), note=_COMMUNICATION)]


def traffic_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way and operation: messages and bytes, counted and by formula."""
    found = [(way, line) for way in ways for line in lines_of_table(way, "traffic")]
    if not found:
        return []
    points = name_columns([way for way, _ in found])
    unit = byte_unit(size for _, line in found for size in (line["bytes"], line["expected_bytes"]))
    entries = [
        (
            *(make(way.row) for _, make in points),
            Entry(text=line["operation"]),
            *(_count(line[name]) for name in ("messages", "expected_messages")),
            *(Entry(text=unit.words(line[name]), sort=line[name]) for name in ("bytes", "expected_bytes")),
            Entry(text="yes" if _as_expected(line) else "no"),
        )
        for way, line in found
    ]
    titles = ("messages", "by formula", f"sent ({unit.name})", f"by formula ({unit.name})")
    columns = [column for column, _ in points] + [Column(title="operation")]
    columns += [Column(title=title, number=True) for title in titles] + [Column(title="alike")]
    note = "Of one step and rank, counted where collectives are called; torch's own ways call them where nobody counts."
    return [Table(title="Messages against the formula", columns=tuple(columns), entries=tuple(entries), note=note)]


def ranks_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way and rank: whoever never waits is the one that the others wait for."""
    found = [(way, line) for way in ways for line in lines_of_table(way, "communication")]
    if not found:
        return []
    points = name_columns([way for way, _ in found])
    times = {"under way": "communication_s", "waiting": "waiting_s", "transfer": "transfer_s", "exposed": "exposed_s"}
    times["after backward"] = "tail_s"
    entries = tuple(
        (
            *(make(way.row) for _, make in points),
            _count(line["rank"]),
            *(_ms(line[name]) for name in times.values()),
        )
        for way, line in found
    )
    columns = [column for column, _ in points] + [Column(title="rank", number=True)]
    columns += [Column(title=f"{name} (ms)", number=True) for name in times]
    note = "Each rank's own trace. After backward: from the end of its computing to the end of the last message of gradients."
    return [Table(title="Communication by rank", columns=tuple(columns), entries=entries, note=note, folded=True)]


def message_tables(ways: Sequence[Way]) -> list[Table]:
    """Each way's messages, in the order of their start; the page folds them."""
    return [_message_table(way, titled=len(ways) > 1) for way in ways if "buckets" in way.record.tables]


def _message_table(way: Way, *, titled: bool) -> Table:
    lines = lines_of_table(way, "buckets")
    unit = byte_unit(line["bytes"] for line in lines)
    times = ("launched", "started", "finished", "waiting", "hidden", "exposed")
    entries = tuple(
        (
            Entry(text=str(line["name"])),
            Entry(text=str(line["phase"])),
            Entry(text=ABSENT) if line["bytes"] is None else Entry(text=unit.words(line["bytes"]), sort=line["bytes"]),
            *(_ms(line[f"{name}_s"]) for name in times),
        )
        for line in lines
    )
    titles = (unit.name, *(f"{name} (ms)" for name in times))
    return Table(
        title=f"{way.place} {way.name}: messages of a step" if titled else "Messages of a step",
        columns=(
            Column(title="message"),
            Column(title="launched in"),
            *(Column(title=title, number=True) for title in titles),
        ),
        entries=entries,
        note="On rank 0, in a step that a profiler watched, from the step's beginning. Waiting: until the last rank had joined.",
        folded=True,
    )


def lines_of_table(way: Way, name: str) -> list[dict[str, Any]]:
    """A record's table, row by row; none where the cell failed."""
    table = way.record.tables.get(name, {}) if way.record.failure is None else {}
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def beside(value: float | None, formula: float | None, text: Any) -> Entry:
    """`18`, or `18 (20)` where the formula says 20."""
    if value is None:
        return Entry(text=ABSENT)
    aside = "" if formula is None or formula == value else f" ({text(formula)})"
    return Entry(text=f"{text(value)}{aside}", sort=value)


def _time(way: Way, quantity: str) -> list[Entry]:
    """Median ± std, ratio to the yardstick, its interval."""
    samples = way.record.samples.get(quantity)
    if samples is None or not samples.values:
        return [Entry(text=ABSENT)] * 3
    summary, found = summarize(samples), way.ratio(quantity)
    time = Entry(text=milliseconds(summary.median, summary.std), sort=in_ms(summary.median))
    if found is None or found.ratio is None or found.low is None or found.high is None:
        return [time, Entry(text=ABSENT), Entry(text=ABSENT)]
    interval = f"{ratio_words(found.low)} to {ratio_words(found.high)}"
    return [time, Entry(text=ratio_words(found.ratio), sort=found.ratio), Entry(text=interval)]


def _ranks(way: Way) -> list[Entry]:
    spread = rank_spread(way.record, "step")
    if spread is None:
        return [Entry(text=ABSENT)] * 2
    pairs = ((spread.slowest, spread.slowest_value), (spread.fastest, spread.fastest_value))
    return [Entry(text=f"{milliseconds(value)} (rank {rank})", sort=in_ms(value)) for rank, value in pairs]


def _rates(way: Way, unit: Any) -> list[Entry]:
    step_s, tokens, peak = median_of(way.record, "step"), way.record.fact("tokens"), _peak_bytes(way)
    rate = tokens / step_s if tokens and step_s else None
    return [
        Entry(text=ABSENT) if rate is None else Entry(text=f"{rate:,.0f}", sort=rate),
        Entry(text=ABSENT) if peak is None else Entry(text=unit.words(peak), sort=peak),
    ]


def _peak_bytes(way: Way) -> float | None:
    peak: float | None = way.record.fact("peak_allocated_bytes", way.record.fact("peak_rss_bytes"))
    return peak


def _totals(way: Way, prefix: str) -> tuple[int, int] | None:
    """Messages and bytes of all operations; None where nobody counted."""
    if "traffic" not in way.record.tables:
        return None
    lines = lines_of_table(way, "traffic")
    return sum(line[f"{prefix}messages"] for line in lines), sum(line[f"{prefix}bytes"] for line in lines)


def _as_expected(line: Mapping[str, Any]) -> bool:
    return bool(line["messages"] == line["expected_messages"] and line["bytes"] == line["expected_bytes"])


def _ms(seconds: float | None) -> Entry:
    return Entry(text=ABSENT) if seconds is None else Entry(text=milliseconds(seconds), sort=in_ms(seconds))


def _count(value: int) -> Entry:
    return Entry(text=f"{value:,}", sort=value)


def _percent(share: float) -> Entry:
    return Entry(text=percent(share), sort=share)


def _raw(way: Way) -> Mapping[str, Any]:
    """For programs: the row's quantities, with what is computed here."""
    record, numbers = way.record, {"sync": way.sync} | quantities(way.row)
    if record.failure is not None:
        return numbers
    numbers |= {name: record.fact(name) for name in _FACTS if name in record.facts}
    for quantity in ("step", "window_step"):
        found = way.ratio(quantity)
        numbers |= {
            f"{quantity}_ratio_to_none": found and found.ratio,
            f"{quantity}_ratio_interleaving": found and found.interleaving,
            f"{quantity}_ratio_low": found and found.low,
            f"{quantity}_ratio_high": found and found.high,
            f"{quantity}_longer_than_none_s": way.longer_s(quantity),
        }
    for prefix in ("", "expected_"):
        totals = _totals(way, prefix)
        numbers |= {f"{prefix}messages": totals and totals[0], f"{prefix}sent_bytes": totals and totals[1]}
    return numbers
