"""The targets of the Makefile, and the commands that a target runs."""

import re

from sources import ROOT

_TEXT = (ROOT / "Makefile").read_text()
_VARIABLES = dict(re.findall(r"(?m)^(\w+) :?= (\S.*)$", _TEXT))


def targets() -> set[str]:
    """Every target that can be given to make."""
    return set(re.findall(r"(?m)^([a-z][\w-]*):", _TEXT))


def recipe(target: str) -> list[str]:
    """The commands of a target made alone, with the variables of the Makefile substituted."""
    block = re.search(rf"(?m)^{target}:.*\n((?:\t.*\n)+)", _TEXT)
    assert block, f"the Makefile has no recipe for {target}"
    return [_written_out(line.strip()) for line in block[1].splitlines()]


def _written_out(line: str) -> str:
    line = re.sub(r"^\$\(if \$\(filter .*?\)\),,(.*)\)$", r"\1", line)  # `$(if other targets,,command)`
    while "$(" in (before := line):
        line = re.sub(r"\$\((\w+)\)", lambda name: _VARIABLES.get(name[1], name[0]), line)
        if line == before:
            break
    return line


def targets_named(text: str) -> set[str]:
    """The targets of each `make ...` in a script or a sentence; words with = set variables."""
    named: set[str] = set()
    for words in re.findall(r"(?m)(?:^|[`\s])make((?: +[a-z][\w-]*)+)(?=[`\s<\"]|$)", text):
        named |= set(words.split())
    return named
