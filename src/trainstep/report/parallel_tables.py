"""The tables of `trainstep parallel`: each way's step against the yardstick's, what it sends, hides and holds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstep.costs.strategies import YARDSTICK
from trainstep.records.derive import tokens_per_s
from trainstep.records.summary import doubts
from trainstep.report.forms import COUNT, MS, MS_STD, PERCENT, RATIO, SIZE, TEXT, WHOLE, beside, ratio_words
from trainstep.report.parallel_rows import Way, name_columns, ways_of
from trainstep.report.ratios import mean_column, median_and_range
from trainstep.report.rows import Row, quantities, shown_facts, words
from trainstep.report.tables import Column, Entry, Line, Table, doubts_column, rank_columns

_DETAILED = 2
"""Cells whose messages are listed outside the page."""
CATEGORIES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_ALLOCATOR = ("unnamed", "allocated")
_POINTS = (
    "Of rank 0. A number alone is the formula's too, else the formula's stands in brackets; torch's ways have none, and buffers of "
    "their own that are not seen here. Communication: buffers, and parameters gathered from other ranks. "
    "Activations: what forward saved for backward; the formula takes it as measured."
)
_UNNAMED = "Unnamed: allocated, in none of these: batches, the loss, libraries' workspaces, temporaries, buffers of torch's ways."
_DRIVER = (
    "{unit}. After a step, what nvidia-smi would show of rank 0's process: what the allocator has reserved (allocated, and cached "
    "for reuse), the CUDA context, what NCCL took while the ranks met (buffers, kernels), and the rest: kernels loaded since."
)
_STEPS = (
    "Median ± half the interquartile range, of the slowest rank. Window: steps in a row, timed as one, so that what a way leaves "
    f"for the next step counts. Ratio: to sync {YARDSTICK}, in which ranks do not talk, from pairs of turns (so it need not be the "
    "medians' quotient), with its 99 % interval or, of too few pairs, the ratio of each; a doubt says where they took no turns. "
    "Peak: {unit}, of rank 0."
)
_COMMUNICATION = (
    "Of one profiled step, beside steps that were not. Sent: tensors' bytes; on the wire: what a rank sends at most by a "
    "ring. In brackets: the formula's, where it differs. "
    "From rank 0's trace: under way, the time with at least one message; of that, waiting for the last rank to join; and exposed, "
    "nothing computing meanwhile. Longer than none: the medians' difference, what the whole step feels, slower kernels beside "
    "messages included."
)
_BOTH = ("", "expected_")
"""As counted, and by formula: what names of columns of the record's table begin with."""
Held = dict[str, dict[str, tuple[int, int | None]]]
"""Point -> line -> bytes, as seen and by formula."""


def parallel_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that these records hold."""
    ways = ways_of(rows)
    few = len(ways) <= _DETAILED
    return [*time_tables(ways), *memory_tables(ways), *(message_tables(ways) if few else [])]


def time_tables(ways: Sequence[Way]) -> list[Table]:
    """What a step takes, and what its messages take of that."""
    return [steps_table(ways), *communication_table(ways), *ranks_table(ways), *traffic_table(ways)]


def steps_table(ways: Sequence[Way]) -> Table:
    """One row a way: the step, synchronised and in windows."""
    windows = _time_columns("window_step", "window, a step (ms)", "window's ratio", "99 % of that")
    columns = [
        *name_columns(ways),
        *_time_columns("step", "step (ms)", "ratio", "99 % interval"),
        *(replace(column, more=True) for column in windows),
        *rank_columns("step"),
        Column("tokens/s", WHOLE, lambda way: tokens_per_s(way.record), more=True),
        Column("peak", SIZE, lambda way: way.record.fact("peak_allocated_bytes", way.record.fact("peak_rss_bytes"))),
        mean_column("step", "step"),
        mean_column("window_step", "window, a step"),
        doubts_column(_doubts),
    ]
    return Table.of("Ways of going parallel", ways, columns, note=_STEPS, raw=map(_raw, ways))


def communication_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way: what is sent, and how much of it is hidden."""
    found = [way for way in ways if way.record.failure is None and way.record.config["ranks"] > 1]
    columns = [
        *name_columns(found),
        Column("messages", beside(COUNT), lambda way: _totals(way, "messages")),
        Column("sent ({unit})", beside(SIZE), lambda way: _totals(way, "bytes")),
        Column("on the wire ({unit})", beside(SIZE), _on_the_wire, more=True),
        *(replace(column, more=True) for column in _seconds("under way", "waiting", "transfer")),
        *_seconds("exposed"),
        Column("hidden (%)", PERCENT, _hidden),
        Column("step longer than none (ms)", MS, lambda way: way.longer_s("step")),
        Column("window longer than none (ms)", MS, lambda way: way.longer_s("window_step"), more=True),
    ]
    return [Table.of("Communication of a step", found, columns, note=_COMMUNICATION)] if found else []


