"""The lines to write in a user's own script, from each finding's page, and a patch where calls are recognised.

    lines_to_write(budget)                                          # a line or more for each finding, with its place
    patch_of("train.py", text, keywords_of_pages(["data"], workers=8))         # unified diff, as `git apply` takes it, or ""
    winning_patch("train.py", text, {"workers": "2"}).words                    # what it lacks of the changes that a proof measured

The patch is shown and never applied, because a program cannot know what the script intends. It adds keywords to calls: those that
the causes' pages name, which are suggestions, or those that do what measured changes did, which also take the place of a literal
value. Calls are recognised by the name that is called, so one by another name (`from ... import DataLoader as Loader`) is not.
"""

import ast
import difflib
import io
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainstep.config.script import text_of_changes
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
    """Keywords with values for calls of `callee`. The first makes the change, the others help it.

    A call that has an argument of `unless` switched on is left alone. `position`: where the first can stand without its name.
    `in_loop`: only calls inside a loop, where batches are. `replaces`: literal values that a call gives are replaced; of integers
    only smaller ones.
    """

    callee: str
    values: Mapping[str, str]
    unless: Collection[str] = ()
    in_loop: bool = False
    position: int | None = None
    replaces: bool = False

    @property
    def first(self) -> str:
        return next(iter(self.values))


_KEYWORDS: Mapping[str, Sequence[Keyword]] = {
    "data": (
        Keyword("DataLoader", {"num_workers": "N", "persistent_workers": "True", "prefetch_factor": "4"}, position=5),
    ),
    "host_copies": (
        Keyword("DataLoader", {"pin_memory": "True"}, position=7),
        Keyword("to", {"non_blocking": "True"}, in_loop=True),
    ),
    "optimizer": tuple(Keyword(kind, {"fused": "True"}, {"foreach", "differentiable"}) for kind in ("AdamW", "Adam")),
    "recompiles": (Keyword("compile", {"dynamic": "True"}),),
}
"""Cause -> what its page adds to a call."""


def keywords_of_pages(causes: Iterable[str], *, workers: int) -> list[Keyword]:
    """What the causes' pages add to calls, with so many workers of a loader; nobody has measured it in this script."""
    named = [keyword for cause in causes for keyword in _KEYWORDS.get(cause, ())]
    return [
        keyword._replace(
            values={name: str(workers) if value == "N" else value for name, value in keyword.values.items()}
        )
        for keyword in named
    ]


def keywords_of_changes(changes: Mapping[str, str]) -> list[Keyword]:
    """What does the same as these changes of `--apply`, with their values. A change that no keyword makes adds nothing."""
    pinned, copied = _KEYWORDS["host_copies"]
    known: dict[tuple[str, str], list[Keyword]] = {
        ("pin_memory", "on"): [pinned._replace(replaces=True)],
        ("copies", "non_blocking"): [copied],
        ("adamw", "fused"): [keyword._replace(replaces=True) for keyword in _KEYWORDS["optimizer"]],
    }
    if "workers" in changes:
        values = {"num_workers": changes["workers"], "persistent_workers": "True"}
        [loader] = _KEYWORDS["data"]
        known["workers", changes["workers"]] = [loader._replace(values=values, replaces=True)]
    return [keyword for change in changes.items() for keyword in known.get(change, ())]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A unified diff, empty if nothing is to be patched. `lacks`: changes that it does not make; `may_lack`: that it makes, but
    perhaps not for all calls."""

    text: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    may_lack: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What the patch lacks, in sentences; empty if there is no patch, or nothing."""
        words = [f"The patch lacks {text_of_changes(self.lacks)}."] if self.lacks else []
        if self.may_lack:
            words.append(f"It leaves some calls as they were; they may lack {text_of_changes(self.may_lack)}.")
        return " ".join(words) if self.text else ""


def winning_patch(path: str, text: str, won: Mapping[str, str]) -> Patch:
    """The patch of the script at `path` that does the same as the winning changes."""
    keywords = {name: keywords_of_changes({name: value}) for name, value in won.items()}
    lacks = {name: won[name] for name, own in keywords.items() if not patch_of(path, text, own)}
    may_lack = {name: won[name] for name, own in keywords.items() if name not in lacks and _leaves_calls(text, own)}
    return Patch(text=patch_of(path, text, keywords_of_changes(won)), lacks=lacks, may_lack=may_lack)


