"""The names of torch and triton that a module uses, read from its source, and their lookup in the installed releases."""

import ast
import importlib
import re
from collections.abc import Iterator
from types import ModuleType

ROOTS = ("torch", "triton")
OWN = ("torch.ops.trainstep",)
"""Our operators, which torch has once they are defined."""


def used_names(source: str) -> set[str]:
    """Full names such as 'torch.optim.optimizer.Optimizer', whatever name their module was imported as."""
    if not any(root in source for root in ROOTS):
        return set()
    tree = ast.parse(source)
    imported = [*_imports(tree)]
    meaning, names = dict(imported), {name for _, name in imported}
    for node in ast.walk(tree):
        name = _dotted(node, meaning)
        if name is not None and not name.startswith(OWN):
            names.add(name)
    return names


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name here, name in torch or triton) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ROOTS:
                    yield alias.asname or alias.name, alias.name
                    if alias.asname is None:
                        yield alias.name.split(".")[0], alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOTS:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.AST, meaning: dict[str, str]) -> str | None:
    """The full name of a node such as `dist.group.WORLD`, or None if it does not begin with a name of torch or triton."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in meaning:
        return None
    return ".".join([meaning[node.id], *reversed(parts)])


def missing_part(name: str) -> str | None:
    """The shortest missing part of a name, as 'torch.cuda.memory' if torch.cuda has no `memory`; None if the whole name exists.

    Only modules and classes are followed: attributes of objects, as those of a process group, are known at run time.
    """
    root, *parts = name.split(".")
    owner: object = importlib.import_module(root)
    known = root
    for part in parts:
        if not isinstance(owner, ModuleType | type):
            return None
        known = f"{known}.{part}"
        try:
            owner = getattr(owner, part)
        except AttributeError:
            try:
                owner = importlib.import_module(known)
            except ImportError:
                return known
    return None


def is_private(name: str) -> bool:
    """Whether torch or triton may remove this name without notice."""
    return re.search(r"\._(?!_)", name) is not None or name.startswith(
        ("triton.compiler", "triton.runtime", "triton.backends")
    )
