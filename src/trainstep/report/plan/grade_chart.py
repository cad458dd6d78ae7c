"""Predicted against measured step times as an SVG file: a mark for each graded step, the diagonal, and 10 % on both sides of it."""

import html
import math
from collections.abc import Sequence

from trainstep.plan.time.grade import GROUPS
from trainstep.report.kit.forms import three_digits
from trainstep.report.plan.time_grade import FiledTimeGrade

_SIDE, _LEFT, _TOP, _FOOT = 640, 70, 46, 54
_COLOURS = ("#009e73", "#0072b2", "#d55e00")
"""Okabe and Ito's colours, which colour-blind readers can tell apart: captured, limited by the device, perhaps by the host."""
_OFF = 1.1


def grade_chart(grades: Sequence[FiledTimeGrade]) -> str:
    """The SVG text of the chart; the same grades give the same text."""
    times = [time_s for item in grades for time_s in (item.grade.measured_s, item.grade.predicted.step.time_s)]
    low, high = math.floor(math.log10(min(times) * 1e3)), math.ceil(math.log10(max(times) * 1e3))
    right = _LEFT + _SIDE

    def x(time_s: float) -> float:
        return _LEFT + _SIDE * (math.log10(time_s * 1e3) - low) / (high - low)

    def y(time_s: float) -> float:
        return _TOP + _SIDE - (x(time_s) - _LEFT)

    first_s, last_s = 10.0**low / 1e3, 10.0**high / 1e3
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 20} {_TOP + _SIDE + _FOOT}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "<title>Predicted and measured time of a step</title>",
        f'<rect width="{right + 20}" height="{_TOP + _SIDE + _FOOT}" fill="#ffffff"/>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999999"/>',
    ]
    for power in range(low, high + 1):
        place, label = 10.0**power / 1e3, three_digits(10.0**power)
        lines += [
            f'<line x1="{x(place):.1f}" y1="{_TOP}" x2="{x(place):.1f}" y2="{_TOP + _SIDE}" stroke="#dddddd"/>',
            f'<line x1="{_LEFT}" y1="{y(place):.1f}" x2="{right}" y2="{y(place):.1f}" stroke="#dddddd"/>',
            f'<text x="{x(place):.1f}" y="{_TOP + _SIDE + 18}" text-anchor="middle">{label}</text>',
            f'<text x="{_LEFT - 6}" y="{y(place) + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    for factor, dash in ((1.0, ""), (_OFF, "4 4"), (1 / _OFF, "4 4")):
        start_s, end_s = max(first_s, first_s / factor), min(last_s, last_s / factor)
        lines.append(
            f'<line x1="{x(start_s):.1f}" y1="{y(start_s * factor):.1f}" x2="{x(end_s):.1f}" y2="{y(end_s * factor):.1f}" '
            f'stroke="#555555" stroke-dasharray="{dash}"/>'
        )
    for place, (group, colour) in enumerate(zip(GROUPS, _COLOURS, strict=True)):
        own = [item.grade for item in grades if item.grade.group == group]
        lines += [
            f'<circle cx="{x(grade.measured_s):.1f}" cy="{y(grade.predicted.step.time_s):.1f}" r="3.5" fill="{colour}" '
            'fill-opacity="0.6"/>'
            for grade in own
        ]
        left = _LEFT + 200 * place
        lines += [
            f'<circle cx="{left + 6}" cy="{_TOP - 20}" r="5" fill="{colour}"/>',
            f'<text x="{left + 16}" y="{_TOP - 16}">{html.escape(group)} ({len(own)})</text>',
        ]
    lines += [
        f'<text x="{_LEFT + _SIDE / 2}" y="{_TOP + _SIDE + 42}" text-anchor="middle">measured (ms); dashed: 10 % off</text>',
        f'<text x="16" y="{_TOP + _SIDE / 2}" text-anchor="middle" transform="rotate(-90 16 {_TOP + _SIDE / 2})">'
        "predicted (ms)</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