def traffic_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way and operation: messages and bytes, counted and by formula."""
    lines = [Line(way.row, line) for way in ways for line in way.lines("traffic")]
    columns = [
        *name_columns(lines),
        Column("operation", names=True),
        Column("messages", COUNT),
        Column("by formula", COUNT, "expected_messages", more=True),
        Column("sent ({unit})", SIZE, "bytes"),
        Column("by formula ({unit})", SIZE, "expected_bytes", more=True),
        Column(
            "alike",
            replace(TEXT, text=words),
            lambda line: all(line.of[name] == line.of[f"expected_{name}"] for name in ("messages", "bytes")),
        ),
    ]
    note = "Of one step and rank, counted where collectives are called; torch's own ways call them where nobody counts."
    return [Table.of("Messages against the formula", lines, columns, note=note)] if lines else []


def ranks_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way and rank: whoever never waits is the one that the others wait for."""
    lines = [Line(way.row, line) for way in ways for line in way.lines("communication")]
    times = _seconds("under way", "waiting", "transfer", "exposed", "after backward")
    note = "Each rank's own trace. After backward: from the end of its computing to the end of the last message of gradients."
    columns = [*name_columns(lines), Column("rank", COUNT, names=True), *times]
    return [Table.of("Communication by rank", lines, columns, note=note, folded=True)] if lines else []


def message_tables(ways: Sequence[Way]) -> list[Table]:
    """Each way's messages, in the order of their start; the page folds them."""
    several = len(ways) > 1
    note = "On rank 0, in a step that a profiler watched, from the step's beginning. Waiting: until the last rank had joined."
    times = ("launched", "started", "finished", "waiting", "hidden", "exposed")
    columns = [
        Column("message", TEXT, "name", names=True),
        Column("launched in", TEXT, "phase"),
        Column("{unit}", SIZE, "bytes"),
        *(Column(f"{name} (ms)", MS, f"{name}_s", more=name in ("launched", "waiting")) for name in times),
    ]
    return [
        Table.of(
            f"{way.place} {way.name}: messages of a step" if several else "Messages of a step",
            way.lines("buckets"),
            columns,
            note=note,
            folded=True,
        )
        for way in ways
        if "buckets" in way.record.tables
    ]


def memory_tables(ways: Sequence[Way]) -> list[Table]:
    """What ranks hold, by formula and as seen."""
    return [*_points_table(ways), *_driver_table(ways)]


def held_by(way: Way) -> Held:
    """Rank 0's part of the record's table; empty where the cell failed."""
    found: Held = {}
    for line in way.lines("memory_points"):
        if line["rank"] == 0:
            found.setdefault(line["point"], {})[line["line"]] = (line["bytes"], line["expected_bytes"])
    return found


def _points_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way and point."""
    found = [(way, point, held) for way in ways for point, held in held_by(way).items()]
    lines = [Line(way.row, {**held, **_sums(held), "point": point}) for way, point, held in found]
    on_gpu = any("allocated" in held for _, _, held in found)
    names = (*CATEGORIES, *(_ALLOCATOR if on_gpu else ("together",)))
    columns = [*name_columns(lines), Column("point", names=True), *(Column(name, beside(SIZE)) for name in names)]
    note = f"{{unit}}. {_POINTS} {_UNNAMED if on_gpu else 'A CPU has no allocator that counts.'}"
    return [Table.of("What a rank holds", lines, columns, note=note)] if lines else []


def _sums(held: Mapping[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]]:
    """`together` and `allocated`, where it was seen, with the formula's sum beside them."""
    named = [held[name] for name in CATEGORIES if name in held]
    formulas = [formula for _, formula in named]
    formula = None if None in formulas else sum(size or 0 for size in formulas)
    sums = {"together": (sum(size for size, _ in named), formula)}
    return sums | {"allocated": (held["allocated"][0], formula)} if "allocated" in held else sums


