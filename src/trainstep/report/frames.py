"""Tables through pandas: Markdown and LaTeX for people, CSV and JSON (raw numbers, units in the names) for programs."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from trainstep.report.answer_text import plain_answers
from trainstep.report.answers import Answer
from trainstep.report.tables import Table
from trainstep.report.visible import ascii_json, one_line

_MARKDOWN = re.compile(
    r"[\\`*\[\]|~$]"  # code, emphasis, links and images, columns, strikethrough, mathematics
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis; within a word an underscore is one
    r"|:(?=//)|(?<=www)\.|@"  # addresses that become links by themselves
    r"|^[#+=-]"  # headings and lists
)
_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{character: f"{{{character}}}" for character in "[]*"},  # behind a row's end they would be its arguments
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "\N{MINUS SIGN}": "$-$",
        "–": "--",
        "≥": r"$\ge$",
        "…": r"\dots{}",
    }
)
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""What a spreadsheet takes for the beginning of a formula, in any width of letters."""


def markdown(tables: Sequence[Table], answers: Sequence[Answer] = ()) -> str:
    """The answers, a paragraph each with the verdict bold, then pipe tables, under a heading each where there are several."""
    parts = [_paragraph(answer) for answer in answers]
    for table in tables:
        body = _people(table, _for_markdown)
        sides = ["right" if column.number else "left" for column in table.columns]
        heading = f"### {_for_markdown(table.title)}\n\n" if len(tables) > 1 else ""
        text = str(body.to_markdown(index=False, disable_numparse=True, colalign=sides))
        parts.append(heading + text + (f"\n\n{_for_markdown(table.note)}" if table.note else ""))
    return "\n\n".join(parts) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """`tabular`s that need the package booktabs; what stands under a table follows as a comment."""
    parts = []
    for table in tables:
        sides = "".join("r" if column.number else "l" for column in table.columns)
        body = _people(table, _for_latex)
        text = body.to_latex(index=False, escape=False, column_format=sides)
        parts.append(text + (f"% {one_line(table.note)}\n" if table.note else ""))
    return "\n".join(parts)


def csv(tables: Sequence[Table]) -> str:
    """All cells in one sheet; a column that a row does not have stays empty.

    Text that a spreadsheet would compute (=1+1) begins with a single quote; numbers are as they are.
    """
    rows = [{_for_csv(name): _for_csv(value) for name, value in row.items()} for row in _raw(tables)]
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False))


def json_text(tables: Sequence[Table], answers: Sequence[Answer] = ()) -> str:
    """`answer`: workload, verdict and suggestion of each; `rows`: an object a cell, null where a number is absent."""
    frame = pd.DataFrame(_raw(tables), dtype=object)
    rows = frame.where(frame.notna(), None).to_dict(orient="records")
    return ascii_json({"answer": plain_answers(answers), "rows": rows}, indent=1, allow_nan=False) + "\n"


def _paragraph(answer: Answer) -> str:
    suggestion = f" {_for_markdown(answer.suggestion)}" if answer.suggestion else ""
    return f"**{_for_markdown(answer.verdict)}**{suggestion}"


def _people(table: Table, written: Callable[[str], str]) -> pd.DataFrame:
    texts = [[written(entry.text) for entry in row] for row in table.entries]
    return pd.DataFrame(texts, columns=[written(column.title) for column in table.columns])


def _raw(tables: Sequence[Table]) -> list[Mapping[str, Any]]:
    return [{name: _finite(value) for name, value in row.items()} for table in tables for row in table.raw]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _for_markdown(text: str) -> str:
    """The text on one line, shown letter by letter: no markup, HTML or address in it acts."""
    escaped = _MARKDOWN.sub(lambda found: f"\\{found[0]}", one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _for_latex(text: str) -> str:
    return one_line(text).translate(_LATEX)


def _for_csv(value: Any) -> Any:
    """Text on one line that is text to a spreadsheet; all else as it is."""
    if not isinstance(value, str):
        return value
    line = one_line(value)
    return f"'{line}" if line.startswith(_FORMULA) and not _is_number(line) else line


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
