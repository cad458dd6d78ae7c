"""What a page shows of ways of going parallel: their steps, bucket sizes against a prediction, what a rank holds, and in words how
the two sharded optimizers differ."""

import dataclasses
from collections.abc import Sequence
from itertools import groupby

from trainstep.costs.strategies import YARDSTICK
from trainstep.records.summary import summarize
from trainstep.report.charts import (
    MAXIMUM_PANELS,
    SERIES,
    Chart,
    Panels,
    Section,
    bar,
    error_bars,
    label,
    lines_of,
    panel_columns,
    short_labels,
)
from trainstep.report.forms import byte_words, in_gib, in_ms, milliseconds, ratio_words
from trainstep.report.parallel_buckets import bucket_chart, bucket_sentences
from trainstep.report.parallel_rows import Way, median_of, ways_of
from trainstep.report.parallel_tables import (
    CATEGORIES,
    communication_table,
    held_by,
    memory_tables,
    message_tables,
    ranks_table,
    steps_table,
    traffic_table,
)
from trainstep.report.rows import Row

_TIMED = {"step": "a step alone", "window_step": "a step in a row of steps"}
_COLOURS = ("theme:blue", "theme:orange", "theme:green", "theme:purple", "theme:sky")
_MOST_MESSAGE_TABLES = 16


def parallel_sections(rows: Sequence[Row]) -> list[Section]:
    """The parts of the page that these records fill."""
    ways = ways_of(rows)
    if not ways:
        return []
    timed = [way for way in ways if median_of(way.record, "step") is not None]
    holding = [way for way in timed if held_by(way)]
    buckets = bucket_chart(timed, rows)
    times = Section(
        title="Ways of going parallel",
        paragraphs=(*_step_sentences(timed), *bucket_sentences(timed, rows)),
        charts=(*((_steps_chart(timed),) if timed else ()), *((buckets,) if buckets else ())),
        tables=(
            steps_table(ways),
            *communication_table(ways),
            *ranks_table(ways),
            *traffic_table(ways),
            *(dataclasses.replace(table, folded=True) for table in message_tables(timed)[:_MOST_MESSAGE_TABLES]),
        ),
    )
    memory = Section(
        title="Memory of ways of going parallel",
        paragraphs=tuple(sharding_sentences(holding)),
        charts=(_memory_chart(holding),) if holding else (),
        tables=tuple(memory_tables(ways)),
    )
    return [times, *([memory] if memory.tables else [])]


def _places(ways: Sequence[Way]) -> list[tuple[str, list[Way]]]:
    """Ways side by side: those of the same model, context and so on, in the order of their appearance."""
    order = {place: number for number, place in enumerate(dict.fromkeys(way.place for way in ways))}
    ranked = sorted(ways, key=lambda way: order[way.place])
    return [(place, list(mine)) for place, mine in groupby(ranked, key=lambda way: way.place)]


def _step_sentences(ways: Sequence[Way]) -> list[str]:
    """The quickest way of each place, against the yardstick."""
    said = []
    for place, mine in _places(ways):
        talking = [way for way in mine if way.sync != YARDSTICK]
        if not talking:
            continue
        best = min(talking, key=_window_s)
        found = best.ratio("window_step")
        sentence = f"{place}: quickest in a row of steps is {best.name}, at {milliseconds(_window_s(best))} ms a step"
        if found and found.ratio and found.low and found.high:
            interval = f"99 % interval {ratio_words(found.low)} to {ratio_words(found.high)}"
            apart = "; they took no turns" if found.interleaving == "none" else ""
            sentence += (
                f", {ratio_words(found.ratio)} times as long as steps of ranks that do not talk ({interval}{apart})"
            )
        said.append(f"{sentence}.")
    return said


def _window_s(way: Way) -> float:
    return median_of(way.record, "window_step") or median_of(way.record, "step") or 0.0


