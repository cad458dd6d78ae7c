"""Runs a user's script in this process as Python itself would: `run_script(find_script(["train.py", "--lr", "1"]))`.

The script is `__main__`, with its own sys.argv and sys.path, so that `if __name__ == "__main__"`, pickled classes and processes
that start by spawn (which import `__main__` anew, without us) work as ever. What it raises is shown as Python shows it, without
our frames.

This file imports no torch: the script may set variables that torch reads when it is imported. `after_import` says when it was.
"""

import atexit
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
import threading
import tokenize
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script that was found: a file, or a module that `-m` names."""

    name: str
    """The script as the user wrote it: `train.py` or `-m package.train`."""
    arguments: tuple[str, ...]
    file: str
    code: types.CodeType
    spec: importlib.machinery.ModuleSpec | None
    """The spec of a module, by whose name spawned processes import it; None for a file."""
    search: str
    """The folder that Python puts first on the import path: that of the file which a link names, unlike `__file__`."""
    source: str = ""
    """SHA-256 of the file, its first 12 digits; empty where a module has no file of its own."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a script ended. `words`: as `exit code 3` or `RuntimeError: ...`. `by_interrupt`: a Ctrl-C that it did not handle."""

    code: int
    words: str
    by_interrupt: bool = False


class StoppedAfter(SystemExit):
    """Ends the script after so many steps, as `sys.exit()` would: `finally` blocks run, and the exit code is 0."""

    def __init__(self, steps: int) -> None:
        super().__init__(0)
        self.words = f"stopped after {steps} step{'' if steps == 1 else 's'}"


def find_script(words: Sequence[str]) -> Script:
    """The script of a command line: `train.py ARGS` or `-m package.train ARGS`. ValueError, in a sentence, if there is none."""
    if not words:
        raise ValueError("script: name a script: trainstep run train.py, or a module: trainstep run -m package.train")
    if words[0] == "-m":
        if len(words) < 2:
            raise ValueError("script: -m needs the name of a module: trainstep run -m package.train")
        return _find_module(words[1], tuple(words[2:]))
    name, arguments = words[0], tuple(words[1:])
    path = Path(name)
    if Path(name).name in ("torchrun", "python", "python3", "accelerate") and not path.is_file():
        raise ValueError(
            f"script: {name} starts processes, of which only the first would be watched; let it start trainstep instead: "
            "torchrun --nproc-per-node 2 -m trainstep run train.py"
        )
    if path.is_dir():
        raise ValueError(
            f"script: {name} is a folder; name the file in it, or a module: trainstep run -m package.train"
        )
    try:
        source = path.read_bytes()
        if b"\0" in source:
            raise ValueError(f"script: {name} is not a Python script; name a .py file")
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        source.decode(encoding)
    except OSError as error:
        raise ValueError(f"script: {name} cannot be read: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"script: {name}, {_encoding_words(source, error)}") from None
    file = os.path.abspath(name)
    try:
        code = compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        _end_with(error)
    return Script(
        name=name,
        arguments=arguments,
        file=file,
        code=code,
        spec=None,
        search=os.path.dirname(os.path.realpath(name)),
        source=_digest(source),
    )


def _find_module(name: str, arguments: tuple[str, ...]) -> Script:
    folder = os.getcwd()
    with _first_on_path(folder):
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
            code = (
                spec.loader.get_code(spec.name)
                if spec and isinstance(spec.loader, importlib.abc.InspectLoader)
                else None
            )
        except (ImportError, ValueError) as error:
            raise ValueError(f"script: the module {name} cannot be imported: {error}") from None
        except Exception as error:  # noqa: BLE001  (code of the user's packages, which is wrong or fails)
            _end_with(error)
    if spec is None or code is None:
        raise ValueError(f"script: there is no module {name} with code here; python -m {name} says why")
    digest = ""
    with suppress(OSError, TypeError):  # TypeError: without an origin
        digest = _digest(Path(spec.origin).read_bytes())  # type: ignore[arg-type]
    return Script(
        name=f"-m {name}",
        arguments=arguments,
        file=spec.origin or name,
        code=code,
        spec=spec,
        search=folder,
        source=digest,
    )


def _end_with(error: Exception) -> NoReturn:
    """Show an error of the user's source as Python does, and end with its exit code."""
    _show(error)
    raise SystemExit(1)


def _encoding_words(source: bytes, error: Exception) -> str:
    """The line of a script that Python cannot decode, why not, and what to do."""
    if isinstance(error, SyntaxError):
        try:
            source.decode()
        except UnicodeDecodeError as undecodable:  # it names the line, which the search for a declaration does not
            error = error if "unknown" in str(error) else undecodable
    if isinstance(error, UnicodeDecodeError):
        line = 1 + error.object.count(b"\n", 0, error.start)
        why = f"the byte 0x{error.object[error.start]:02x} is not {error.encoding}"
    else:
        line, why = 1 + (b"coding" not in source.partition(b"\n")[0]), str(error).partition(";")[0]
    return f"line {line}: {why}; save it as UTF-8, or let its first line name its encoding: # -*- coding: latin-1 -*-"


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def run_script(script: Script) -> Ended:
    """Run the script to its end, however it ends. sys.argv, sys.path and `__main__` stay: its atexit functions follow."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=script.file,
        __spec__=script.spec,
        __package__=script.spec.parent if script.spec else None,
        __loader__=script.spec.loader if script.spec else importlib.machinery.SourceFileLoader("__main__", script.file),
        __builtins__=builtins,
        __annotations__={},
        __cached__=script.spec.cached if script.spec else None,
    )
    own = sys.argv[0]
    if sys.path and not sys.flags.safe_path and sys.path[0] == os.path.dirname(os.path.abspath(own)):
        del sys.path[0]  # the folder of the command `trainstep`
    sys.path.insert(0, script.search)
    sys.argv[:] = [script.file if script.spec else script.name, *script.arguments]
    sys.modules["__main__"] = main
    try:
        exec(script.code, main.__dict__)
    except SystemExit as error:
        return _exited(error)
    except BaseException as error:  # noqa: BLE001  (whatever the script raises ends it)
        _show(error)
        by_interrupt = isinstance(error, KeyboardInterrupt)
        return Ended(code=INTERRUPTED if by_interrupt else 1, words=ending_words(error), by_interrupt=by_interrupt)
    return Ended(code=0, words="finished")


def join_threads() -> None:
    """Wait until the script's threads have ended, as Python does at its end: a thread may train on when the main code is over.

    Daemons are left, and workers of an executor, which Python tells to end only later.
    """
    futures = sys.modules.get("concurrent.futures.thread")
    of_executors = set(futures._threads_queues) if futures else set()
    own = threading.current_thread()
    while waited := [
        thread
        for thread in threading.enumerate()
        if thread is not own and not thread.daemon and thread not in of_executors
    ]:
        for thread in waited:
            thread.join()


def end_forked(code: int) -> NoReturn:
    """End a process that the script forked and that came to the script's end.

    Its atexit functions run. Its C++ objects are left as they are: torch's profiler, if it was used before the fork, would end the
    process by SIGABRT, since its thread is not in this process.
    """
    join_threads()
    atexit._run_exitfuncs()
    _flush_streams()
    os._exit(code & 0xFF)


def ending_words(error: BaseException) -> str:
    """How a script ended that raised this: `interrupted`, `exit code 3`, `exit: no data here`, `RuntimeError: ...`."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StoppedAfter):
        return error.words
    if not isinstance(error, SystemExit):
        return f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    if error.code is None or isinstance(error.code, int):
        return f"exit code {int(error.code)}" if error.code else "finished"
    return f"exit: {_first_line(error)}".rstrip(": ")


def after_import(name: str, do: Callable[[], None]) -> None:
    """Call a function in this process when a module has been imported: at once if it has been, never if it never is."""
    if name in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _AfterImport(name, do))


