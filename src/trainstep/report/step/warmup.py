"""The section on warm-ups of a page, and the answer of a sweep over warm-ups."""

from collections.abc import Sequence

from trainstep.grouping import grouped
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import COUNT, MS, MS_STD, PERCENT, listed, percent, seconds_words, times_words
from trainstep.report.kit.ranking import median_and_range
from trainstep.report.kit.rows import PROVENANCE, Row, step_means
from trainstep.report.kit.tables import Column, Line, Table, filled, point_columns
from trainstep.report.step.warmup_charts import (
    PARTS,
    SHOWN_STEPS,
    FirstStep,
    FirstSteps,
    by_w_chart,
    curve_chart,
    first_step,
    split_chart,
)

_MOST_IN_CHARTS = 40
_USUALLY_ENOUGH = 2
"""Warm-ups that are enough as a rule."""
_NAMED = 3
"""The most cells named in a sentence."""
_ENOUGH = {0: "no warm-up is needed", 1: "one warm-up is enough", 2: "two warm-ups are enough"}


def warmup_sections(rows: Sequence[Row]) -> list[Section]:
    """The section, if the number of warm-ups w varies or a cell has warm-ups. Of cells that differ only in w, it shows the one
    with the most."""
    swept = _swept(rows)
    in_sweep = set(map(id, swept))
    warmed = [line for line in _first_steps(rows) if line.value.warmups or id(line.row) in in_sweep]
    chosen = _with_most_warmups(warmed)
    if not chosen:
        return []
    shown = _slowest_to_start(chosen)
    by_w = by_w_chart(swept)
    left_out = (
        f"Charts show the {len(shown)} cells with the slowest first step against their steady steps; tables have all "
        f"{len(chosen)}."
    )
    section = Section(
        title="Warming up: why one or two steps are not enough"
        if 2 * len(_late(chosen)) > len(chosen)
        else "Warming up",
        paragraphs=(*answer(chosen, swept), *([left_out] if len(shown) < len(chosen) else [])),
        charts=(curve_chart(shown), *([by_w] if by_w else []), split_chart(shown)),
        tables=tuple(filled(_split_table(chosen), _by_w_table(swept), _steps_table(chosen))),
    )
    return [section]