def _steps_chart(ways: Sequence[Way]) -> Chart:
    """A panel a place, a pair of bars a way."""
    places = _places(ways)[:MAXIMUM_PANELS]
    widest = max(len(mine) for _, mine in places)
    names = [name for _, mine in places for name in short_labels([way.name for way in mine])]
    panels = Panels(
        titles=short_labels([place for place, _ in places]),
        columns=panel_columns(len(places), 2 * widest, label_characters=max(map(len, names))),
        x_title="way",
        y_title="time of a step (ms)",
        x_axis={"type": "category"},
    )
    for index, (_, mine) in enumerate(places):
        x = short_labels([way.name for way in mine])
        for place, (quantity, name) in enumerate(_TIMED.items()):
            seen = [way.record.samples.get(quantity) for way in mine]
            found = [summarize(samples) if samples and samples.values else None for samples in seen]
            y = [in_ms(one.median) if one else 0.0 for one in found]
            hover = [
                lines_of(label(way.name), f"{name}: {milliseconds(one.median, one.std)} ms" if one else "not seen")
                for way, one in zip(mine, found, strict=True)
            ]
            spread = error_bars([in_ms(one.std) if one else 0.0 for one in found])
            panels.add(index, bar(name, x, y, colour=SERIES[place], hover=hover, error_y=spread, offsetgroup=name))
    caption = "Lower is better. Medians of the slowest rank, with the standard deviation; none: ranks that do not talk."
    return panels.chart("Time of a step by way", caption, barmode="group")


def _memory_chart(ways: Sequence[Way]) -> Chart:
    """A panel a place, a stack a way: the point at which most of it is held."""
    places = _places(ways)[:MAXIMUM_PANELS]
    widest = max(len(mine) for _, mine in places)
    names = [name for _, mine in places for name in short_labels([way.name for way in mine])]
    panels = Panels(
        titles=short_labels([place for place, _ in places]),
        columns=panel_columns(len(places), widest, label_characters=max(map(len, names))),
        x_title="way",
        y_title="held by a rank (GiB)",
        x_axis={"type": "category"},
    )
    for index, (_, mine) in enumerate(places):
        x = short_labels([way.name for way in mine])
        fullest = [_fullest(way) for way in mine]
        for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
            sizes = [lines.get(category, 0) for _, lines in fullest]
            hover = [
                lines_of(label(way.name), f"{category} {point}: {byte_words(size)}")
                for way, (point, _), size in zip(mine, fullest, sizes, strict=True)
            ]
            panels.add(index, bar(category, x, [in_gib(size) for size in sizes], colour=colour, hover=hover))
    caption = "Rank 0 at the fullest of four points: after init, forward, backward and the step."
    return panels.chart("What a rank holds by way", caption, barmode="stack")


def _fullest(way: Way) -> tuple[str, dict[str, int]]:
    points = {
        point: {name: lines[name][0] for name in CATEGORIES if name in lines} for point, lines in held_by(way).items()
    }
    return max(points.items(), key=lambda item: sum(item[1].values()))


def sharding_sentences(ways: Sequence[Way]) -> list[str]:
    """How sharding whole tensors' state differs from sharding flat buffers (ZeRO-1 and 2), from the run's own numbers."""
    said = []
    for place, mine in _places(ways):
        by_sync = {way.sync: way for way in mine}
        whole, flat = by_sync.get("sharded"), by_sync.get("sharded_flat")
        if whole is None or flat is None:
            continue
        ranks = whole.record.config["ranks"]
        said.append(
            f"{place}: how the two sharded optimizers differ, for P bytes of parameters on N = {ranks} ranks. sharded gives whole "
            "tensors to owners: gradients are all-reduced, 2 P (N - 1) / N on the wire, then owners broadcast what they updated, "
            f"P more in all: {_sent(whole)} of tensors a step. sharded_flat is ZeRO-1 with ZeRO-2's gradients: a reduce-scatter "
            f"and an all-gather, P (N - 1) / N each, as much as one all-reduce: {_sent(flat)}. After backward a rank of sharded "
            f"holds {_held(whole, 'gradients')} of gradients, whole, one of sharded_flat {_held(flat, 'gradients')}, its 1/N; of "
            f"optimizer state {_held(whole, 'optimizer state')} and {_held(flat, 'optimizer state')}. Both update about 1/N of the "
            f"elements; a step in a row of steps takes {_ms(whole)} in sharded and {_ms(flat)} in sharded_flat, whose all-gather "
            "runs behind the update and the next forward."
        )
    return said


def _ms(way: Way) -> str:
    return f"{milliseconds(_window_s(way))} ms"


def _sent(way: Way) -> str:
    sent = way.record.fact("wire_bytes")
    return "not counted" if sent is None else byte_words(sent)


def _held(way: Way, category: str) -> str:
    return byte_words(held_by(way).get("after backward", {}).get(category, (0, None))[0])
