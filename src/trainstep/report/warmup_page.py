"""What a page shows of warming up: why, in sentences made from the numbers, then the charts and their tables."""

from collections.abc import Sequence

from trainstep.report.charts import Section
from trainstep.report.forms import COUNT, MS, MS_STD, PERCENT, listed, percent, seconds_words, times_words
from trainstep.report.ratios import median_and_range
from trainstep.report.rows import PROVENANCE, Row, grouped, step_means
from trainstep.report.tables import Column, Line, Table, filled, point_columns
from trainstep.report.warmup_charts import (
    PARTS,
    SHOWN_STEPS,
    FirstStep,
    Found,
    by_w_chart,
    curve_chart,
    first_step,
    split_chart,
)

_MOST_IN_CHARTS = 40
_MOST_NEEDED = 2
"""Warm-ups that are enough as a rule."""
_NAMED = 3
_ENOUGH = {0: "no warm-up is needed", 1: "one warm-up is enough", 2: "two warm-ups are enough"}


def warmup_sections(rows: Sequence[Row]) -> list[Section]:
    """The section, where w varies or any cell has warm-ups; of cells that differ in w only, the one with the most."""
    swept = _swept(rows)
    in_sweep = set(map(id, swept))
    found = [Line(row, first) for row in rows if (first := first_step(row.record))]
    warmed = [line for line in found if line.of.warmups or id(line.row) in in_sweep]
    by_rest = grouped(warmed, lambda line: line.row.rest("warmups"))
    chosen = [max(lines, key=lambda line: int(line.of.warmups)) for lines in by_rest.values()]
    if not chosen:
        return []
    shown = _slowest_to_start(chosen)
    by_w = by_w_chart(swept)
    section = Section(
        title="Warming up: why one or two steps are not enough"
        if 2 * len(_late(chosen)) > len(chosen)
        else "Warming up",
        paragraphs=(*answer(chosen, swept), *_left_out(shown, chosen)),
        charts=(curve_chart(shown), *([by_w] if by_w else []), split_chart(shown)),
        tables=tuple(filled(_split_table(chosen), _by_w_table(swept), _steps_table(chosen))),
    )
    return [section]


