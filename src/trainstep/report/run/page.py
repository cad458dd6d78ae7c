"""The sections on runs of a page: the step by part, the times of all steps, what was noted, the inspected step."""

from collections.abc import Sequence

from trainstep.config.script import Part
from trainstep.report.kit.charts import PHASE_COLOURS, Chart, Panels, Section, bar, label, lines_of, short_labels
from trainstep.report.kit.forms import in_ms, ms_words, percent, seconds_words
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import filled
from trainstep.report.profile.answer import sentences
from trainstep.report.run.answer import WORDS
from trainstep.report.run.runs import Run, main_runs, runs_of
from trainstep.report.run.tables import event_tables, inspected_tables, parts_table, runs_table

_COLOURS = {
    **PHASE_COLOURS,
    Part.DATA: "theme:vermilion",
    Part.EVALUATION: "theme:blue",
    Part.OTHER: "theme:grey",
}
_DETAILED = 4
"""The most runs with sections of their own."""
_MOST_POINTS = 2000


def run_sections(rows: Sequence[Row]) -> list[Section]:
    """The sections that these records fill."""
    runs = [run for run in runs_of(rows) if run.step_s is not None]
    if not runs:
        return []
    overview = Section(title="Where the time of a step goes", charts=(parts_chart(runs),), tables=(runs_table(runs),))
    details = [section for run in main_runs(runs)[-_DETAILED:] for section in _sections_of(run)]
    return [overview, *details]


def _sections_of(run: Run) -> list[Section]:
    charts = (steps_chart(run),) if run.samples.get("step") else ()
    noted = Section(
        title=f"Steps of {run.name}",
        paragraphs=tuple(_paragraphs(run)),
        charts=charts,
        tables=tuple(filled(parts_table(run), *event_tables(run))),
    )
    if not run.inspected:
        return [noted]
    record = run.inspected[-1]
    step = record.fact("inspected_step")
    inspected = Section(
        title=f"Inspected step {'' if step is None else f'{step:,} '}of {run.name}",
        paragraphs=tuple(sentences(record.tables, record.fact)),
        tables=tuple(inspected_tables(run)),
    )
    return [noted, inspected]


def _paragraphs(run: Run) -> list[str]:
    """Sentences about the steps that were watched, and the cost of watching."""
    kept, early = len(run.samples.get("step", ())), len(run.warmups)
    inspected = sum(row.record.fact("inspected_step") is not None for row in run.rows)
    sentence = (
        f"{run.steps:,} steps: {early} warm-up{'s' if early != 1 else ''}, {inspected} inspected, {kept:,} timed."
    )
    optimizers, backwards = run.latest("optimizers") or 1, run.total("backward_passes")
    if optimizers > 1:
        sentence += (
            f" {optimizers} optimizers make a step; it ends with the last update of the one that updates least often."
        )
    if run.steps and round(backwards / run.steps, 1) > optimizers:
        sentence += f" Backward runs {backwards / run.steps:.1f} times a step."
    watching_s, total_s = run.total("watching_s"), sum(row.record.duration_s for row in run.rows)
    if watching_s and total_s:
        share = percent(watching_s / total_s)
        sentence += f" Inspecting and writing took {seconds_words(watching_s)} beside the steps, {share} % of the time."
    if run.latest("own_profiler"):
        sentence += " The script used torch's profiler itself, after which no step was inspected."
    if not run.share(Part.DATA):
        sentence += " No DataLoader was seen: batches that the script makes itself count as other code."
    return [sentence]


def parts_chart(runs: Sequence[Run]) -> Chart:
    """A stacked bar for each run: its parts' shares of the time."""
    labels = short_labels([run.name for run in runs])
    panels = Panels(titles=[""], columns=1, x_title="share of the time (%)", y_title="")
    panels.axis = {"type": "category", "autorange": "reversed", "categoryarray": labels}
    for part in Part:
        shares = [run.share(part) for run in runs]
        if any(shares):
            hover = [
                lines_of(text, f"{WORDS[part]}: {percent(share)} %") for text, share in zip(labels, shares, strict=True)
            ]
            widths = [100 * share for share in shares]
            panels.add(0, bar(WORDS[part], widths, labels, colour=_COLOURS[part], hover=hover, orientation="h"))
    caption = "Each part's share of the time of all timed steps, on the host."
    height = 170 + 34 * len(labels)
    return panels.chart("A step by part", caption, barmode="stack", bargap=0.4, height=height, horizontal=True)


def steps_chart(run: Run) -> Chart:
    """The time of every step, in order; of a long run only every n-th step, to limit the number of points."""
    values = run.samples["step"]
    stride = -(-len(values) // _MOST_POINTS)
    places = list(range(0, len(values), stride))
    panels = Panels(titles=[""], columns=1, x_title="timed step", y_title="time (ms)")
    times = [in_ms(values[place]) for place in places]
    panels.add(
        0,
        {
            "type": "scatter",
            "name": label("step"),
            "mode": "markers",
            "x": places,
            "y": times,
            "marker": {"color": "theme:blue", "size": 4},
            "hovertext": [f"step {place:,}: {ms_words(values[place])}" for place in places],
            "hoverinfo": "text",
        },
    )
    one_in = f" One in {stride} is drawn." if stride > 1 else ""
    return panels.chart("Time of every step", f"Warm-ups and inspected steps are left out.{one_in}")
