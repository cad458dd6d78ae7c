"""`trainstep run`: run a user's training script, unchanged, and show where the time of its steps goes."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from cyclopts import Parameter

from trainstep.cli.cells import check_page
from trainstep.cli.options import is_installed
from trainstep.cli.streams import give_back_streams, outliving_reader
from trainstep.config.import_path import python_command
from trainstep.config.script import ScriptConfig, changes_of_text
from trainstep.measure.machine.environment import environment
from trainstep.measure.run.changed.turns import Turn
from trainstep.measure.run.live import LiveLine
from trainstep.measure.run.recording import Ending, Recording
from trainstep.measure.run.run_name import run_name
from trainstep.measure.run.script import (
    Ended,
    LastOfAll,
    Script,
    after_import,
    end_forked,
    find_script,
    join_threads,
    run_script,
)
from trainstep.measure.run.show import files_of, rank_path, shared_name, show_run, wait_for_ranks
from trainstep.measure.run.trackers import TensorBoard, Trackio
from trainstep.parallel.launch import find_launch, is_launched
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Environment
from trainstep.records.store import RUNS, Store, new_records_path
from trainstep.report.kit.visible import one_line

if TYPE_CHECKING:
    from trainstep.measure.run.changed.steering import Steering
    from trainstep.measure.run.watch import Watch

_WITH_VALUES = ("--out", "--page", "--inspect-every", "--tensorboard", "--trackio", "--apply", "--stop-after", "--turn")
"""Options of `run` that a value follows. The first word that is none of these, no value and no switch begins the script's words."""
_PYTHONS = re.compile(r"-[bBdEiIOPsSuvWxX]\S*|-|-c\S*")
"""Words that python takes before a script: a short option with its value, code, or `-` for a script on standard input."""
_QUIET_KINETO = "6"
"""Above all levels of torch's profiler, which prints its starts and stops (USDT, level 5) into the script's output."""
_NO_TORCH = "the script never imported torch, so there is no step to time"


def split_words(words: Sequence[str]) -> list[str]:
    """The words of `trainstep run`, with `--` before those of the script: they are not ours, whatever they look like."""
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "--"):
        if _PYTHONS.fullmatch(words[place]):
            raise ValueError(_pythons_words(*words[place : place + 2]))
        place += 2 if words[place] in _WITH_VALUES else 1
    ours, script = list(words[:place]), list(words[place:])
    return ours if not script else [*ours, *script] if script[0] == "--" else [*ours, "--", *script]


def _pythons_words(word: str, following: str = "") -> str:
    """What to do instead of giving a word of python to `trainstep run`."""
    if word == "-" or word.startswith("-c"):
        return f"script: {word} gives python code that is in no file; write it into a file: trainstep run train.py"
    option = f"{word} {following}" if word in ("-W", "-X") else word
    return f"script: {option} is an option of python and belongs before -m: python {option} -m trainstep run train.py"


