"""`with trainstep.watch(model, optimizer):` does in code what `trainstep run` does for a whole script."""

import atexit
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainstep.config.script import ScriptConfig
from trainstep.measure.machine.environment import environment
from trainstep.measure.run.live import LiveLine
from trainstep.measure.run.recording import Ending, Recording, ended_by
from trainstep.measure.run.run_name import run_name
from trainstep.measure.run.show import rank_path, shared_name, show_run
from trainstep.measure.run.trackers import TensorBoard, Trackio
from trainstep.measure.run.watch import Schedule, Watch
from trainstep.records.facts import facts_of
from trainstep.records.store import RUNS, Store, new_records_path

Modules = torch.nn.Module | Iterable[torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
_NONE = type(None)
_OPTION_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "name": ((str, _NONE), "text"),
    "out": ((str, os.PathLike, _NONE), "a path"),
    "page": ((bool, str, os.PathLike), "a path, True or False"),
    "inspect_every": ((int, _NONE), "a whole number of steps, or None"),
    "tensorboard": ((str, os.PathLike, _NONE), "the path of a folder"),
    "trackio": ((str, _NONE), "the name of a project"),
}
"""Option -> its types, and the same in words."""


@contextmanager
def watch(
    model: Modules = None,
    optimizer: Optimizers = None,
    *,
    name: str | None = None,
    out: str | Path | None = None,
    page: str | Path | bool = True,
    inspect_every: int | None = None,
    quiet: bool = False,
    tensorboard: str | Path | None = None,
    trackio: str | None = None,
) -> Iterator[Watch]:
    """Watch the training inside the block: times its steps by part, inspects some, writes records, and shows them at the end.

    A step ends with `optimizer.step()`. Where no optimizer of torch.optim makes the steps, call `step()` on what `with` gives.

    Args:
        model: the module whose forward is timed, or several; by default the outermost modules of the optimizer's parameters.
        optimizer: the optimizer whose updates end steps, or several; by default every optimizer.
        name: what the run is called; by default the script's name.
        out: file of records to append to, as a run of its own; by default a new one in ./runs/. Ranks other than 0 write beside it.
        page: file of the page; True: beside the records, as .html; False: none.
        inspect_every: inspect one step in so many, 0 for none; by default as many as take half a per cent of the time.
        quiet: show no live line and no answer.
        tensorboard: folder for scalars. trackio: project to log to.

    Raises:
        ValueError: records or scalars cannot be written, or an option is wrong.
        TypeError: an argument has another type.
        RuntimeError: the process is watched already, by `trainstep run` or by another block.
    """
    watched = Session(
        _modules(model),
        _optimizers(optimizer),
        name=name,
        out=out,
        page=page,
        inspect_every=inspect_every,
        quiet=quiet,
        tensorboard=tensorboard,
        trackio=trackio,
    )
    watched.start()
    try:
        yield watched.watch
    except BaseException as error:
        watched.end(ended_by(error))
        raise
    watched.end(Ending(words="finished"))


