"""Says what a gate found: its answer, its table, the Markdown comment for a pull request, the object for JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.records.gate_file import BASE, HEAD, WARMUP, Ending, Plan, Run, used_seconds
from trainstep.records.sequential import CellState, Judgement
from trainstep.report.kit.answer import Answer, plain_answers
from trainstep.report.kit.forms import MS, RATIO, ratio_words, seconds_words
from trainstep.report.kit.frames import markdown
from trainstep.report.kit.tables import Column, Table
from trainstep.report.kit.visible import one_line, visible

COMMENT_MARK = "<!-- trainstep gate -->"
"""The first line of every comment, by which a later one finds and replaces it."""
_ESCAPES = str.maketrans(
    {"<": "&lt;", ">": "&gt;", "&": "&amp;", "*": "\\*", "_": "\\_", "|": "\\|", "[": "\\[", "@": "@\u200b"}
)
_SIGNS = {"pass": "passes", "fail": "fails", "cannot tell": "cannot tell"}
_LONGEST_WAIT_MINUTES = 600


def gate_answer(plan: Plan, ending: Ending, judgement: Judgement | None, runs: Sequence[Run]) -> Answer:
    """The verdict with the numbers behind it, and what to do if there is none."""
    cell = None if judgement is None else judgement.decisive
    limit = f"{plan.threshold * 100:g} %"
    if ending.reason and (ending.verdict == "fail" or not ending.is_over or cell is None):
        verdict = f"{ending.verdict.capitalize()}: {ending.reason}."
    elif ending.verdict == "cannot tell":
        verdict = f"Cannot tell: {ending.reason}; {_numbers(cell)}." if cell else f"Cannot tell: {ending.reason}."
    elif ending.verdict == "fail":
        verdict = f"Fail: head is slower, {_numbers(cell)}; the limit is {limit}."
    else:
        verdict = f"Pass: head is not slower by {limit}, {_numbers(cell)}."
    seconds = used_seconds(runs)
    if judgement is not None and ending.verdict in ("pass", "fail") and not ending.reason:
        verdict += f" It took {seconds_words(seconds)}."
    suggestion = _suggestion(plan, ending, cell)
    return Answer(workload="gate", verdict=verdict, suggestion=suggestion)


def gate_tables(judgement: Judgement | None, runs: Sequence[Run]) -> list[Table]:
    """A line for each cell: both medians, the ratio and its interval, the verdict."""
    if judgement is None:
        return []
    columns = [
        Column("cell", get=lambda cell: cell.name),
        Column("base (ms)", MS, lambda cell: _median(runs, BASE, cell.name)),
        Column("head (ms)", MS, lambda cell: _median(runs, HEAD, cell.name)),
        Column("ratio", RATIO, lambda cell: cell.ratio),
        Column("99 % interval", get=_interval),
        Column("blocks", get=lambda cell: str(cell.blocks)),
        Column("verdict", get=lambda cell: cell.verdict or "open"),
    ]
    note = "Ratio: head's time over base's, the geometric mean over blocks of four runs. The interval allows for every look at it."
    return [Table.of("Head against base", list(judgement.cells), columns, note=note)]


def gate_comment(
    plan: Plan, ending: Ending, judgement: Judgement | None, runs: Sequence[Run], notes: Sequence[str]
) -> str:
    """The Markdown comment: verdict, table, a failed command's output, and how it was measured."""
    answer = gate_answer(plan, ending, judgement, runs)
    place = plan.environment
    parts = [
        COMMENT_MARK,
        f"### Performance gate: {_SIGNS[ending.verdict]}",
        _escaped(answer.text),
        markdown(gate_tables(judgement, runs)).strip() if judgement is not None else "",
    ]
    if ending.output:
        fence = "`" * max(3, 1 + max((len(run) for line in ending.output for run in _backticks(line)), default=0))
        parts.append("\n".join(["The end of its output:", "", f"{fence}text", *map(visible, ending.output), fence]))
    parts += [_escaped(note) for note in notes]
    measured = (
        "the stored baseline"
        if plan.base.endswith(".json")
        else "blocks of four runs, base head head base and mirrored"
    )
    facts = [
        f"base: {plan.base}",
        f"head: {plan.head}",
        f"command: {' '.join(plan.command)}",
        f"measured: {plan.measure}, against {measured}, limit {plan.threshold * 100:g} %, at most {plan.budget_s / 60:g} min",
        f"machine: {place.get('gpu') or place.get('cpu')}, {place.get('cores')} cores, Python {place.get('python')}, "
        f"torch {place.get('torch')}",
    ]
    lines = "\n".join(f"- {_escaped(one_line(fact))}" for fact in facts)
    parts.append(f"<details><summary>How it was measured</summary>\n\n{lines}\n\n</details>")
    return "\n\n".join(part for part in parts if part) + "\n"


