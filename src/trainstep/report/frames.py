"""Tables through pandas: Markdown and LaTeX for people, CSV and JSON (raw numbers, units in the names) for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from trainstep.report.tables import Table

_PLUS_MINUS = {"±": r"$\pm$", "\N{MINUS SIGN}": "$-$", "–": "--", "≥": r"$\ge$", "…": r"\dots{}"}


def markdown(tables: Sequence[Table]) -> str:
    """Pipe tables, one under a heading each where there are several."""
    parts = []
    for table in tables:
        body = _people(table).map(_for_markdown)
        body.columns = [_for_markdown(title) for title in body.columns]
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
        text = _people(table).to_latex(index=False, escape=True, column_format=sides)
        for character, command in _PLUS_MINUS.items():
            text = text.replace(character, command)
        parts.append(text + (f"% {' '.join(table.note.split())}\n" if table.note else ""))
    return "\n".join(parts)


def csv(tables: Sequence[Table]) -> str:
    """All cells in one sheet; a column that a row does not have stays empty."""
    return str(pd.DataFrame(_raw(tables), dtype=object).to_csv(index=False))


def json_text(tables: Sequence[Table]) -> str:
    """A list of objects, one a cell, null where a number is absent."""
    frame = pd.DataFrame(_raw(tables), dtype=object)
    rows = frame.where(frame.notna(), None).to_dict(orient="records")
    return json.dumps(rows, indent=1, allow_nan=False, default=dict) + "\n"  # a record's frozen mappings


def _people(table: Table) -> pd.DataFrame:
    texts = [[" ".join(entry.text.split()) for entry in row] for row in table.entries]
    return pd.DataFrame(texts, columns=[column.title for column in table.columns])


def _raw(tables: Sequence[Table]) -> list[Mapping[str, Any]]:
    return [{name: _finite(value) for name, value in row.items()} for table in tables for row in table.raw]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _for_markdown(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace("|", "\\|").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    return " ".join(escaped.split())
