"""The modules of the package by name, and the imports of each, read without running it."""

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "trainstep"


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name; `target` is its full name as far as the statement gives it (`from a.b import c` is a.b.c)."""

    target: str
    line: int
    in_function: bool
    """Whether it is inside a function, so that it runs at a call and not when the module is imported."""
    guarded: bool
    """Whether it is inside `if` or `try` at module level, so that it may not run."""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name -> file of every module, packages by their own name."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/NAME.py as a module, which is in sys.modules under its name for the length of a test."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@functools.cache
def imports(source: str) -> tuple[Import, ...]:
    """Every import in the source of a module, at any level."""
    return tuple(_imports_under(ast.parse(source), in_function=False, guarded=False))


def _imports_under(node: ast.AST, *, in_function: bool, guarded: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child):
            yield Import(target=target, line=child.lineno, in_function=in_function, guarded=guarded)
        yield from _imports_under(
            child,
            in_function=in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
            guarded=guarded or isinstance(child, ast.If | ast.Try),
        )


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{name.name}" for name in node.names]
    return []