def run(
    *words: Annotated[str, Parameter(show=False)],
    out: Path | None = None,
    page: Path | None = None,
    no_page: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    inspect_every: int | None = None,
    quiet: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    tensorboard: Path | None = None,
    trackio: str | None = None,
    apply: str | None = None,
    stop_after: int | None = None,
    turn: Annotated[int | None, Parameter(show=False)] = None,
) -> int:
    """Run your own training script, not a line changed, and show how long its steps take, where their time goes, and what waits.

    Options of trainstep come before the script; everything after it is the script's own. A step ends with the update of an
    optimizer of torch.optim. Between steps that are inspected, hooks of under 0.1 ms a step divide its time: waiting for
    data, forward, backward, optimizer, evaluation, and your other code. Every so often one step is inspected under torch's
    profiler: kernels or operators, messages between ranks, and the lines at which the host waits for the GPU. Compilations, graph
    breaks, garbage collection and the allocator's retries are noted all the time. Losses stay the same to the bit.

    Records are written every ten seconds; the answer, on standard error, and the page follow when the script ends, also by
    Ctrl-C, an error or sys.exit. The exit code is the script's.

    Examples:

        trainstep run train.py --lr 3e-4

        trainstep run --inspect-every 100 --page report.html -m my_package.train --config small.yaml

        torchrun --nproc-per-node 2 -m trainstep run train.py

        trainstep run --apply adamw=fused,workers=8,compile=module train.py    (the script, changed from outside)

        trainstep report runs/run-20261101-120000-5e0f3a.jsonl    (the answer again, or while the script still runs)

    Parameters
    ----------
    out
        File of records to append to, as a run of its own; by default a new file in ./runs/ of the folder in which you start. Under
        torchrun rank 0 writes it, and every other rank a file beside it with its number in the name.
    page
        The page of the run; by default beside the records, as .html.
    no_page
        Write no page.
    inspect_every
        Inspect one step in this many, or 0 for none; by default as many as take half a per cent of the time. Only rank 0 inspects.
    quiet
        Show no live line and no answer at the end, only what went wrong.
    tensorboard
        Also write the times of steps as scalars into this folder, for TensorBoard.
    trackio
        Also log the times of steps to this project of trackio.
    apply
        Changes from outside: adamw=fused|trainstep,workers=N,pin_memory=on,batch_size=N,copies=non_blocking,attention=trainstep,
        ops=trainstep,compile=module|reduce_overhead,precision=tf32|bf16_autocast,mask=causal,bucket_cap_mb=N,gc=off.
    stop_after
        End the script cleanly after so many steps. The losses of the first ten are in the records.
    turn
        Where a proof's process waits for its turn.
    """
    script = find_script(words)
    _check(page, no_page=no_page, inspect_every=inspect_every, tensorboard=tensorboard, trackio=trackio)
    steered = _steered(apply, stop_after, turn)
    rank, ranks, ranks_here, token = _rank(os.environ)
    path = Path(os.path.abspath(out or (RUNS / f"run-{token}.jsonl" if token else new_records_path("run"))))
    page = None if no_page or rank else Path(os.path.abspath(page or path.with_suffix(".html")))
    check_page(page, path)
    store = Store(rank_path(path, rank))
    with store.locked():  # what cannot be written is refused before the script runs, not after hours of it
        pass
    name, arguments = run_name(path, rank, token), shlex.join(script.arguments)
    identity = ScriptConfig(script=script.name, arguments=arguments, run=name, rank=rank, ranks=ranks)
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO)
    session = _Session(identity, ranks_here, store, environment(), ours=give_back_streams(), quiet=quiet)
    here, source = ranks_here if ranks > 1 else None, script.source or None
    session.facts = facts_of(script_folder=os.getcwd(), script_source=source, local_ranks=here, launch=token or None)
    after_import("torch", lambda: session.begin(inspect_every, tensorboard, trackio, steered))
    return _run_watched(script, session, page)


def _run_watched(script: Script, session: "_Session", page: Path | None) -> int:
    """Run the script to its end, and show what was seen. Returns the exit code, which is the script's, whatever else fails."""
    last, process = LastOfAll(), os.getpid()
    ended = run_script(script)
    if os.getpid() != process:
        end_forked(ended.code)
    last.interrupted = ended.by_interrupt
    try:
        try:
            join_threads()
        except KeyboardInterrupt:  # which leaves the threads, and the exit code, as under Python
            ended = replace(ended, words="interrupted")
        session.end(ended, page)
    except KeyboardInterrupt:
        session.say(f"interrupted; the records are kept in {session.records}")
    except Exception as error:  # noqa: BLE001  (a stream, a disk: the script itself has ended well)
        session.say(
            f"the end of the run cannot be shown ({type(error).__name__}: {error}); trainstep report {session.records}"
        )
    return ended.code


