"""Shows a search of the fastest options: its answer, its table of changes, and the TOML file that other verbs read."""

import json
from typing import Any

from trainstep.plan.preset import Options, Result, Step
from trainstep.records.record import Environment
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import RATIO, listed, ratio_words
from trainstep.report.kit.tables import Column, Table
from trainstep.report.kit.visible import one_line

TOML_MARK = "# A preset that trainstep bench --preset wrote."
TIMING_FIELDS = frozenset(("steps", "warmups", "sync", "nvtx", "cold_compile", "seed"))
"""Fields that say how a step is timed: a preset leaves them to its user."""


def preset_answer(label: str, result: Result, toml: str) -> Answer:
    """What was found, what was left untried, and the command that uses it."""
    use = f"`trainstep bench --config {toml}` takes these options, and so does `trainstep parallel`."
    if result.trouble:
        return Answer(workload="train_step", verdict=f"{label}: the start does not run: {result.trouble}")
    left = f" The budget is spent; not tried: {listed(result.untried)}." if result.untried else ""
    if not result.kept:
        tried = sum(step.comparison is not None for step in result.steps)
        verdict = f"{label}: none of {tried} changes that ran is faster; the start is kept.{left}"
        return Answer(workload="train_step", verdict=verdict)
    kept, whole = listed([step.change for step in result.kept]), result.whole
    if whole is None:
        together = "not compared with the start together" if result.untried else "so that the step fits"
        return Answer(workload="train_step", verdict=f"{label}: kept are {kept}, {together}.{left}", suggestion=use)
    if not whole.kept:
        verdict = (
            f"{label}: {kept} seemed faster, but together they are not shown to be: {whole.reason}; the start is kept."
        )
        return Answer(workload="train_step", verdict=verdict + left)
    verdict = f"{label}: {kept} take {_interval_words(whole)} of the start's time.{left}"
    return Answer(workload="train_step", verdict=verdict, suggestion=use)


def preset_table(label: str, result: Result) -> Table:
    """Each change in the order of trying; each ratio is against the start with the changes kept before it."""
    steps = [*result.steps, *([result.whole] if result.whole else [])]
    columns = [
        Column("change", get=lambda step: step.change, names=True),
        Column("ratio", RATIO, lambda step: step.comparison and step.comparison.ratio),
        Column("99 % from", RATIO, lambda step: step.comparison and step.comparison.low),
        Column("to", RATIO, lambda step: step.comparison and step.comparison.high),
        Column("verdict", get=lambda step: step.word),
        Column("kept", get=lambda step: "yes" if step.kept else "no"),
        Column("why", get=lambda step: step.reason),
    ]
    note = "A ratio is against the start with the changes kept above it; the last line, all kept changes, is against the start."
    return Table.of(f"Changes: {label}", steps, columns, note=note, raw=[_raw(label, step) for step in steps])


def preset_toml(label: str, result: Result, *, command: str, records: str, here: Environment) -> str:
    """The options as TOML that `--config` reads; comments have each change's ratio and where the records are."""
    steps = {step.change: step for step in result.kept}
    chosen = result.chosen
    lines = [
        TOML_MARK,
        f"# {label}, by: {command}",
        f"# On {here.gpu or here.cpu}, torch {here.torch}, commit {here.commit or 'unknown'}. Records: {records}",
        f"# {_whole_words(result)}",
    ]
    for name, value in chosen.items():
        if name in TIMING_FIELDS:
            continue
        step = steps.get(f"{name} {value}") if result.start.get(name) != value else None
        if step is not None:
            lines.append(f"# {step.change}: {_interval_words(step) + ', ' if step.comparison else ''}{step.reason}")
        lines.append(f"{name} = {_toml_value(value)}")
    lines += [f"# not kept: {step.change}: {step.reason}" for step in result.steps if not step.kept]
    lines += [f"# not tried, the budget was spent: {name}" for name in result.untried]
    return "\n".join(map(one_line, lines)) + "\n"


def _whole_words(result: Result) -> str:
    if result.whole is None:
        return "No change was kept." if not result.kept else "All changes together were not compared with the start."
    confirmed = "" if result.whole.kept else " This does not confirm them, so that the options are the start's."
    return f"All kept changes against the start: {_interval_words(result.whole)}.{confirmed}"


def _interval_words(step: Step) -> str:
    """`0.612 (99 % interval 0.601 to 0.622)`"""
    known = step.comparison
    if known is None or known.ratio is None or known.low is None or known.high is None:
        return "unknown"
    return f"{ratio_words(known.ratio)} (99 % interval {ratio_words(known.low)} to {ratio_words(known.high)})"


def _toml_value(value: Any) -> str:
    return json.dumps("none" if value is None else value)


def _raw(label: str, step: Step) -> Options:
    known = step.comparison
    return {
        "cell": label,
        "change": step.change,
        "ratio": known.ratio if known else None,
        "ratio_low": known.low if known else None,
        "ratio_high": known.high if known else None,
        "pairs": known.n if known else None,
        "verdict": step.word,
        "kept": step.kept,
        "reason": step.reason,
    }
