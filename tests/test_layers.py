"""Imports go strictly down the layers, modules that must run without torch do not import it, and an import has no effect.

Imports are read from the sources. A package without a layer fails; a layer may be declared before its package exists.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterable

import pytest

from sources import Import, imports, modules

LAYERS = {
    "cli": 6,
    "report": 5,
    "measure": 5,
    "explain": 4,
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
    "grouping": 0,
}
ROOMS = {
    "measure": {
        "machine": 0,
        "harness": 1,
        "step": 2,
        "attention": 3,
        "gate": 3,
        "numerics": 3,
        "op": 3,
        "parallel": 3,
        "run": 3,
        "memory": 4,
    },
    "plan": {"": 0, "time": 1, "fleet": 2, "search": 3},
    "report": {
        "kit": 0,
        "step": 1,
        "attention": 2,
        "gate": 2,
        "memory": 2,
        "numerics": 2,
        "op": 2,
        "parallel": 2,
        "plan": 2,
        "profile": 2,
        "run": 3,
        "explain": 4,
        "": 5,
    },
}
"""Part -> its rooms with their levels; "" is the part's own folder. A module imports from lower rooms or its own."""
STANDALONE = {"ops", "parallel", "capture"}
"""Parts that can be used without the rest: of our modules they may import only LIFTED_WITH."""
LIFTED_WITH = {"costs", "spans"}
LAZY = {"cli"}
"""Parts that may import our modules inside functions, so that `trainstep --help` is fast."""
LAZY_EXPORTS = {"trainstep", "trainstep.parallel", "trainstep.capture"}
"""The only exception: packages that import their exports by name when these are first used."""
TORCH_FREE = {"config", "costs", "records", "traces", "plan", "explain", "report", "cli"}
DRIVER_MODULES = (
    "harness.sweep",
    "harness.runner",
    "harness.interleave",
    "harness.lab",
    "harness.local",
    "harness.slurm",
    "harness.workload",
    "machine.environment",
    "gate.checkouts",
    "gate.command",
    "gate.times",
    "gate.session",
    "run.script",
    "run.changed.script_command",
    "run.changed.script_lab",
    "run.changed.script_processes",
    "run.changed.turns",
    "run.show",
    "run.live",
    "run.recording",
    "run.trackers",
)
"""Modules of measure that start the process of a cell and do not run in it; they must not import torch."""

MODULES = modules()


def own_part(dotted: str) -> str | None:
    """'costs' for trainstep.costs.transformer; '' for trainstep itself and its names; None for other packages."""
    root, _, rest = dotted.partition(".")
    if root != "trainstep":
        return None
    part = rest.partition(".")[0]
    return part if part in LAYERS or f"trainstep.{part}" in MODULES else ""


def complaint(module: str, imported: Import) -> str | None:
    """Why this module may not import this, or None."""
    if imported.target.startswith("."):
        return "is a relative import: write it out"
    own, other = own_part(module), own_part(imported.target)
    if not other or module == "trainstep.__main__":
        return None
    if imported.in_function and own not in LAZY:
        return "stands inside a function: only cli/ does that"
    if not own:
        return None if imported.guarded else "is imported by the package itself, which imports nothing"
    if own == other:
        return room_complaint(own, module, imported)
    if own in STANDALONE and other not in LIFTED_WITH:
        return f"is ours: {own} uses nothing of ours but {' and '.join(sorted(LIFTED_WITH))}"
    if LAYERS[other] >= LAYERS[own]:
        return f"is of layer {LAYERS[other]}, and {own} of layer {LAYERS[own]}: imports go strictly down"
    return None


def room_of(part: str, dotted: str) -> str:
    """'kit' for trainstep.report.kit.rows or a name in it; '' for modules in the part's own folder."""
    name = dotted.removeprefix(f"trainstep.{part}.").partition(".")[0]
    return name if name in ROOMS[part] else ""


def room_complaint(part: str, module: str, imported: Import) -> str | None:
    """Why a module may not import this from another room of its part, or None."""
    if part not in ROOMS or module == f"trainstep.{part}":
        return None
    own, other = room_of(part, module), room_of(part, imported.target)
    levels = ROOMS[part]
    if own == other or levels[other] < levels[own]:
        return None
    return f"is in the room {part}/{other}, which is not below {part}/{own}"


def test_every_room_has_a_level():
    folders = {tuple(name.split(".")[1:3]) for name in MODULES if name.count(".") == 3}
    assert {(part, room) for part, room in folders if part in ROOMS} == {
        (part, room) for part, rooms in ROOMS.items() for room in rooms if room
    }