def gate_plain(
    plan: Plan, ending: Ending, judgement: Judgement | None, runs: Sequence[Run], notes: Sequence[str], code: int
) -> dict[str, Any]:
    """The object for JSON: `answer` first, then verdict, exit code and the numbers."""
    cells = () if judgement is None else judgement.cells
    return {
        "answer": plain_answers([gate_answer(plan, ending, judgement, runs)]),
        "verdict": ending.verdict,
        "exit_code": code,
        "reason": ending.reason or None,
        "cells": [
            {
                "cell": cell.name,
                "verdict": cell.verdict or "open",
                "base_s": _median(runs, BASE, cell.name),
                "head_s": _median(runs, HEAD, cell.name),
                "ratio": cell.ratio,
                "low": cell.low,
                "high": cell.high,
                "blocks": cell.blocks,
            }
            for cell in cells
        ],
        "looks": 0 if judgement is None else judgement.looks,
        "used_s": used_seconds(runs),
        "threshold": plan.threshold,
        "budget_s": plan.budget_s,
        "base": plan.base,
        "head": plan.head,
        "command": list(plan.command),
        "measure": plan.measure,
        "environment": dict(plan.environment),
        "output": list(ending.output),
        "notes": list(notes),
    }


def _numbers(cell: CellState | None) -> str:
    if cell is None or cell.ratio is None:
        return "without a ratio"
    interval = "no interval yet" if cell.low is None else f"99 % interval {_interval(cell)}"
    return f"its {cell.name} is {ratio_words(cell.ratio)} of base's ({interval}, {cell.blocks} block{'s' * (cell.blocks != 1)})"


def _interval(cell: CellState) -> str:
    if cell.low is None or cell.high is None:
        return "none yet"
    return f"{ratio_words(cell.low)} to {ratio_words(cell.high)}"


def _suggestion(plan: Plan, ending: Ending, cell: CellState | None) -> str:
    """After a `cannot tell` by time: how much time would decide it, or less noise."""
    if ending.verdict != "cannot tell" or not ending.is_over or cell is None or cell.low is None or cell.ratio is None:
        return ""
    if ending.exhausted:
        return "Save a longer baseline: --save with a larger --budget-minutes."
    half = math.log(cell.ratio / cell.low)
    distance = max(math.log((1 + plan.threshold) / cell.ratio), math.log(cell.ratio), plan.threshold / 2)
    minutes = math.ceil(1.1 * plan.budget_s / 60 * (half / distance) ** 2)
    quieter = "a quieter machine" + (" or `--measure cpu`" if plan.measure in ("wall", "auto") else "")
    if plan.budget_s / 60 < minutes <= _LONGEST_WAIT_MINUTES:
        return f"With this noise about `--budget-minutes {minutes}` would decide it; {quieter} needs less."
    return f"The noise is too large to decide it by waiting; try {quieter}."


def _median(runs: Sequence[Run], side: str, cell: str) -> float | None:
    values = [run.seconds[cell] for run in runs if run.side == side and run.block != WARMUP and cell in run.seconds]
    return statistics.median(values) if values else None


def _escaped(text: str) -> str:
    """Text in which Markdown and HTML mean nothing, but for backticks, and nobody is notified."""
    return visible(text).translate(_ESCAPES)


def _backticks(line: str) -> list[str]:
    return [part for part in "".join(c if c == "`" else " " for c in line).split() if part]


def times_by_cell(runs: Sequence[Run], side: str) -> Mapping[str, list[float]]:
    """Cell -> the times of this side's runs in their order, without the warm-ups."""
    chosen = [run for run in runs if run.side == side and run.block != WARMUP]
    return {name: [run.seconds[name] for run in chosen] for name in (chosen[0].seconds if chosen else ())}