def _driver_table(ways: Sequence[Way]) -> list[Table]:
    """One row a way on a GPU: the driver's figure, and what it is made of. Of variants that took turns there is none: it would be
    all of theirs."""
    lines = [Line(way.row, explained) for way in ways if (explained := _explained(way))]
    names = ("driver", "allocated", "cached", "context", "NCCL", "rest")
    columns = [*name_columns(lines), *(Column(name, SIZE) for name in names)]
    return [Table.of("What the driver sees", lines, columns, note=_DRIVER)] if lines else []


def _explained(way: Way) -> dict[str, int]:
    held = {name: size for name, (size, _) in held_by(way).get("after step", {}).items()}
    context, nccl = way.record.fact("context_bytes"), way.record.fact("nccl_bytes", 0)
    if "driver" not in held or context is None or way.record.fact("interleaving") == "live":
        return {}
    rest = held["driver"] - held["reserved"] - context - nccl
    return {**held, "cached": held["reserved"] - held["allocated"], "context": context, "NCCL": nccl, "rest": rest}


def _seconds(*names: str) -> list[Column]:
    """Columns of seconds, each a fact of a record or a value of a line."""
    stored = {"under way": "communication_s", "after backward": "tail_s"}
    return [Column(f"{name} (ms)", MS, stored.get(name, f"{name}_s")) for name in names]


def _time_columns(quantity: str, time: str, ratio: str, ends: str) -> list[Column]:
    """A quantity of time, and its ratio to the yardstick's with its interval, or with each pair's where they are few."""

    def middle(way: Way) -> float | None:
        found = way.ratio(quantity)
        return found.known.ratio if found and found.known else None

    def spread(way: Way) -> Entry | None:
        found = way.ratio(quantity)
        if found and found.interval:
            return Entry(text=" to ".join(map(ratio_words, found.interval[::2])))
        each = found.known.each if found and found.known else ()
        return Entry(text="pairs " + ", ".join(map(ratio_words, sorted(each)))) if each else None

    return [
        Column(time, MS_STD, median_and_range(quantity)),
        Column(ratio, RATIO, middle),
        Column(ends, RATIO, spread),
    ]


def _doubts(way: Way) -> str:
    trouble = [f"no trace: {said}"] if (said := way.record.fact("trace_failed")) else []
    if (ratio := way.ratio("step")) and ratio.found and ratio.found.interleaving == "none":
        trouble.append(f"took no turns with {YARDSTICK}")
    return "; ".join([*doubts(way.record), *trouble])


def _totals(way: Way, what: str) -> tuple[int, int] | None:
    """Of all operations, as counted and by formula; None where nobody counted."""
    if "traffic" not in way.record.tables:
        return None
    counted, expected = (sum(line[side + what] for line in way.lines("traffic")) for side in _BOTH)
    return counted, expected


def _on_the_wire(way: Way) -> tuple[int, int | None] | None:
    sent, expected = (way.record.fact(f"{side}wire_bytes") for side in _BOTH)
    return None if sent is None else (sent, expected)


def _hidden(way: Way) -> float | None:
    under_way, exposed = (way.record.fact(name) for name in ("communication_s", "exposed_s"))
    return 1 - exposed / under_way if under_way and exposed is not None else None


def _raw(way: Way) -> Mapping[str, Any]:
    """For programs: the row's quantities, with what is computed here."""
    record, numbers = way.record, {"sync": way.sync} | quantities(way.row)
    if record.failure is not None:
        return numbers
    numbers |= shown_facts(record)
    for quantity in ("step", "window_step"):
        found = (ratio := way.ratio(quantity)) and ratio.found
        numbers |= {
            f"{quantity}_ratio_to_none": found and found.ratio,
            f"{quantity}_ratio_interleaving": found and found.interleaving,
            f"{quantity}_ratio_low": found and found.low,
            f"{quantity}_ratio_high": found and found.high,
            f"{quantity}_longer_than_none_s": way.longer_s(quantity),
        }
    messages, sent_bytes = (_totals(way, what) or (None, None) for what in ("messages", "bytes"))
    for place, side in enumerate(_BOTH):
        numbers |= {f"{side}messages": messages[place], f"{side}sent_bytes": sent_bytes[place]}
    return numbers
