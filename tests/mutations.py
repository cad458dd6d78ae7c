"""Count the small faults that the fast tests find: draw faults into the source by a seed, and run the tests that import its file.

    python tests/mutations.py --seed 0 --count 200          # an hour or more; one line per fault, the count at the end
    python tests/mutations.py --seed 0 --only 17            # one fault again, with pytest's output

A fault is one of: a comparison reversed, an arithmetic or logical operator swapped, a number or truth value changed, a `not`
dropped, a returned value dropped, a call or a raise left out. Compare the shares of two commits, not single faults: the same seed
draws other faults once the source has changed. Gluon kernels are left out: only the slow tests run them.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trainstep"
_LEFT_OUT = re.compile(r"ops/flash_attention/(hopper|split)/|py.typed")
_LONGEST_S = 300.0
_MOST_TEST_FILES = 8
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One expression or statement of a file, and the text that replaces it."""

    path: Path
    line: int
    start: int
    end: int
    """Offsets into the file's bytes."""
    text: str

    def faulty(self) -> bytes:
        """The whole file with the fault."""
        source = self.path.read_bytes()
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        original = " ".join(self.path.read_bytes()[self.start : self.end].decode().split())
        return f"{self.path.relative_to(ROOT)}:{self.line}: {original[:60]} -> {self.text[:60]}"


def faults_of(path: Path) -> Iterator[Fault]:
    """Every fault that can be drawn in a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        text = _instead_of(node)
        if text is not None and isinstance(node, ast.expr | ast.stmt):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield Fault(path=path, line=node.lineno, start=start, end=end, text=text)


def _instead_of(node: ast.AST) -> str | None:
    """The text that makes the node faulty, or None for nodes without a fault."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return f"({ast.unparse(left)} {_COMPARISONS[type(operator)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return f"(({ast.unparse(left)}) {_OPERATORS[type(operator)]} ({ast.unparse(right)}))"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            return "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value) | float(value)):
            return str(value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise():
            return "pass"
    return None


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, no decorators, and nothing inside an f-string."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params", "decorator_list", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            yield child
            yield from _code(child)


def importing_tests(path: Path) -> list[Path]:
    """Test files that import this file, and then those of its room; in both, those with its name in theirs come first.

    The tests of a room reach a file through another: a captured step through its package, an answer through the whole report.
    """
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(module.rpartition('.')[0])} import .*\b{path.stem}\b")
    room, *deeper = path.relative_to(PACKAGE).parts
    distances = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        imports = named.search(file.read_text()) is not None
        folders = file.relative_to(ROOT / "tests").parts[:-1]
        if imports or folders[:1] == (room,):
            beside = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(folders[1:], deeper, strict=False)))
            distances[file] = not imports, path.stem not in file.stem, -beside
    return sorted(distances, key=distances.__getitem__)[:_MOST_TEST_FILES]


def outcome(fault: Fault, *, shown: bool = False) -> str:
    """`seen`, `unseen`, `too long` (seen: the fault hangs it) or `untested` where no test file belongs to the fault's file."""
    tests = importing_tests(fault.path)
    if not tests:
        return "untested"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(PACKAGE, source / "trainstep", ignore=shutil.ignore_patterns("__pycache__"))
        Path(source, fault.path.relative_to(PACKAGE.parent)).write_bytes(fault.faulty())
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *map(str, tests)]
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = None if shown else subprocess.DEVNULL
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
        ) as tests_run:
            try:
                return "unseen" if tests_run.wait(_LONGEST_S) == 0 else "seen"
            except subprocess.TimeoutExpired:
                os.killpg(tests_run.pid, 9)
                return "too long"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not _LEFT_OUT.search(str(path))]
    drawn = random.Random(options.seed).sample([fault for path in files for fault in faults_of(path)], options.count)
    if options.only is not None:
        print(drawn[options.only], outcome(drawn[options.only], shown=True))
        return
    seen = 0
    for number, fault in enumerate(drawn):
        how = outcome(fault)
        seen += how in ("seen", "too long")
        print(f"{number}: {how}: {fault}", flush=True)
    print(f"{seen} of {len(drawn)} seen")


if __name__ == "__main__":
    main()
