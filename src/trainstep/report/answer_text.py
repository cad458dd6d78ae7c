"""Answers as they stand over tables: lines of text, a terminal's, Markdown's and JSON's."""

from collections.abc import Sequence
from typing import Any, TextIO

from rich.text import Text

from trainstep.report.answers import Answer
from trainstep.report.console import VisibleConsole
from trainstep.report.visible import one_line


def print_answers(answers: Sequence[Answer], stream: TextIO) -> None:
    """Print a paragraph each and an empty line behind them: wrapped, the verdict bold, where a person sits at the stream."""
    if not stream.isatty():
        stream.write(answer_lines(answers))
        return
    console = VisibleConsole(stream)
    for answer in answers:
        suggestion = f" {one_line(answer.suggestion)}" if answer.suggestion else ""
        console.print(Text.assemble((one_line(answer.verdict), "bold"), suggestion), end="\n\n")


def answer_lines(answers: Sequence[Answer]) -> str:
    """A line each, and an empty line behind each: what plain text begins with."""
    return "".join(f"{one_line(answer.text)}\n\n" for answer in answers)


def plain_answers(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """What JSON carries of them."""
    return [
        {"workload": answer.workload, "verdict": answer.verdict, "suggestion": answer.suggestion or None}
        for answer in answers
    ]
