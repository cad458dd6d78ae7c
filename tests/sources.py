"""The package's files as the house rules see them: modules by name, and what each imports, read without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "trainstep"


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name: `target` as far as the statement says it (`from a.b import c` is a.b.c)."""

    target: str
    line: int
    in_function: bool
    """Inside a function's body: it runs at a call, not when the module is imported."""
    guarded: bool
    """Inside `if` or `try` at module level: it may not run at all."""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name -> file of every module, packages by their own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str) -> list[Import]:
    """Every import in a module's source, wherever it stands."""
    return list(_imports_under(ast.parse(source), in_function=False, guarded=False))


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