def _swept(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ from another row only in the number of warm-ups."""
    alike = grouped(rows, lambda row: row.rest("warmups"))
    return [row for row in rows if len({other.point.get("warmups") for other in alike[row.rest("warmups")]}) > 1]


def _first_steps(rows: Sequence[Row]) -> FirstSteps:
    return [Line(row, first) for row in rows if (first := first_step(row.record))]


def _with_most_warmups(lines: FirstSteps) -> FirstSteps:
    """The cell with the most warm-ups among cells that differ only in warm-ups."""
    by_rest = grouped(lines, lambda line: line.row.rest("warmups"))
    return [max(alike, key=lambda line: int(line.value.warmups)) for alike in by_rest.values()]


def _not_noisy(chosen: FirstSteps) -> FirstSteps:
    """The cells whose warm steps vary little enough to tell warming up from noise."""
    return [line for line in chosen if not line.value.is_noisy]


def _late(chosen: FirstSteps) -> FirstSteps:
    """The cells whose third step is still slow."""
    return [
        line for line in _not_noisy(chosen) if line.value.settled is None or line.value.settled > _USUALLY_ENOUGH + 1
    ]


def answer(chosen: FirstSteps, sweep: Sequence[Row]) -> list[str]:
    """Sentences that say, from these numbers, what warm-ups are for and how many these cells need."""
    row, worst = max(_not_noisy(chosen) or chosen, key=_slowdown)
    highest = "" if len(chosen) == 1 else f", the highest ratio of {len(chosen)} cells"
    if worst.extra_s <= 0:
        return ["No first step took longer than the steady steps: there was nothing left to warm up."]
    slowdown = times_words(worst.first_s / worst.steady_s)
    if worst.is_noisy or not worst.is_slow:
        return [
            f"The first step of {_name(row)} took {seconds_words(worst.first_s)}, {slowdown} the median; warm steps vary by up "
            f"to {percent(worst.tolerance)} % as well, so these steps do not show whether a warm-up is needed."
        ]
    parts = sorted(PARTS, key=lambda part: -(getattr(worst, part) or 0.0))
    shares = ", ".join(_share(worst, part) for part in parts if (getattr(worst, part) or 0.0) > 0)
    first = (
        f"The first step of {_name(row)} took {seconds_words(worst.first_s)}, {slowdown} the steady "
        f"{seconds_words(worst.steady_s)}{highest}. Of the extra {seconds_words(worst.extra_s)}: {shares}."
    )
    if worst.rest_s < 0:
        first += " The parts were measured separately; their sum exceeds the extra time."
    if worst.context_s:
        first += f" Creating the CUDA context took another {seconds_words(worst.context_s)}, before any step."
    return [first, f"{_needed_words(chosen)} {_bias_words(chosen)}", *_measured_means(sweep)]


def swept_answer(rows: Sequence[Row]) -> str:
    """How many warm-ups are enough, if these rows differ in their number; else empty."""
    swept = _swept(rows)
    chosen = _with_most_warmups(_first_steps(swept))
    return " ".join([_needed_words(chosen), *_measured_means(swept)]) if chosen else ""


def _name(row: Row) -> str:
    return row.label(without=["warmups", *PROVENANCE])


def _slowdown(line: Line) -> float:
    """The first step's time over the steady time."""
    return float(line.value.first_s / line.value.steady_s)


def _slowest_to_start(chosen: FirstSteps) -> FirstSteps:
    """As many cells as charts can hold, in their order: those with the largest slowdown of the first step."""
    kept = {id(line) for line in sorted(chosen, key=_slowdown, reverse=True)[:_MOST_IN_CHARTS]}
    return [line for line in chosen if id(line) in kept]


def _share(first: FirstStep, part: str) -> str:
    """`20.0 % device memory (cudaMalloc, 420 calls)`."""
    name = PARTS[part]
    if part == "allocation_s" and first.allocations:
        name = name.replace("cudaMalloc", f"cudaMalloc, {first.allocations:,} calls")
    return f"{percent(getattr(first, part) / first.extra_s)} % {name}"


def _needed_words(chosen: FirstSteps) -> str:
    """How many warm-ups these cells need, from the steps of each cell; noisy cells are only counted."""
    clear, late = _not_noisy(chosen), _late(chosen)
    noisy = f" The steps of {len(chosen) - len(clear)} vary too much to tell." if len(clear) < len(chosen) else ""
    if not clear:
        return noisy.strip()
    needed = [(line.value.settled or 1) - 1 for line in clear if line not in late]
    if not late:
        cells = "this cell" if len(clear) == 1 else f"all {len(clear)} cells"
        return f"On this machine {_ENOUGH[max(needed)]} for {cells}.{noisy}"
    most = max((line.value.settled or len(line.value.steps_s)) - 1 for line in late)
    names = listed((_name(line.row) for line in late), most=_NAMED)
    rest = f"On this machine {_ENOUGH[max(needed)]} for {len(needed)} of {len(clear)} cells; " if needed else ""
    need = f"{names} need{'s' if len(late) == 1 else ''} up to {most}"
    return f"{rest}{need}: loading, allocating and raising the clock do not all happen in the first step.{noisy}"


def _bias_words(chosen: FirstSteps) -> str:
    """How far the mean is off if timing begins too early, for the cell with the largest bias."""
    row, worst = max(_not_noisy(chosen), key=lambda line: line.value.bias_after(min(1, line.value.warmups)))
    tried = [w for w in (0, 1, 2) if w <= worst.warmups]
    biases = listed([f"{_signed(worst.bias_after(w))} %" for w in tried])
    after = listed([str(w) for w in tried])
    return f"Timed after {after} warm-ups, the mean step of {_name(row)} differs by {biases} from its steady median."


def _measured_means(sweep: Sequence[Row]) -> list[str]:
    """The means that a sweep over w measured at small w against those at the largest w."""
    by_w = grouped(step_means(sweep), lambda timed: int(timed[0].point["warmups"]))
    most = max(by_w, default=0)
    reference = {row.rest("warmups"): mean for row, (mean, _) in by_w.pop(most, [])}
    parts = []
    for w, timed in sorted(by_w.items()):
        rests = [(row.rest("warmups"), mean) for row, (mean, _) in timed]
        ratios = [mean / reference[rest] - 1 for rest, mean in rests if rest in reference]
        if ratios:
            span = _signed(ratios[0]) if len(ratios) == 1 else f"{_signed(min(ratios))} to {_signed(max(ratios))}"
            parts.append(f"{span} % with w = {w}")
    return [f"Measured means against those with w = {most}: {'; '.join(parts)}."] if parts else []


def _signed(share: float) -> str:
    return percent(share) if percent(share).startswith("\N{MINUS SIGN}") else f"+{percent(share)}"


def _split_table(chosen: FirstSteps) -> Table:
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
        Column("mean ± std (ms)", MS_STD, lambda line: line.value),
        Column("std / mean (%)", PERCENT, lambda line: (line.value[1] or 0.0) / line.value[0]),
    ]
    return Table.of("Total step against warm-ups", lines, columns)


def _steps_table(chosen: FirstSteps) -> Table:
    """The numbers of the curve: steps 1, 2, 3... in ms."""
    longest = min(SHOWN_STEPS, max(len(line.value.steps_s) for line in chosen))

    def step_column(place: int) -> Column:
        return Column(f"step {place + 1} (ms)", MS, lambda line: next(iter(line.value.steps_s[place:]), None))

    columns = [*point_columns(chosen, without=["warmups"]), *map(step_column, range(longest))]
    return Table.of("Every step from the first", chosen, columns, folded=True)