class Session:
    """A watch in code with what belongs to it: its files, its live line, its trackers. The arguments are those of `watch`."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        *,
        name: str | None,
        out: str | Path | None,
        page: str | Path | bool,
        inspect_every: int | None,
        quiet: bool,
        tensorboard: str | Path | None,
        trackio: str | None,
    ) -> None:
        given = {"name": name, "out": out, "page": page, "inspect_every": inspect_every}
        for option, value in {**given, "tensorboard": tensorboard, "trackio": trackio}.items():
            _check_type(option, value)
        schedule = Schedule(every=inspect_every)
        rank, ranks = _rank()
        launch = shared_name(os.environ) if ranks > 1 else ""
        default = RUNS / f"run-{launch}.jsonl" if launch else new_records_path("run")
        path = Path(os.path.abspath(out or default))
        self._page = (
            None
            if page is False or rank
            else Path(os.path.abspath(path.with_suffix(".html") if page is True else page))
        )
        self._path, self._rank, self._quiet = path, rank, quiet or rank > 0
        store = Store(rank_path(path, rank))
        with store.locked():
            pass
        run = run_name(path, rank, launch)
        identity = ScriptConfig(script=name or sys.argv[0] or "code", run=run, rank=rank, ranks=ranks)
        self._trackers: list[TensorBoard | Trackio] = []
        self._trackers += [] if tensorboard is None else [TensorBoard(Path(tensorboard) / run)]
        self._trackers += [] if trackio is None else [Trackio(trackio, run)]
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        live = LiveLine()
        self._live = live if live.is_possible and not self._quiet else None
        self.watch = Watch(
            Recording(identity, environment(), store, command, facts_of(launch=launch or None)),
            schedule=Schedule(every=0) if rank else schedule,
            modules=modules,
            optimizers=optimizers,
            on_record=self._trackers,
            on_step=None if self._live is None else self._live.show,
        )
        if self._live is not None:
            self._live.open()
        self._process = 0
        """The process that is watched; 0 before and after."""

    def start(self) -> None:
        """Begin. RuntimeError if this process is watched already."""
        self.watch.start()
        self._process = os.getpid()
        atexit.register(self.end, Ending(words="Python ended before the watch did"))

    def end(self, ending: Ending) -> None:
        """Write the last record, show the answer, write the page. Nothing is raised: the training's own error goes first.

        Only the first call does so, which may be that of a process that ends with an open watch, and none in a forked one.
        """
        if os.getpid() != self._process:
            return
        self._process = 0
        atexit.unregister(self.end)
        if self._live is not None:
            self._live.close()
        try:
            self.watch.stop(ending)
            for tracker in self._trackers:
                tracker.close()
        except Exception as error:  # noqa: BLE001  (a full disk, a tracker that is offline)
            self._say(str(error))
        trouble, no_step = self.watch.trouble, self.watch.why_no_step
        if trouble or no_step:
            self._say((trouble or no_step) if no_step else f"watching ended early: {trouble}")
        if not self.watch.recording.written or self._rank:
            return
        failed = show_run(self._path, self._page, None if self._quiet else sys.stderr)
        if failed:
            self._say(f"{failed}; the records are kept: trainstep report {shlex.quote(str(self._path))}")
        if not self._quiet:
            print(f"records: {self._path}", file=sys.stderr)
            if self._page is not None and not failed:
                print(f"page: {self._page}", file=sys.stderr)

    def _say(self, sentence: str) -> None:
        if not self._rank:
            print(f"trainstep: {' '.join(sentence.split())}", file=sys.stderr)


def _rank() -> tuple[int, int]:
    """(rank, number of ranks) of the process group, if one is there already."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _modules(given: object) -> list[torch.nn.Module]:
    return _listed("model", given, lambda item: isinstance(item, torch.nn.Module), "a torch.nn.Module or several")


def _optimizers(given: object) -> list[torch.optim.Optimizer]:
    """A wrapper need not be of torch.optim: it has a `step`, too."""
    return _listed("optimizer", given, lambda item: callable(getattr(item, "step", None)), "an optimizer or several")


def _listed(argument: str, given: object, is_right: Callable[[object], bool], wanted: str) -> list[Any]:
    """One object, several or none, as a list. TypeError names the argument."""
    if given is None or is_right(given):
        return [] if given is None else [given]
    several = list(given) if isinstance(given, Iterable) else [given]
    for item in several:
        if not is_right(item):
            raise TypeError(f"{argument}: must be {wanted}, not of type {type(item).__name__}")
    return several


def _check_type(option: str, value: object) -> None:
    """TypeError for an option of another type: what uses it would name neither the option nor what it takes."""
    kinds, wanted = _OPTION_TYPES[option]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{option}: must be {wanted}, not {value!r} of type {type(value).__name__}")
