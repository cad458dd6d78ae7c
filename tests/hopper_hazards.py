"""A static check of Hopper machine code (SASS): no instruction writes a register that an unfinished wgmma reads or adds to.

wgmma (HGMMA) continues after it was issued, and reads its left operand and its sums from registers until a WARPGROUP.DEPBAR has
waited for it. The assembler must not reuse those registers before; some versions of ptxas are reported to do so. The code is
followed in a straight line, and the body of every innermost loop with wgmma is followed twice.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

_HGMMA = re.compile(r"HGMMA\.64x(\d+)x16\S*\s+R(\d+),\s*(.*)")
_NO_DESTINATION = re.compile(
    r"(ST|RED|BAR|SYNCS|UT|BRA|BRX|EXIT|WARPSYNC|WARPGROUP|DEPBAR|MEMBAR|FENCE|NOP|BSYNC|BSSY|CCTL|ERRBAR|ISETP|FSETP|PLOP3"
    r"|R2UR|VOTEU|U|RET|CALL|NANOSLEEP|YIELD|ELECT|R2P|LEPC)"
)


def instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """The instructions without addresses and predicates, and the position of each label."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif text := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(re.sub(r"^@!?U?P\w+\s+", "", text[1].strip()))
    return code, labels


def inner_loops(code: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """(first, last) instruction of each innermost loop that has wgmma.

    Waits stand behind the end of the kernel and branch back into it, as loops around all code between do: UTMASTG excludes those.
    """
    loops = []
    for last, text in enumerate(code):
        target = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        first = labels.get(target[1], last + 1) if target else last + 1
        body = " ".join(code[first : last + 1])
        if "HGMMA" in body and "UTMASTG" not in body:
            loops.append((first, last))
    return [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def opcodes(sass: str, *, inner_loops: bool = False) -> Counter[str]:
    """How often each instruction occurs, in the whole code or in the innermost loops with wgmma."""
    code, labels = instructions(sass)
    spans = _inner_loops(code, labels) if inner_loops else [(0, len(code) - 1)]
    return Counter(re.split(r"[.\s]", code[i])[0] for first, last in spans for i in range(first, last + 1))


_inner_loops = inner_loops


@dataclass
class InFlight:
    """The registers of one group of wgmma: left operands and sums."""

    operands: set[int] = field(default_factory=set)
    sums: set[int] = field(default_factory=set)


def hazards(sass: str) -> list[str]:
    """One line for each hazard."""
    code, labels = instructions(sass)
    lines = _follow(code)
    for first, last in inner_loops(code, labels):
        lines += _follow(code[first : last + 1] * 2)
    return lines


def _follow(code: list[str]) -> list[str]:
    lines: list[str] = []
    groups: list[InFlight] = []
    open_group = InFlight()
    for text in code:
        if match := _HGMMA.search(text):
            columns, first_sum, rest = int(match[1]), int(match[2]), match[3]
            open_group.sums |= set(range(first_sum, first_sum + columns // 2))
            if (operand := re.match(r"R(\d+),", rest)) and "gdesc" in rest:
                open_group.operands |= set(range(int(operand[1]), int(operand[1]) + 4))
            if "gsb0" in rest:
                groups.append(open_group)
                open_group = InFlight()
        elif match := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", text):
            groups = groups[max(0, len(groups) - int(match[1], 16)) :]
        else:
            written = written_registers(text)
            for group in [*groups, open_group]:
                if written & group.operands:
                    lines.append(f"writes an operand in flight: {text}")
                if written & group.sums:
                    lines.append(f"writes a sum in flight: {text}")
    return lines


def written_registers(text: str) -> set[int]:
    """General registers that an instruction writes."""
    name, _, rest = text.partition(" ")
    if _NO_DESTINATION.match(name):
        return set()
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and re.fullmatch(r"!?(P\d|PT|UP\d|UPT)", operands[0]):
        operands.pop(0)
    target = re.match(r"R(\d+)\b", operands[0]) if operands else None
    if not target:
        return set()
    count = 2 if "WIDE" in name or name == "CS2R" else 1
    if name.startswith(("LD", "ATOM")):
        wide = {"128": 4, "64": 2}.get((re.search(r"\.(128|64)\b", name) or ["", ""])[1], 1)
        count = {"4": 4, "2": 2}.get((re.search(r"LDSM.*\.([24])\b", name) or ["", ""])[1], wide)
    return set(range(int(target[1]), int(target[1]) + count))