class LastOfAll:
    """Ends the process by SIGINT after everything else, if `interrupted` is set, as Python does after a Ctrl-C that nobody handled.

    Shells and launchers tell that from an exit code. Make it before the script runs: what is registered first is called last.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._process = os.getpid()
        atexit.register(self._act)

    def _act(self) -> None:
        if self.interrupted and os.getpid() == self._process:
            _flush_streams()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as the others do, and calls a function after its code has run."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self._name = name
        self._do = do
        self._process = os.getpid()

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with a loader that calls the function."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None and os.getpid() == self._process:
            execute = spec.loader.exec_module

            def execute_then_do(module: types.ModuleType) -> None:
                execute(module)
                self._do()

            spec.loader.exec_module = execute_then_do  # type: ignore[method-assign]
        return spec


class _first_on_path:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        sys.path.insert(0, self._folder)

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):
            sys.path.remove(self._folder)


def _exited(error: SystemExit) -> Ended:
    """What Python makes of sys.exit: a number is the exit code, nothing is 0, and anything else is printed and 1."""
    if error.code is None or isinstance(error.code, int):
        return Ended(code=int(error.code or 0), words=ending_words(error))
    for text in (error.code, "\n"):
        with suppress(Exception):  # a stream that the script closed, an object's own __str__: Python goes on as well
            print(text, end="", file=sys.__stderr__ if sys.stderr is None else sys.stderr)
    return Ended(code=1, words=ending_words(error))


def _flush_streams() -> None:
    """Flush standard output and error, which the script may have closed or replaced."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty."""
    try:
        return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    except Exception:  # noqa: BLE001  (an error's own __str__, as the script wrote it)
        return ""


def _show(error: BaseException) -> None:
    """Show an error as Python does, with the script's own frames alone."""
    trace = error.__traceback__
    own = trace.tb_next if trace is not None else None  # the first frame is that of `run_script`
    sys.excepthook(type(error), error.with_traceback(own), own)