def test_every_part_has_a_layer():
    parts = {name.split(".")[1] for name in MODULES if name not in {"trainstep", "trainstep.__main__"}}
    assert parts <= set(LAYERS), "give a new package its layer here and in the design"


def test_imports_go_down():
    complaints = []
    for module, path in MODULES.items():
        for imported in imports(path.read_text()):
            why = complaint(module, imported)
            complaints += [f"{module}:{imported.line}: {imported.target} {why}"] if why else []
    assert not complaints


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("trainstep.records.store", "from trainstep.report.kit.tables import table", "layer 5"),
        ("trainstep.explain.budget", "from trainstep.report.kit.rows import Row", "strictly down"),
        ("trainstep.explain.budget", "from trainstep.plan.time.step_time import step_time", None),
        ("trainstep.report.page", "import trainstep.measure.harness.runner", "strictly down"),
        ("trainstep.report.page", "from trainstep import measure", "strictly down"),
        ("trainstep.ops.rms_norm", "from trainstep.config.run import RunConfig", "nothing of ours"),
        ("trainstep.records.store", "def f():\n    from trainstep.config import run", "inside a function"),
        ("trainstep.records.store", "from .record import Record", "relative"),
        (
            "trainstep.measure.harness.cell",
            "from trainstep.measure.step.clock import Clock",
            "not below measure/harness",
        ),
        ("trainstep.report.kit.rows", "from trainstep.report.answers import answers", "not below report/kit"),
        ("trainstep.report.page", "from trainstep.report.kit.rows import Row", None),
        ("trainstep.cli.app", "def f():\n    from trainstep.measure import sweep", None),
        ("trainstep.ops.rms_norm", "from trainstep.spans import span", None),
        ("trainstep.cli.app", "from trainstep import __version__", None),
        ("trainstep", "from trainstep.ops import flash_attention", "imports nothing"),
        ("trainstep", "if TYPE_CHECKING:\n    from trainstep.ops import flash_attention", None),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, word: str | None):
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
    """Modules of ops and parallel that import triton, directly or by another of them; only these may fail to import on macOS."""
    needing: set[str] = set()
    while True:
        modules_found = {
            module
            for module, path in MODULES.items()
            if own_part(module) in ("ops", "parallel") and _needs_any({"triton", *needing}, imports(path.read_text()))
        }
        if modules_found == needing:
            return needing
        needing = modules_found


def _needs_any(names: set[str], module_imports: Iterable[Import]) -> bool:
    at_import = [imported.target for imported in module_imports if not imported.in_function and not imported.guarded]
    return any(f"{target}.".startswith(f"{name}.") for target in at_import for name in names)


IMPORT_THEM = """
import gc, importlib, json, sys
gc.disable()  # of imports nothing becomes garbage
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
import contextlib, gc, importlib, io, json, os, sys, threading
gc.disable()  # of imports nothing becomes garbage
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
    """Run a program in a new interpreter; the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_modules_without_torch_import_without_it():
    names = [module for module in MODULES if is_torch_free(module)]
    assert run_bare(IMPORT_THEM.format(absent=["torch", "triton"], names=names)) == {}


def test_modules_without_triton_import_without_it():
    needing_triton = triton_modules()
    names = [module for module in MODULES if module not in needing_triton]
    assert run_bare(IMPORT_THEM.format(absent=["triton"], names=names)) == {}


@pytest.mark.parametrize("package", sorted(LAZY_EXPORTS))
def test_lazy_exports_are_listed_and_imported_on_use(package: str):
    """Each export is listed, declared for type checkers, and imported on use; the package itself imports no torch."""
    exported = importlib.import_module(package)
    guarded = [imported for imported in imports(MODULES[package].read_text()) if imported.guarded]
    assert {imported.target.rpartition(".")[2] for imported in guarded} == set(exported.__all__) - {"DDP"}
    assert set(exported.__all__) <= set(dir(exported))
    for imported in guarded:
        module, _, name = imported.target.rpartition(".")
        assert getattr(exported, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        exported.nothing  # noqa: B018
    program = f"import sys, json, {package} as package; dir(package); print(json.dumps('torch' in sys.modules))"
    assert run_bare(program) is False


def test_importing_all_modules_has_no_effect():
    roots = {imported.target.split(".")[0] for path in MODULES.values() for imported in imports(path.read_text())}
    third_party = sorted(roots - set(sys.stdlib_module_names) - {"trainstep", ""})
    assert run_bare(WATCH_IMPORTS.format(third_party=third_party, names=list(MODULES))) == {}