def patch_of(path: str, text: str, keywords: Iterable[Keyword]) -> str:
    """The unified diff that gives the keywords to the script's calls; empty without such calls, or if it is not Python."""
    before, after = (list(io.StringIO(part, newline="\n")) for part in (text, _patched(text, keywords)))
    lines = difflib.unified_diff(before, after, fromfile=f"a/{path}", tofile=f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _leaves_calls(text: str, keywords: Sequence[Keyword]) -> bool:
    """Whether the patch leaves a call of which nobody can tell that it has the first keyword's value."""
    tree = ast.parse(_patched(text, keywords))
    return any(not _has(call, keyword) for keyword in keywords for call in _calls(tree, keyword))


def _patched(text: str, keywords: Iterable[Keyword]) -> str:
    """The text with the keywords in every call that lacks them, except where they would not land in that call."""
    if "\r" in text.replace("\r\n", "\n"):  # Python ends a line there, and what applies patches does not
        return text
    for keyword in keywords:
        try:
            number = len(_calls(ast.parse(text), keyword))
        except (SyntaxError, ValueError):  # ValueError: a null byte
            return text
        for index in reversed(range(number)):  # each time anew, because an edit moves what stands behind it
            call = _calls(ast.parse(text), keyword)[index]
            changed = _edited(text, call, keyword) if _takes(call, keyword) else text
            text = changed if _differs_in_keywords_alone(changed, text, keyword) else text
    return text


def _differs_in_keywords_alone(changed: str, text: str, keyword: Keyword) -> bool:
    def bare(script: str) -> str:
        tree = ast.parse(script)
        for call in _calls(tree, keyword):
            call.keywords = [item for item in call.keywords if item.arg not in keyword.values]
        return ast.dump(tree)

    try:
        with warnings.catch_warnings(action="ignore"):
            compile(changed, "script", "exec")  # refuses what a parser lets pass: a keyword that is there twice
        return bare(changed) == bare(text)
    except SyntaxError:
        return False


def _calls(tree: ast.AST, keyword: Keyword, in_loop: bool = False) -> list[ast.Call]:
    """The calls that the keywords are for."""
    calls = []
    for node in ast.iter_child_nodes(tree):
        inside = in_loop or isinstance(node, ast.For | ast.While)
        if isinstance(node, ast.Call) and _is_call_of(node, keyword.callee) and (inside or not keyword.in_loop):
            calls.append(node)
        calls += _calls(node, keyword, inside)
    return calls


def _is_call_of(call: ast.Call, callee: str) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if callee == "compile" and not (isinstance(call.func, ast.Attribute) and _is_torch(call.func.value)):
        return False  # re.compile, and Python's own
    return name == callee and not (callee == "to" and _goes_to_a_cpu(call))


def _goes_to_a_cpu(copy: ast.Call) -> bool:
    """Whether a copy's destination is a CPU, literally: whoever does not wait for such a copy may read before it is done."""
    targets = [*copy.args[:1], *(item.value for item in copy.keywords if item.arg == "device")]
    constants = (node.value for target in targets for node in ast.walk(target) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and value.startswith("cpu") for value in constants)


def _takes(call: ast.Call, keyword: Keyword) -> bool:
    """Whether the call lacks the keywords and can be given them."""
    given = {item.arg: item.value for item in call.keywords}
    if None in given or any(isinstance(value, ast.Starred) for value in call.args):
        return False
    if _unnamed(call, keyword) is not None or any(
        not _is_off(given[name]) for name in given.keys() & set(keyword.unless)
    ):
        return False
    if keyword.first not in given:
        return True
    return keyword.replaces and isinstance(given[keyword.first], ast.Constant) and not _has(call, keyword)


def _is_off(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in (None, False)


def _unnamed(call: ast.Call, keyword: Keyword) -> ast.expr | None:
    """The value of the first keyword where the call gives it by its position."""
    if keyword.callee == "to":  # behind a device, a dtype, both, or a tensor
        return next((value for value in call.args if isinstance(getattr(value, "value", None), bool)), None)
    is_given = keyword.position is not None and len(call.args) > keyword.position
    return call.args[keyword.position or 0] if is_given else None


def _has(call: ast.Call, keyword: Keyword) -> bool:
    """Whether the call gives the first keyword the value, or a larger integer, literally."""
    value = next((item.value for item in call.keywords if item.arg == keyword.first), _unnamed(call, keyword))
    if not isinstance(value, ast.Constant):
        return False
    wanted = ast.literal_eval(keyword.values[keyword.first])
    return value.value >= wanted if type(value.value) is type(wanted) is int else value.value == wanted


def _edited(text: str, call: ast.Call, keyword: Keyword) -> str:
    """The text with the keywords written into the call."""
    given = {item.arg: item.value for item in call.keywords}
    new = ", ".join(f"{name}={value}" for name, value in keyword.values.items() if name not in given)
    line, column, comma = _end_of_arguments(call)
    edits = [(line, column, column, f"{', ' if comma and new else ''}{new}")]
    for name, value in keyword.values.items():
        old = given.get(name)
        if keyword.replaces and isinstance(old, ast.Constant) and old.end_lineno == old.lineno:
            edits.append((old.lineno, old.col_offset, old.end_col_offset or 0, value))
    lines = text.encode().split(b"\n")
    for number, start, end, words in sorted(edits, reverse=True):  # from the end, so that none moves the next
        lines[number - 1] = lines[number - 1][:start] + words.encode() + lines[number - 1][end:]
    return b"\n".join(lines).decode()


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _end_of_arguments(call: ast.Call) -> tuple[int, int, bool]:
    """Line and column (in bytes) behind the last argument, and whether there is one."""
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if arguments:
        line, column = max((node.end_lineno or 0, node.end_col_offset or 0) for node in arguments)
        return line, column, True
    return call.end_lineno or 0, (call.end_col_offset or 1) - 1, False
