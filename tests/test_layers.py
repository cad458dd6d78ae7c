"""The layers hold: imports go strictly down, torch stays out of what runs on a laptop, an import has no effect.

Read from source, so a package that does not exist yet has its place waiting; a package without a place fails.
"""

import importlib
import json
import subprocess
import sys

import pytest

from sources import Import, imports, modules

LAYERS = {
    "cli": 5,
    "report": 4,
    "measure": 4,
    "plan": 3,
    "training": 3,
    "records": 2,
    "traces": 2,
    "ops": 2,
    "parallel": 2,
    "capture": 2,
    "config": 1,
    "costs": 0,
    "spans": 0,
    "reading": 0,
}
STANDALONE = {"ops", "parallel", "capture"}
"""Lifted out and used alone: of ours they may use only LIFTED_WITH."""
LIFTED_WITH = {"costs", "spans"}
LAZY = {"cli"}
"""May import ours inside functions, so that `trainstep --help` answers at once."""
LAZY_EXPORTS = {"trainstep", "trainstep.parallel", "trainstep.capture"}
"""The one exception: packages that load what they export, from further down and by name, when it is first used."""
TORCH_FREE = {"config", "costs", "records", "traces", "plan", "report", "cli"}
DRIVER_MODULES = ("sweep", "runner", "executor_", "environment", "workload")
"""The side of measure that starts a cell's process instead of being it: no torch either."""

MODULES = modules()


def own_part(dotted: str) -> str | None:
    """'costs' for trainstep.costs.transformer; '' for trainstep itself and its own names; None for what is not ours."""
    root, _, rest = dotted.partition(".")
    if root != "trainstep":
        return None
    part = rest.partition(".")[0]
    return part if part in LAYERS or f"trainstep.{part}" in MODULES else ""


def complaint(module: str, imported: Import) -> str | None:
    """Why this module may not import this, or None."""
    if imported.target.startswith("."):
        return "is a relative import: write it out"
    mine, theirs = own_part(module), own_part(imported.target)
    if not theirs or module == "trainstep.__main__":
        return None
    if imported.in_function and mine not in LAZY:
        return "stands inside a function: only cli/ does that"
    if not mine:
        return None if imported.guarded else "is imported by the package itself, which imports nothing"
    if mine == theirs:
        return None
    if mine in STANDALONE and theirs not in LIFTED_WITH:
        return f"is ours: {mine} uses nothing of ours but {' and '.join(sorted(LIFTED_WITH))}"
    if LAYERS[theirs] >= LAYERS[mine]:
        return f"is of layer {LAYERS[theirs]}, and {mine} of layer {LAYERS[mine]}: imports go strictly down"
    return None


def test_every_part_has_a_layer():
    parts = {name.split(".")[1] for name in MODULES if name not in {"trainstep", "trainstep.__main__"}}
    assert parts <= set(LAYERS), "give a new package its layer here and in the design"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str):
    found = [(imported, complaint(module, imported)) for imported in imports(MODULES[module].read_text())]
    assert not [f"{module}:{imported.line}: {imported.target} {why}" for imported, why in found if why]


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("trainstep.records.store", "from trainstep.report.tables import table", "layer 4"),
        ("trainstep.report.page", "import trainstep.measure.runner", "strictly down"),
        ("trainstep.report.page", "from trainstep import measure", "strictly down"),
        ("trainstep.ops.rms_norm", "from trainstep.config.run import RunConfig", "nothing of ours"),
        ("trainstep.records.store", "def f():\n    from trainstep.config import run", "inside a function"),
        ("trainstep.records.store", "from .record import Record", "relative"),
        ("trainstep.cli.app", "def f():\n    from trainstep.measure import sweep", None),
        ("trainstep.ops.rms_norm", "from trainstep.spans import span", None),
        ("trainstep.cli.app", "from trainstep import __version__", None),
        ("trainstep", "from trainstep.ops import flash_attention", "imports nothing"),
        ("trainstep", "if TYPE_CHECKING:\n    from trainstep.ops import flash_attention", None),
    ],
)
def test_the_rule_itself(module: str, source: str, word: str | None):
    (imported,) = imports(source)
    why = complaint(module, imported)
    assert why is None if word is None else word in (why or "")


def is_torch_free(module: str) -> bool:
    part = own_part(module)
    return (
        module in LAZY_EXPORTS
        or part in TORCH_FREE
        or any(module.startswith(f"trainstep.measure.{name}") for name in DRIVER_MODULES)
    )


def triton_modules() -> set[str]:
    """Modules of ops whose import needs triton, itself or through another of them: these alone may be absent on macOS."""
    needing: set[str] = set()
    while True:
        found = {
            module
            for module, path in MODULES.items()
            if own_part(module) == "ops" and _needs_any({"triton", *needing}, imports(path.read_text()))
        }
        if found == needing:
            return needing
        needing = found


def _needs_any(names: set[str], found: list[Import]) -> bool:
    at_import = [imported.target for imported in found if not imported.in_function and not imported.guarded]
    return any(f"{target}.".startswith(f"{name}.") for target in at_import for name in names)


IMPORT_THEM = """
import importlib, json, sys
for absent in {absent!r}:
    sys.modules[absent] = None
failed = {{}}
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""

WATCH_IMPORTS = """
import contextlib, importlib, io, json, os, sys, threading
for name in {third_party!r}:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
environment, threads, printed = dict(os.environ), threading.active_count(), io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    for name in {names!r}:
        importlib.import_module(name)
cuda = getattr(sys.modules.get("torch"), "cuda", None)
effects = {{
    "environment": sorted(set(environment.items()) ^ set(os.environ.items())),
    "printed": printed.getvalue(),
    "threads": threading.active_count() - threads,
    "cuda": bool(cuda and cuda.is_initialized()),
}}
print(json.dumps({{name: effect for name, effect in effects.items() if effect}}))
"""


def run_bare(program: str) -> dict[str, object]:
    """What a program prints as JSON, in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_imports_without_torch():
    names = [module for module in MODULES if is_torch_free(module)]
    assert run_bare(IMPORT_THEM.format(absent=["torch", "triton"], names=names)) == {}


def test_imports_without_triton():
    theirs = triton_modules()
    names = [module for module in MODULES if module not in theirs]
    assert run_bare(IMPORT_THEM.format(absent=["triton"], names=names)) == {}


@pytest.mark.parametrize("package", LAZY_EXPORTS)
def test_lazy_exports(package: str):
    """Each is found, said to type checkers, and loaded when it is used: the bare package has no torch."""
    exported = importlib.import_module(package)
    guarded = [one for one in imports(MODULES[package].read_text()) if one.guarded]
    assert {one.target.rpartition(".")[2] for one in guarded} == set(exported.__all__) - {"DDP"}
    assert set(exported.__all__) <= set(dir(exported))
    for one in guarded:
        module, _, name = one.target.rpartition(".")
        assert getattr(exported, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        exported.nothing  # noqa: B018
    program = f"import sys, json, {package} as package; dir(package); print(json.dumps('torch' in sys.modules))"
    assert run_bare(program) is False


def test_importing_has_no_effect():
    found = {imported.target.split(".")[0] for path in MODULES.values() for imported in imports(path.read_text())}
    third_party = sorted(found - set(sys.stdlib_module_names) - {"trainstep", ""})
    assert run_bare(WATCH_IMPORTS.format(third_party=third_party, names=list(MODULES))) == {}
