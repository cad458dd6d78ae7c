"""An answer (a verdict and a suggestion), and how it is written for a terminal, as plain text and in JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.text import Text

from trainstep.report.kit.visible import VisibleConsole, one_line


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The words above the tables of a workload, in every format of a report."""

    workload: str
    verdict: str
    """What the measurements show, in a sentence or two."""
    suggestion: str = ""
    """What to do next, with the expected gain; empty if the measurements suggest nothing."""

    @property
    def text(self) -> str:
        """The verdict and the suggestion."""
        return f"{self.verdict} {self.suggestion}".strip()


def compile_option(config: Mapping[str, Any]) -> str:
    """What to compile: the model, or its blocks where a config refuses a model compiled whole."""
    return "`--compile block`" if config.get("update") == "in_backward" else "`--compile model`"


def print_answers(answers: Sequence[Answer], stream: TextIO) -> None:
    """Print each answer as a paragraph and an empty line; on a terminal wrapped, with the verdict in bold."""
    if not stream.isatty():
        stream.write(answer_lines(answers))
        return
    console = VisibleConsole(stream)
    for answer in answers:
        suggestion = f" {one_line(answer.suggestion)}" if answer.suggestion else ""
        console.print(Text.assemble((one_line(answer.verdict), "bold"), suggestion), end="\n\n")


def answer_lines(answers: Sequence[Answer]) -> str:
    """Each answer as a line of plain text and an empty line."""
    return "".join(f"{one_line(answer.text)}\n\n" for answer in answers)


def plain_answers(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The answers as objects for JSON."""
    return [
        {"workload": answer.workload, "verdict": answer.verdict, "suggestion": answer.suggestion or None}
        for answer in answers
    ]
