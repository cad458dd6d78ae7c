"""Where a cell runs: what decides whether two records may be compared. Imports no torch: answers at once, anywhere."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import socket
import subprocess
from pathlib import Path

import trainstep
from trainstep.measure.host import cores, cpu_model, memory_bytes, os_name
from trainstep.measure.nvml import Driver, read_driver
from trainstep.records.record import Environment

PACKAGE = Path(trainstep.__file__).parent
_SOURCES = frozenset((".py", ".js", ".css", ".html", ".typed"))
_GIT_TIMEOUT_S = 5.0


def environment(*, visible_devices: str | None = None, driver: Driver | None = None) -> Environment:
    """This machine, this code. `visible_devices`: CUDA_VISIBLE_DEVICES; `driver`: what `read_driver` said, if asked."""
    driver = driver or read_driver(visible_devices)
    gpu = driver.gpus[0] if driver.gpus else None
    commit, dirty = git_state(PACKAGE)
    torch, cuda = torch_build()
    return Environment(
        hostname=socket.gethostname(),
        os=os_name(),
        cpu=cpu_model(),
        cores=cores(),
        memory_bytes=memory_bytes(),
        python=platform.python_version(),
        trainstep=trainstep.__version__,
        source=source_hash(PACKAGE),
        commit=commit,
        dirty=dirty,
        torch=torch,
        triton=installed_version("triton"),
        cuda=cuda,
        gpu=gpu.name if gpu else None,
        gpu_count=len(driver.gpus),
        gpu_memory_bytes=gpu.memory_bytes if gpu else None,
        driver=driver.version,
    )


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> tuple[str | None, str | None]:
    """(version, CUDA it was built for) from torch/version.py, read as text: importing torch takes a second or more."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None, None
    values = _constants(Path(spec.submodule_search_locations[0]) / "version.py")
    return values.get("__version__") or installed_version("torch"), values.get("cuda")


def source_hash(package: Path) -> str:
    """16 hexadecimal digits over the names and contents of a package's sources; what an editor leaves there is none."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(package).parts)
        if path.suffix in _SOURCES and not hidden and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def git_state(package: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the repository that tracks the package, else (None, None).

    Tracked, not merely inside: a virtual environment often lies in somebody else's repository.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(package, "rev-parse", "HEAD")
    status = _git(package, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, hangs or is missing. Takes no lock, so that it disturbs nobody's commit."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _constants(path: Path) -> dict[str, str]:
    """The names a module binds to plain strings, annotated or not."""
    try:
        statements = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return {}
    constants = {}
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants[targets[0].id] = value.value
    return constants
