"""Keep the current folder off Python's import path in the processes that trainstep starts, unless the user names code there.

    subprocess.run(python_command("trainstep.measure.machine.device_probe"))

`python -m` searches the current folder first: reading a snapshot would run a `pickle.py` that lies beside it, and a `random.py`
would break every cell. So all commands are built here, with Python's -P. A module that the user names
(`--model package.module:function`) is searched for in the current folder too, after Python's own and installed modules.

Entries of the user's PYTHONPATH are searched first, as in any Python. An empty entry (`PYTHONPATH=:folder`) means the current
folder. We leave it: Python has imported from it before the first line of trainstep runs.

This file imports only modules that Python has loaded by the time `python -m` runs a module, because `__main__` imports it before it
removes the current folder.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in another process."""
    return [*python(), "-m", module, *arguments]


def python() -> list[str]:
    """This Python, without the current folder on its path, except where trainstep itself is imported from there."""
    return [sys.executable] if _is_imported_from_current_folder() else [sys.executable, "-P"]


def make_children_safe() -> None:
    """In a process started by `python_command`: keep the current folder off the path of its child processes too."""
    # torch starts several: its compile workers, and `python -c "import torch"` for each kind of vector instruction.
    if sys.flags.safe_path:
        os.environ["PYTHONSAFEPATH"] = "1"


def leave_current_folder() -> None:
    """Remove the current folder, which `python -m` puts first, from this process's path."""
    folder = _current_folder()
    if not sys.flags.safe_path and sys.path[:1] == [folder] and not _is_imported_from_current_folder():
        del sys.path[0]


def search_current_folder() -> None:
    """From now on, search the current folder last in this process, which runs code that the user named."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def check_not_hidden(field: str, module: str) -> None:
    """ImportError, naming the field, if another module hides the user's module of the same name in the current folder."""
    top = module.partition(".")[0]
    folder = _current_folder()
    user_spec = importlib.machinery.PathFinder.find_spec(top, [folder]) if folder and folder in sys.path else None
    if user_spec is None or user_spec.origin is None:  # a folder without an origin is data, which any module may hide
        return
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin == user_spec.origin:
        return
    place = f" ({spec.origin})" if spec.has_location else ""
    kind = "Python's own" if top in sys.stdlib_module_names else "an installed"
    raise ImportError(f"{field}: {top} is {kind} module{place}, not the one in this folder; rename yours")


def _is_imported_from_current_folder() -> bool:
    """Whether trainstep itself lies in the current folder, such as a checkout's src. That folder is trusted then."""
    above_package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folder = _current_folder()
    try:
        return folder is not None and os.path.samefile(above_package, folder)
    except OSError:  # a parent folder cannot be searched
        return False


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder was deleted
        return None
