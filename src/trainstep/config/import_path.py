"""Where Python looks for modules in the processes that we start: never in the current folder, unless the user names code there.

    subprocess.run(python_command("trainstep.measure.device_probe"))

`python -m` puts the current folder before everything else: a `pickle.py` beside a snapshot would be run by whoever reads the
snapshot, and a `random.py` would break every cell. So all our commands are built here, with Python's -P. A module that the user
names (`--model package.module:function`) is looked for in the current folder too, behind Python's own and installed modules.

What the user puts into PYTHONPATH is searched first, as in any Python. An empty entry there (`PYTHONPATH=:folder`) means the
current folder. It is left as it is: Python itself has imported from it before any line of ours runs.

This file imports only what Python has loaded by the time `python -m` runs a module, since `__main__` needs it before the current
folder is gone.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_SAFE_PATH = "PYTHONSAFEPATH"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in another process."""
    return [*python(), "-m", module, *arguments]


def python() -> list[str]:
    """This Python, without the current folder on its path, except where trainstep itself is imported from there."""
    return [sys.executable] if _is_imported_from_current_folder() else [sys.executable, "-P"]


def make_children_safe() -> None:
    """In a process started by `python_command`: have its own children leave the current folder out too.

    torch starts several: its compile workers, and `python -c "import torch"` for each kind of vector instruction.
    """
    if sys.flags.safe_path:
        os.environ[_SAFE_PATH] = "1"


def leave_current_folder() -> None:
    """Take away what `python -m` put first on this process's path."""
    folder = _current_folder()
    if not sys.flags.safe_path and sys.path[:1] == [folder] and not _is_imported_from_current_folder():
        del sys.path[0]


def search_current_folder() -> None:
    """Look in the current folder too, last, from now on in this process: it runs code that the user named."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def check_not_hidden(field: str, module: str) -> None:
    """ImportError, naming the field, if the current folder has a module of this name that another of the name hides."""
    top = module.partition(".")[0]
    folder = _current_folder()
    own = importlib.machinery.PathFinder.find_spec(top, [folder]) if folder and folder in sys.path else None
    if own is None or own.origin is None:  # without an origin it is a folder of data, which hides behind any module
        return
    found = importlib.util.find_spec(top)
    if found is None or found.origin == own.origin:
        return
    place = f" ({found.origin})" if found.has_location else ""
    whose = "Python's own" if top in sys.stdlib_module_names else "an installed"
    raise ImportError(f"{field}: {top} is {whose} module{place}, not the one in this folder; rename yours")


def _is_imported_from_current_folder() -> bool:
    """Whether trainstep's own files lie in the current folder: in a checkout's src, say. That folder is trusted then."""
    above_package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folder = _current_folder()
    try:
        return folder is not None and os.path.samefile(above_package, folder)
    except OSError:  # a folder above it may not be searched
        return False


def _current_folder() -> str | None:
    """None where it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
