"""Shows a search of the fastest options: its answer, its table of changes, and the TOML file that other verbs read."""

import json
from typing import Any

from trainstep.plan.preset import Result
from trainstep.plan.trials import Options, Step
from trainstep.records.record import Environment
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import MS, RATIO, listed, ratio_words
from trainstep.report.kit.output_file import FIRST_LINES
from trainstep.report.kit.tables import Column, Table
from trainstep.report.kit.visible import one_line

GOES_ON = "The budget leaves no room for the rest; the same command goes on."


def preset_answer(label: str, result: Result, toml: str) -> Answer:
    """The answer: the result, the changes left untried, and the command that uses the preset."""
    verdict, helps = _verdict(result)
    left = ""
    if result.untried:
        left = f" {GOES_ON} Not tried: {listed(result.untried)}."
    use = f"`trainstep bench --config {toml}` takes these options." if helps else ""
    return Answer(workload="train_step", verdict=f"{label}: {verdict}{left}", suggestion=use)


def _verdict(result: Result) -> tuple[str, bool]:
    """The result in words, and whether there are options to use."""
    if result.trouble:
        return f"nothing was tried, because the start cannot be used: {result.trouble}", False
    if result.start_s is None:
        return "nothing was tried yet.", False
    ran = sum(step.word != "not run" for step in result.steps)
    if not result.kept:
        return f"of {ran} changes that ran, none was kept; the start stays.", False
    kept, whole = listed([step.change for step in result.kept]), result.whole
    if whole is None:
        why = "not yet compared with the start together" if result.untried else "without which the step does not fit"
        return f"kept: {kept}, {why}.", True
    if whole.kept:
        gains = [step.change for step in result.kept if step.comparison]
        return f"with {listed(gains)} a step takes {interval_words(whole)} of the start's time.", True
    return f"{kept} seemed faster, but together they do not prove to be: {whole.reason}; the start stays.", False


def preset_table(label: str, result: Result) -> Table:
    """Each change in the order of trying; each ratio is against the start with the changes kept before it."""
    steps = [*result.steps, *([result.whole] if result.whole else [])]
    columns = [
        Column("change", get=lambda step: step.change, names=True),
        Column("fastest alone (ms)", MS, lambda step: step.alone_s, optional=True),
        Column("ratio", RATIO, lambda step: step.comparison and step.comparison.ratio, optional=True),
        Column("99 % from", RATIO, lambda step: step.comparison and step.comparison.low, optional=True),
        Column("to", RATIO, lambda step: step.comparison and step.comparison.high, optional=True),
        Column("verdict", get=lambda step: step.word),
        Column("kept", get=lambda step: "yes" if step.kept else "no"),
        Column("why", get=lambda step: step.reason),
    ]
    start = f" The start's fastest step took {result.start_s * 1e3:,.4g} ms alone." if result.start_s else ""
    note = (
        "A ratio is against the start with the changes kept above it; the last line, all kept changes, is against the start. "
        f"Alone: in the trial, one process whose losses are compared.{start}"
    )
    return Table.of(f"Changes: {label}", steps, columns, note=note, raw=[_raw(label, step) for step in steps])


def preset_toml(label: str, result: Result, chosen: Options, *, command: str, record: str, here: Environment) -> str:
    """The chosen options as TOML that `--config` reads; comments have each change's ratio and where the records are."""
    lines = [
        FIRST_LINES["preset"],
        f"# {label}, by: {command}",
        f"# On {here.gpu or here.cpu}, torch {here.torch}, commit {here.commit or 'unknown'}. Records: {record}",
        f"# {_whole_words(result)}",
        *(f"# kept: {step.change}: {_gain_words(step)}" for step in result.kept),
        *(f"# not kept: {step.change}: {step.word}: {step.reason}" for step in result.steps if not step.kept),
        *(f"# not tried, the budget was spent: {name}" for name in result.untried),
        *(f"{name} = {toml_value(value)}" for name, value in chosen.items()),
    ]
    return "\n".join(map(one_line, lines)) + "\n"


def _whole_words(result: Result) -> str:
    if result.whole is None:
        return "No change was kept." if not result.kept else "All changes together were not compared with the start."
    confirmed = "" if result.whole.kept else " This does not confirm them, so that the options are the start's."
    return f"All kept changes against the start: {interval_words(result.whole)}.{confirmed}"


def _gain_words(step: Step) -> str:
    return f"{interval_words(step)} of the time before" if step.comparison else step.reason


def interval_words(step: Step) -> str:
    """`0.612 (99 % interval 0.601 to 0.622)`"""
    comparison = step.comparison
    if comparison is None or comparison.ratio is None:
        return "an unknown share"
    if comparison.low is None or comparison.high is None:
        return ratio_words(comparison.ratio)
    return f"{ratio_words(comparison.ratio)} (99 % interval {ratio_words(comparison.low)} to {ratio_words(comparison.high)})"


def toml_value(value: Any) -> str:
    """A value of an option as TOML."""
    # JSON's texts, numbers, true and false are valid TOML, except letters above U+FFFF as two escapes: so no letter is escaped.
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def _raw(label: str, step: Step) -> Options:
    return {"cell": label, "change": step.change, "kept": step.kept, **step_fields(step)}


def step_fields(step: Step) -> dict[str, Any]:
    """The result of a change, for programs."""
    comparison = step.comparison
    return {
        "step_alone_s": step.alone_s,
        "ratio": comparison.ratio if comparison else None,
        "ratio_low": comparison.low if comparison else None,
        "ratio_high": comparison.high if comparison else None,
        "pairs": comparison.n if comparison else None,
        "verdict": step.word,
        "reason": step.reason,
    }
