"""Writes tables as Markdown and LaTeX for people, and as CSV and JSON with raw numbers for programs."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from trainstep.report.kit.answer import Answer, plain_answers
from trainstep.report.kit.tables import Table
from trainstep.report.kit.visible import ascii_json, one_line

_MARKDOWN = re.compile(
    r"[\\`*\[\]|~$]"  # code, emphasis, links and images, columns, strikethrough, mathematics
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis; an underscore within a word is only an underscore
    r"|:(?=//)|(?<=www)\.|@"  # addresses that become links by themselves
    r"|^[#+=-]"  # headings and lists
)
_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{character: f"{{{character}}}" for character in "[]*"},  # after `\\` they would be read as its arguments
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
"""Characters that begin a formula in a spreadsheet, in normal and full width."""


def markdown(tables: Sequence[Table], answers: Sequence[Answer] = ()) -> str:
    """The answers as paragraphs with the verdict in bold, then pipe tables; several tables get headings."""
    parts = []
    for answer in answers:
        suggestion = f" {_for_markdown(answer.suggestion)}" if answer.suggestion else ""
        parts.append(f"**{_for_markdown(answer.verdict)}**{suggestion}")
    for table in tables:
        frame = _text_frame(table, _for_markdown)
        sides = [column.side for column in table.columns]
        heading = f"### {_for_markdown(table.title)}\n\n" if len(tables) > 1 else ""
        text = str(frame.to_markdown(index=False, disable_numparse=True, colalign=sides))
        parts.append(heading + text + (f"\n\n{_for_markdown(table.note)}" if table.note else ""))
    return "\n\n".join(parts) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """`tabular` environments that need the package booktabs; a table's note follows as a comment."""
    parts = []
    for table in tables:
        sides = "".join(column.side[0] for column in table.columns)
        frame = _text_frame(table, lambda text: one_line(text).translate(_LATEX))
        text = frame.to_latex(index=False, escape=False, column_format=sides)
        parts.append(text + (f"% {one_line(table.note)}\n" if table.note else ""))
    return "\n".join(parts)


def csv(tables: Sequence[Table]) -> str:
    """All cells in one sheet; a row leaves the columns empty that it does not have.

    Text that a spreadsheet would compute (=1+1) begins with a single quote; numbers are unchanged.
    """
    rows = [{_for_csv(name): _for_csv(value) for name, value in row.items()} for row in _raw(tables)]
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False))


def json_text(tables: Sequence[Table], answers: Sequence[Answer] = ()) -> str:
    """`answer`: each answer's workload, verdict and suggestion; `rows`: an object per cell, with null for an absent number."""
    frame = pd.DataFrame(_raw(tables), dtype=object)
    rows = frame.where(frame.notna(), None).to_dict(orient="records")
    return ascii_json({"answer": plain_answers(answers), "rows": rows}, indent=1, allow_nan=False) + "\n"


def _text_frame(table: Table, escape: Callable[[str], str]) -> pd.DataFrame:
    texts = [[escape(entry.text) for entry in row] for row in table.entries]
    return pd.DataFrame(texts, columns=[escape(column.title) for column in table.columns])


def _raw(tables: Sequence[Table]) -> list[Mapping[str, Any]]:
    """The raw rows of all tables; a number that is not finite becomes None."""
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for table in tables
        for row in table.raw
    ]


def _for_markdown(text: str) -> str:
    """The text on one line, escaped: no markup, HTML or address in it takes effect."""
    escaped = _MARKDOWN.sub(lambda match: f"\\{match[0]}", one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _for_csv(value: Any) -> Any:
    """Text on one line that a spreadsheet does not compute; any other value unchanged."""
    if not isinstance(value, str):
        return value
    line = one_line(value)
    return f"'{line}" if line.startswith(_FORMULA) and not _is_number(line) else line


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
