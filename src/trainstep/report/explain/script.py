"""Shows the lines to write in a user's own script, one for each finding, and a patch where calls were recognised."""

from trainstep.explain.causes import CAUSES, page_of
from trainstep.explain.script_patch import Patch, ToWrite
from trainstep.report.explain.budgets import Explained
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import MS, TEXT, listed
from trainstep.report.kit.tables import Column, Line, Table


def script_answer(step: Explained, to_write: list[ToWrite], patch: str, reason: str) -> Answer:
    """Why nothing was measured, and what to write."""
    why = f"{step.label}: nothing was measured: {reason}"
    if not to_write:
        return Answer(workload="explain", verdict=f"{why}; no excess was found, so that there is nothing to change.")
    causes = listed([CAUSES[item.cause].title for item in to_write])
    how = "apply the patch below (`git apply`)" if patch else "write the lines below"
    return Answer(
        workload="explain",
        verdict=f"{why}. To change: {causes}.",
        suggestion=f"One at a time, {how}, run the script again with `trainstep run`, and compare both with `trainstep compare`.",
    )


def script_table(step: Explained, to_write: list[ToWrite], note: str = "") -> Table:
    """A line for each finding: the predicted gain, where it was seen, and the lines of its page. `note`: stands with the table."""
    columns = [
        Column("cause", TEXT, "title", names=True),
        Column("predicted (ms)", MS, "predicted_gain_s", help="gain that explain predicts"),
        Column("from (ms)", MS, "predicted_gain_low_s"),
        Column("to (ms)", MS, "predicted_gain_high_s"),
        Column("where", TEXT, "where", optional=True),
        Column("write", TEXT, "write"),
        Column("page", TEXT, "page", more=True),
    ]
    lines = [
        {
            "kind": "to write",
            "cause": item.cause,
            "title": CAUSES[item.cause].title,
            "predicted_gain_s": item.gain.time_s,
            "predicted_gain_low_s": item.gain.low_s,
            "predicted_gain_high_s": item.gain.high_s,
            "where": item.where or None,
            "lines": list(item.lines),
            "write": "; ".join(item.lines) or CAUSES[item.cause].advice,
            "page": page_of(item.cause),
        }
        for item in to_write
    ]
    raw = [{"cell": step.label, **line} for line in lines]
    rows = [Line(step.row, line) for line in lines]
    return Table.of(f"What to write: {step.label}", rows, columns, note=note, raw=raw)


def patch_table(step: Explained, patch: Patch) -> Table:
    """The patch as a row for JSON only; the table shows nothing."""
    raw = [{"cell": step.label, "kind": "patch", "patch": patch.text, "note": patch.words or None}]
    return Table.of(f"Patch: {step.label}", [], [Column("patch", TEXT)], raw=raw)