class _Session:
    """Watches a script for `trainstep run`, from the moment at which the script has imported torch."""

    def __init__(
        self, identity: ScriptConfig, ranks_here: int, store: Store, here: Environment, *, ours: TextIO, quiet: bool
    ) -> None:
        self._identity, self._store, self._environment = identity, store, here
        self._ranks_here = ranks_here
        """Number of ranks on this machine."""
        self._ours, self._quiet = ours, quiet or identity.rank > 0
        self._folder = Path.cwd()
        self._command = one_line(shlex.join(["trainstep", *sys.argv[1:]]))
        self._watch: Watch | None = None
        self._steering: Steering | None = None
        self._live: LiveLine | None = None
        self._trackers: list[TensorBoard | Trackio] = []
        self._trouble = _NO_TORCH
        self.facts: Mapping[str, Fact] = {}
        """The facts of every record, with which the script can be started again."""

    def begin(
        self,
        inspect_every: int | None,
        tensorboard: Path | None,
        trackio: str | None,
        steered: tuple[Mapping[str, str], int | None, Turn | None] | None,
    ) -> None:
        """Watch this process. What goes wrong is said at the end: the script runs in any case."""
        try:
            from trainstep.measure.run.watch import Schedule, Watch

            name = self._identity.run
            self._trackers += [] if tensorboard is None else [TensorBoard(tensorboard / name)]
            self._trackers += [] if trackio is None else [Trackio(trackio, name)]
            live = LiveLine()
            if live.is_possible and not self._quiet:
                self._live = live
                live.open()
            if steered is not None:
                from trainstep.measure.run.changed.steering import Steering

                self._steering = Steering(*steered)
            watch = Watch(
                Recording(self._identity, self._environment, self._store, self._command, facts=self.facts),
                schedule=Schedule(every=0 if self._identity.rank else inspect_every),
                on_record=self._trackers,
                on_step=None if self._live is None else self._live.show,
                steering=self._steering,
            )
            watch.start()
            self._watch, self._trouble = watch, ""
        except Exception as error:  # noqa: BLE001  (a torch without these hooks, a tracker that is offline)
            self._trouble = f"{type(error).__name__}: {error}"
            if steered is not None:  # changed as asked, or not at all
                sys.exit(f"trainstep: {self._trouble}")

    @property
    def records(self) -> Path:
        """The file of this rank's records."""
        return self._store.path

    def end(self, ended: Ended, page: Path | None) -> None:
        """Write the last record, and show what was seen."""
        watch, path = self._watch, self._store.path
        if self._live is not None:
            self._live.close()
        if watch is not None:
            try:
                watch.stop(Ending(words=ended.words))
                for tracker in self._trackers:
                    tracker.close()
            except Exception as error:  # noqa: BLE001  (a full disk, a tracker)
                self.say(f"{error}")
        for name, why in self._steering.applied.not_applied.items() if self._steering else ():
            self.say(f"{name} was not applied: {why}")
        no_step = self._trouble if watch is None else watch.why_no_step
        if no_step and ended.code and not ended.by_interrupt:
            no_step = f"the script ended before a step was seen ({ended.words}): {no_step}"
        trouble = no_step if watch is None else watch.trouble or no_step
        if trouble:
            self.say(trouble if no_step else f"watching ended early: {trouble}")
        if watch is None or not watch.recording.written or self._identity.rank:
            return
        wait_for_ranks(path, self._ranks_here)
        failed = self._show_on_terminal(path) if self._ours.isatty() and not self._quiet else ""
        failed = show_run(path, page, None if self._quiet or self._ours.isatty() else self._ours) or failed
        if failed:
            self.say(f"{failed}; the records are kept: trainstep report {shlex.quote(str(path))}")
        with outliving_reader(self._ours):
            if not self._quiet:
                print(f"records: {self._short(path)}", file=self._ours)
                if page is not None and not failed:
                    print(f"page: {self._short(page)}", file=self._ours)
                self._ours.flush()

    def _show_on_terminal(self, path: Path) -> str:
        """Print the answer and tables that fit the terminal, by a process that writes to it. Returns what failed, or nothing."""
        command = python_command("trainstep", "report", *map(str, files_of(path)))
        self._ours.flush()
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=self._ours.fileno(), check=False)
        return f"the report ended with exit code {ended.returncode}" if ended.returncode else ""

    def _short(self, path: Path) -> Path:
        """The path as seen from the folder in which the user started, which the script may have left."""
        return path.relative_to(self._folder) if path.is_relative_to(self._folder) else path

    def say(self, sentence: str) -> None:
        """Print a sentence on standard error."""
        if not self._identity.rank:
            with outliving_reader(self._ours):
                print(f"trainstep: {one_line(sentence)}", file=self._ours, flush=True)


def _steered(
    apply: str | None, stop_after: int | None, turn: int | None
) -> tuple[Mapping[str, str], int | None, Turn | None] | None:
    """The changes, the last step, and the turn; None for a run without changes or end. ValueError for values that cannot work."""
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after: must be a number of steps, at least 1, not {stop_after}")
    if apply is None and stop_after is None:
        return None
    waits = None if turn is None else Turn(turn)
    return {} if apply is None else changes_of_text(apply), stop_after, waits


def _check(
    page: Path | None, *, no_page: bool, inspect_every: int | None, tensorboard: Path | None, trackio: str | None
) -> None:
    """ValueError for options that cannot work."""
    if no_page and page is not None:
        raise ValueError("no_page: a page is named too; leave out one of the two")
    if inspect_every is not None and inspect_every < 0:
        raise ValueError(f"inspect_every: must be a number of steps, or 0 for none, not {inspect_every}")
    for package, given in (("tensorboard", tensorboard), ("trackio", trackio)):
        if given is not None and not is_installed(package):
            raise ValueError(f"{package}: needs the package: pip install 'trainstep[{package}]'")


def _rank(environ: Mapping[str, str]) -> tuple[int, int, int, str]:
    """(rank, number of ranks, ranks on this machine, a word that the ranks of one launcher share; empty if there is one rank)."""
    if not is_launched(environ):
        return 0, 1, 1, ""
    launch = find_launch(environ)
    if launch.world_size == 1:
        return 0, 1, 1, ""
    here = launch.local_size or launch.world_size
    return launch.rank, launch.world_size, here, shared_name(environ)
