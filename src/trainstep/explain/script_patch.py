"""The lines to write in a user's own script, from each finding's page, and a patch where calls are recognised.

    lines_to_write(budget)                                          # a line or more for each finding, with its place
    patch_of("train.py", text, keywords_of_pages(["data"], workers=8))         # unified diff, as `git apply` takes it, or ""
    patch_of("train.py", text, keywords_of_changes({"workers": "2"}))       # with the values that a proof measured

The patch is shown and never applied, because a program cannot know what the script intends. It only adds keywords to calls: those
that the causes' pages name, which are suggestions, or those that do what measured changes did, also in place of a literal value.
"""

import ast
import difflib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainstep.explain.budget import Budget
from trainstep.explain.causes import CAUSES
from trainstep.plan.time.interval import Interval


@dataclass(frozen=True, kw_only=True)
class ToWrite:
    """A finding's lines. `where`: file and line at which it was seen, or empty."""

    cause: str
    gain: Interval
    lines: tuple[str, ...]
    where: str = ""


def lines_to_write(budget: Budget) -> list[ToWrite]:
    """The lines for each finding of a script's step, the longest excess first."""
    return [
        ToWrite(
            cause=finding.cause,
            gain=finding.gain,
            lines=CAUSES[finding.cause].lines,
            where=str(finding.place) if finding.place else "",
        )
        for finding in budget.findings
    ]


class Keyword(NamedTuple):
    """Keywords with values for calls of `callee` that give none of `unless`. `in_loop`: only inside a loop, where batches are.

    `position`: where the first can stand without its name. `replaces`: a literal value that is given is replaced by ours (a number
    only by a larger one), as the measured change did.
    """

    callee: str
    values: Mapping[str, str]
    unless: Collection[str]
    in_loop: bool = False
    position: int | None = None
    replaces: bool = False

    @property
    def first(self) -> str:
        """The keyword that makes the change; the others help it."""
        return next(iter(self.values))


_KEYWORDS: Mapping[str, Sequence[Keyword]] = {
    "data": (
        Keyword(
            "DataLoader",
            {"num_workers": "N", "persistent_workers": "True", "prefetch_factor": "4"},
            {"num_workers"},
            position=5,
        ),
    ),
    "host_copies": (
        Keyword("DataLoader", {"pin_memory": "True"}, {"pin_memory"}, position=7),
        Keyword("to", {"non_blocking": "True"}, {"non_blocking"}, in_loop=True),
    ),
    "optimizer": (Keyword("AdamW", {"fused": "True"}, {"fused", "foreach"}),),
    "recompiles": (Keyword("compile", {"dynamic": "True"}, {"dynamic"}),),
}
"""Cause -> what its page adds to a call."""


def keywords_of_pages(causes: Iterable[str], *, workers: int) -> list[Keyword]:
    """What the causes' pages add to calls, with so many workers of a loader; nobody has measured it in this script."""
    found = [keyword for cause in causes for keyword in _KEYWORDS.get(cause, ())]
    return [
        keyword._replace(
            values={name: str(workers) if value == "N" else value for name, value in keyword.values.items()}
        )
        for keyword in found
    ]


def keywords_of_changes(changes: Mapping[str, str]) -> list[Keyword]:
    """What does the same as these changes of `--apply`, with their values. A change that no keyword makes adds nothing."""
    pinned, copied = _KEYWORDS["host_copies"]
    known = {
        ("pin_memory", "on"): pinned,
        ("copies", "non_blocking"): copied,
        ("adamw", "fused"): _KEYWORDS["optimizer"][0],
    }
    if "workers" in changes:
        values = {"num_workers": changes["workers"], "persistent_workers": "True"}
        known["workers", changes["workers"]] = _KEYWORDS["data"][0]._replace(values=values)
    return [known[change]._replace(replaces=True) for change in changes.items() if change in known]


