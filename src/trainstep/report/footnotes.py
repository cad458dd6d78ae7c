"""Environments as footnotes of a page: labels say ¹ or ², the page's foot says which commit and which software that is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainstep.report.rows import Row, machine_labels

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class Footnotes:
    """Rows as the page labels them, and what it writes for each environment's label."""

    rows: list[Row]
    marks: dict[str, str]
    """Label -> mark; a chip that one environment alone has needs none."""
    _short: dict[str, str]

    def shortened(self, text: str) -> str:
        """The sentence with marks in place of what the foot says."""
        for label in sorted(self._short, key=len, reverse=True):
            text = text.replace(label, self._short[label])
        return text


def footnotes(rows: Sequence[Row]) -> Footnotes:
    """The rows with marks in place of their machines' labels, where these have more than a chip's name."""
    labels = machine_labels(rows)
    chips = {
        label: row.record.environment.gpu or row.record.environment.cpu for label, row in zip(labels, rows, strict=True)
    }
    marked = [label for label, chip in chips.items() if label != chip]
    marks = {label: str(number).translate(_RAISED) for number, label in enumerate(marked, 1)}
    short = {label: chips[label] + mark for label, mark in marks.items()}
    said = marks if len(set(chips.values())) == 1 else short
    made = [
        replace(row, point={**row.point, "machine": said[label]}) if "machine" in row.point and label in said else row
        for label, row in zip(labels, rows, strict=True)
    ]
    return Footnotes(rows=made, marks=marks, _short=short)