def _swept(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ from another in the number of warm-ups only."""
    alike = grouped(rows, lambda row: row.rest("warmups"))
    return [row for row in rows if len({other.point.get("warmups") for other in alike[row.rest("warmups")]}) > 1]


def _told(chosen: Found) -> Found:
    """The cells whose warm steps vary little enough to tell warming up from noise."""
    return [line for line in chosen if not line.of.is_noisy]


def _late(chosen: Found) -> Found:
    """The cells whose third step is still slow."""
    return [line for line in _told(chosen) if line.of.settled is None or line.of.settled > _MOST_NEEDED + 1]


def answer(chosen: Found, sweep: Sequence[Row]) -> list[str]:
    """Sentences that say, from these numbers, what warm-ups are for and how many these cells need."""
    row, worst = max(_told(chosen) or chosen, key=lambda one: one[1].first_s / one[1].steady_s)
    many = "" if len(chosen) == 1 else f", of {len(chosen)} cells the highest ratio"
    if worst.extra_s <= 0:
        return ["No first step took longer than the steady ones: here nothing was left to warm up."]
    if worst.is_noisy or not worst.is_slow:
        return [_no_slower(row, worst)]
    parts = sorted(PARTS, key=lambda part: -(getattr(worst, part) or 0.0))
    said = ", ".join(_share(worst, part) for part in parts if (getattr(worst, part) or 0.0) > 0)
    first = (
        f"The first step of {_name(row)} took {seconds_words(worst.first_s)}, "
        f"{times_words(worst.first_s / worst.steady_s)} the steady {seconds_words(worst.steady_s)}{many}. "
        f"Of the extra {seconds_words(worst.extra_s)}: {said}."
    )
    if worst.rest_s < 0:
        first += " The parts were measured on their own and exceed the extra time together."
    if worst.context_s:
        first += f" Creating the CUDA context took another {seconds_words(worst.context_s)}, before any step."
    return [first, f"{_how_many(chosen)} {_biases(chosen)}", *_measured_means(sweep)]


def swept_answer(rows: Sequence[Row]) -> str:
    """How many warm-ups are enough, where these rows differ in their number; empty where they do not."""
    swept = _swept(rows)
    found = [Line(row, first) for row in swept if (first := first_step(row.record))]
    by_rest = grouped(found, lambda line: line.row.rest("warmups"))
    chosen = [max(lines, key=lambda line: int(line.of.warmups)) for lines in by_rest.values()]
    return " ".join([_how_many(chosen), *_measured_means(swept)]) if chosen else ""


def _no_slower(row: Row, found: FirstStep) -> str:
    """A first step within the noise is no sign of warming up."""
    return (
        f"The first step of {_name(row)} took {seconds_words(found.first_s)}, {times_words(found.first_s / found.steady_s)} the "
        f"median; warm steps vary by up to {percent(found.tolerance)} % as well, so that nothing can be told of warming up."
    )


def _name(row: Row) -> str:
    return row.label(without=["warmups", *PROVENANCE])


def _slowest_to_start(chosen: Found) -> Found:
    """As many cells as charts can hold: those whose first step is slowest against their steady ones, in their order."""
    ranked = sorted(chosen, key=lambda one: -one[1].first_s / one[1].steady_s)
    kept = {id(row) for row, _ in ranked[:_MOST_IN_CHARTS]}
    return [line for line in chosen if id(line.row) in kept]


def _left_out(shown: Found, chosen: Found) -> list[str]:
    if len(shown) == len(chosen):
        return []
    return [
        f"Charts show the {len(shown)} cells whose first step is slowest for its size; tables have all {len(chosen)}."
    ]


def _share(found: FirstStep, part: str) -> str:
    """`20.0 % device memory (cudaMalloc, 420 calls)`."""
    name = PARTS[part]
    if part == "allocation_s" and found.allocations:
        name = name.replace("cudaMalloc", f"cudaMalloc, {found.allocations:,} calls")
    return f"{percent(getattr(found, part) / found.extra_s)} % {name}"


def _how_many(chosen: Found) -> str:
    """How many warm-ups these cells need, from each one's own steps; of noisy ones nothing can be told."""
    told, late = _told(chosen), _late(chosen)
    noisy = f" The steps of {len(chosen) - len(told)} vary too much to tell." if len(told) < len(chosen) else ""
    if not told:
        return noisy.strip()
    needed = [(line.of.settled or 1) - 1 for line in told if line not in late]
    if not late:
        return f"On this machine {_ENOUGH[max(needed)]} for {_all(len(told))}.{noisy}"
    most = max((line.of.settled or len(line.of.steps_s)) - 1 for line in late)
    named = listed(
        [*(_name(row) for row, _ in late[:_NAMED]), *([f"{len(late) - _NAMED} more"] if len(late) > _NAMED else [])]
    )
    rest = f"On this machine {_ENOUGH[max(needed)]} for {len(needed)} of {len(told)} cells; " if needed else ""
    need = f"{named} need{'s' if len(late) == 1 else ''} up to {most}"
    return f"{rest}{need}: what is loaded, allocated and clocked up does not all happen in the first step.{noisy}"


def _all(cells: int) -> str:
    return "this cell" if cells == 1 else f"all {cells} cells"


def _biases(chosen: Found) -> str:
    """What timing too early costs the cell that it costs most."""
    row, worst = max(_told(chosen), key=lambda one: one[1].bias_after(min(1, one[1].warmups)))
    tried = [w for w in (0, 1, 2) if w <= worst.warmups]
    biases = listed([f"{_signed(worst.bias_after(w))} %" for w in tried])
    after = listed([str(w) for w in tried])
    return f"Timed after {after} warm-ups, the mean step of {_name(row)} lies {biases} from its steady median."


def _measured_means(sweep: Sequence[Row]) -> list[str]:
    """What the sweep over w itself found: the mean at small w against that at the largest."""
    by_w = grouped(step_means(sweep), lambda timed: int(timed[0].point["warmups"]))
    most = max(by_w, default=0)
    reference = {row.rest("warmups"): mean for row, (mean, _) in by_w.pop(most, [])}
    said = []
    for w, timed in sorted(by_w.items()):
        rests = [(row.rest("warmups"), mean) for row, (mean, _) in timed]
        ratios = [mean / reference[rest] - 1 for rest, mean in rests if rest in reference]
        if ratios:
            span = _signed(ratios[0]) if len(ratios) == 1 else f"{_signed(min(ratios))} to {_signed(max(ratios))}"
            said.append(f"{span} % with w = {w}")
    return [f"Measured means against those with w = {most}: {'; '.join(said)}."] if said else []


def _signed(share: float) -> str:
    return percent(share) if percent(share).startswith("\N{MINUS SIGN}") else f"+{percent(share)}"


def _split_table(chosen: Found) -> Table:
    columns = [
        *point_columns(chosen, without=["warmups"]),
        *(Column(f"{name} (ms)", MS, f"{name.removesuffix(' step')}_s") for name in ("first step", "steady", "extra")),
        *(Column(f"{name} (ms)", MS, part) for part, name in PARTS.items()),
        Column("cudaMalloc calls", COUNT, "allocations"),
        Column("CUDA context (ms), before", MS, "context_s"),
        Column("steady from step", COUNT, "settled"),
    ]
    return Table.of("The first step's extra time", chosen, columns)


def _by_w_table(rows: Sequence[Row]) -> Table:
    lines = [Line(row, time) for row, time in step_means(rows)]
    columns = [
        *point_columns(rows),
        Column("median (ms)", MS_STD, median_and_range("step")),
        Column("mean ± std (ms)", MS_STD, lambda line: line.of),
        Column("std / mean (%)", PERCENT, lambda line: (line.of[1] or 0.0) / line.of[0]),
    ]
    return Table.of("Total step against warm-ups", lines, columns)


def _steps_table(chosen: Found) -> Table:
    """The curve's numbers: step 1, 2, 3... in ms."""
    longest = min(SHOWN_STEPS, max(len(found.steps_s) for _, found in chosen))
    columns = [*point_columns(chosen, without=["warmups"]), *map(_step_column, range(longest))]
    return Table.of("Every step from the first", chosen, columns, folded=True)


def _step_column(place: int) -> Column:
    return Column(f"step {place + 1} (ms)", MS, lambda line: next(iter(line.of.steps_s[place:]), None))