def patch_of(path: str, text: str, keywords: Iterable[Keyword]) -> str:
    """The unified diff that adds the keywords to the script's calls; empty without such calls, or if it is not Python."""
    patched = text
    for keyword in keywords:
        patched = _with_keyword(patched, keyword)
    before, after = (part.splitlines(keepends=True) for part in (text, patched))
    lines = difflib.unified_diff(before, after, fromfile=f"a/{path}", tofile=f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def leaves_calls(text: str, keywords: Iterable[Keyword]) -> bool:
    """Whether, behind the patch, a call is left of which nobody can tell that it has the keyword's value."""
    for keyword in keywords:
        text = _with_keyword(text, keyword)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    return any(not _has(call, keyword) for keyword in keywords for call in _calls(tree, keyword))


def _with_keyword(text: str, keyword: Keyword) -> str:
    """The text with the keywords in every call that lacks them, except where they would not land in that call."""
    try:
        calls = [call for call in _calls(ast.parse(text), keyword) if _takes(call, keyword)]
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return text
    for edits in sorted((_edits(call, keyword) for call in calls), reverse=True):
        changed = text
        for line, start, end, words in edits:
            lines = changed.encode().split(b"\n")
            lines[line - 1] = lines[line - 1][:start] + words.encode() + lines[line - 1][end:]
            changed = b"\n".join(lines).decode()
        if _count(changed, keyword) == _count(text, keyword) - 1:
            text = changed
    return text


def _count(text: str, keyword: Keyword) -> int:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "script", "exec")  # refuses what a parser lets pass: a keyword that is there twice
        return sum(_takes(call, keyword) for call in _calls(ast.parse(text), keyword))
    except SyntaxError:
        return -1


def _calls(tree: ast.AST, keyword: Keyword, in_loop: bool = False) -> list[ast.Call]:
    """The calls that the keywords are for."""
    calls = []
    for node in ast.iter_child_nodes(tree):
        inside = in_loop or isinstance(node, ast.For | ast.While)
        if isinstance(node, ast.Call) and _is_call_of(node, keyword) and (inside or not keyword.in_loop):
            calls.append(node)
        calls += _calls(node, keyword, inside)
    return calls


def _is_call_of(call: ast.Call, keyword: Keyword) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if keyword.callee == "compile" and not (isinstance(call.func, ast.Attribute) and _is_torch(call.func.value)):
        return False  # re.compile, and Python's own
    return name == keyword.callee


def _takes(call: ast.Call, keyword: Keyword) -> bool:
    """Whether the call can be given the keywords and lacks them."""
    given = {item.arg: item.value for item in call.keywords}
    if None in given or any(isinstance(value, ast.Starred) for value in call.args):
        return False
    if keyword.position is not None and len(call.args) > keyword.position:
        return False
    if keyword.callee == "to" and any(
        isinstance(value, ast.Constant) and value.value in (True, False) for value in call.args
    ):
        return False  # the keyword's value, without its name
    if not given.keys() & set(keyword.unless):
        return True
    if not keyword.replaces or keyword.first not in given:
        return False
    return isinstance(given[keyword.first], ast.Constant) and not _has(call, keyword)


def _has(call: ast.Call, keyword: Keyword) -> bool:
    """Whether the call gives the first keyword the value, or a larger number, literally."""
    value = next((item.value for item in call.keywords if item.arg == keyword.first), None)
    if not isinstance(value, ast.Constant):
        return False
    wanted = ast.literal_eval(keyword.values[keyword.first])
    return value.value >= wanted if type(value.value) is type(wanted) is int else value.value == wanted


Edit = tuple[int, int, int, str]
"""Line, columns of its begin and end in bytes, and what is written there."""


def _edits(call: ast.Call, keyword: Keyword) -> list[Edit]:
    """What writes the keywords into the call, from its end backwards, so that no edit moves the next."""
    given = {item.arg: item.value for item in call.keywords}
    new = ", ".join(f"{name}={value}" for name, value in keyword.values.items() if name not in given)
    line, column, comma = _end_of_arguments(call)
    edits = [(line, column, column, f"{', ' if comma else ''}{new}")] if new else []
    for name, value in keyword.values.items():
        old = given.get(name)
        if isinstance(old, ast.Constant) and keyword.replaces and old.end_col_offset is not None:
            edits.append((old.lineno, old.col_offset, old.end_col_offset, value))
    return sorted(edits, reverse=True)


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _end_of_arguments(call: ast.Call) -> tuple[int, int, bool]:
    """Line and column (in bytes) behind the last argument, and whether there is one."""
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if arguments:
        line, column = max((node.end_lineno or 0, node.end_col_offset or 0) for node in arguments)
        return line, column, True
    return call.end_lineno or 0, (call.end_col_offset or 1) - 1, False
