"""Tables of runs: each run with its step by part, the lines that wait, compilations, graph breaks, the inspected step."""

from collections.abc import Callable, Sequence
from typing import Any

from trainstep.config.script import Part
from trainstep.records.record import Samples
from trainstep.records.summary import summarize
from trainstep.report.kit.forms import COUNT, GIB, MS, PERCENT, TEXT, WHOLE, Form, shortened, three_digits
from trainstep.report.kit.rows import Row, quantities, shown_facts
from trainstep.report.kit.tables import Column, Line, Table, filled
from trainstep.report.profile.tables import detail_tables
from trainstep.report.run.answer import WORDS
from trainstep.report.run.runs import Run, main_runs, place_words, runs_of

_LONGEST = 60
_SHOWN = 12
"""The most lines of a table of waits or compilations that the terminal shows."""
_EACH = Form(text=three_digits)
_PARTS_NOTE = (
    "Shares are of the whole time of the steps, on the host, without warm-ups and inspected steps. Waiting for data: inside a "
    "DataLoader. Forward: the outermost module and the loss. Backward: with the messages in it. Optimizer: with unscaling and "
    "clipping. Other: all code between, such as making a batch, logging, saving."
)
_WAITS_NOTE = "Calls and times are per inspected step."


def run_tables(rows: Sequence[Row]) -> list[Table]:
    """The tables outside the page: all runs, then the parts, waits and compilations of the last run."""
    runs = runs_of(rows)
    main = main_runs(runs)
    last = main[-1:]
    return filled(
        runs_table(runs, rows), *(table for run in last for table in (parts_table(run), *event_tables(run, _SHOWN)))
    )


def runs_table(runs: Sequence[Run], rows: Sequence[Row] = ()) -> Table:
    """A line for each rank of each run."""
    lines = [Line(run.row, run) for run in runs]
    columns = [
        Column("run", TEXT, lambda line: shortened(line.value.name, _LONGEST), names=True),
        Column("steps", COUNT, lambda line: line.value.steps),
        Column(
            "step (ms)", MS, lambda line: line.value.step_s, help="the median, without warm-ups and inspected steps"
        ),
        Column("slowest 5 % (ms)", MS, lambda line: _late(line.value), help="95 % of the steps are faster", more=True),
        *(
            Column(
                f"{WORDS[part]} (%)",
                PERCENT,
                _share(part),
                more=part in (Part.EVALUATION, Part.OTHER),
                help=part.__doc__ or "",
            )
            for part in Part
        ),
        Column("messages (%)", PERCENT, lambda line: line.value.exposed_share or None, optional=True),
        Column("collector (%)", PERCENT, lambda line: line.value.share("garbage_collection"), more=True),
        Column("skipped updates", WHOLE, lambda line: line.value.total("skipped_updates") or None, optional=True),
        Column("recompiled", WHOLE, lambda line: line.value.latest("recompilations") or None, optional=True),
        Column("graph breaks", WHOLE, lambda line: line.value.latest("graph_breaks") or None, optional=True),
        Column("retries", WHOLE, lambda line: line.value.total("allocation_retries") or None, optional=True),
        Column("peak (GiB)", GIB, lambda line: _peak(line.value), more=True),
        Column("ended", TEXT, lambda line: shortened(line.value.ending or "not recorded", _LONGEST)),
    ]
    raw = ({**quantities(row), **shown_facts(row.record)} for row in rows)
    return Table.of("Runs", lines, columns, raw=raw)


def parts_table(run: Run) -> Table:
    """A line for each part of the step of one run, on the host and on the GPU."""
    lines = [_part_line(run, part) for part, share in run.shares() if share > 0]
    columns = [
        Column("part of the step", TEXT, "part", names=True),
        Column("share (%)", PERCENT, "share"),
        Column("mean (ms)", MS, "mean", more=True),
        Column("median (ms)", MS, "median"),
        Column("slowest 5 % (ms)", MS, "late", more=True),
        Column("on the GPU, mean (ms)", MS, "device", optional=True),
    ]
    return Table.of(f"Where the time of a step goes: {shortened(run.name, _LONGEST)}", lines, columns, note=_PARTS_NOTE)


def event_tables(run: Run, shown: int | None = None) -> list[Table]:
    """The tables of what was noted in the run: lines that wait, compilations, graph breaks."""
    waits, compilations, breaks = run.waits, run.lines("compilations"), run.lines("graph_breaks")
    what = "that wait for the GPU" if run.on_gpu else "that would wait for a GPU"
    tables = [
        Table.of(
            f"Lines {what}",
            waits[:shown],
            [
                Column("line", TEXT, place_words, names=True),
                Column("source", TEXT, lambda line: shortened(line["source"], _LONGEST)),
                Column("calls", _EACH, "calls"),
                Column("time (ms)", MS, lambda line: line["time_s"] or None, optional=True),
                Column("why", TEXT, "why", more=True),
            ],
            note=_note(_WAITS_NOTE, waits, shown),
        ),
        Table.of(
            "Compilations",
            compilations[:shown],
            [
                Column("step", COUNT, "step"),
                Column("function", TEXT, "function", names=True),
                Column("line", TEXT, place_words),
                Column("time (s)", _EACH, "time_s"),
                Column("compiled again because", TEXT, lambda line: shortened(line["reason"], 2 * _LONGEST)),
            ],
            note=_note("", compilations, shown),
        ),
        Table.of(
            "Graph breaks",
            breaks[:shown],
            [
                Column("line", TEXT, place_words, names=True),
                Column("count", COUNT, "count"),
                Column("reason", TEXT, lambda line: shortened(line["reason"], 2 * _LONGEST)),
            ],
            note=_note("", breaks, shown),
        ),
    ]
    return filled(*tables)


def inspected_tables(run: Run) -> list[Table]:
    """The tables of the last inspected step, as `trainstep profile` has them."""
    if not run.inspected:
        return []
    record = run.inspected[-1]
    own = ("waits", "compilations", "graph_breaks")
    return detail_tables({name: table for name, table in record.tables.items() if name not in own}, whole=True)


def _note(note: str, lines: Sequence[Any], shown: int | None) -> str:
    more = f"And {len(lines) - shown} more: the page has them." if shown is not None and len(lines) > shown else ""
    return f"{note} {more}".strip()


def _share(part: Part) -> Callable[[Line], float]:
    return lambda line: line.value.share(part)


def _late(run: Run) -> float | None:
    values = run.samples.get("step")
    return summarize(Samples(unit="s", values=values)).p95 if values else None


def _peak(run: Run) -> float | None:
    peak: float | None = run.latest("peak_allocated_bytes") or run.latest("peak_rss_bytes")
    return peak


def _part_line(run: Run, part: Part) -> dict[str, Any]:
    summary = summarize(Samples(unit="s", values=run.samples[part]))
    device = run.samples.get(f"device_{part.value}")
    return {
        "part": WORDS[part],
        "share": run.share(part),
        "mean": summary.mean,
        "median": summary.median,
        "late": summary.p95,
        "device": sum(device) / len(device) if device else None,
    }
