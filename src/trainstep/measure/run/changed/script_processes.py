"""Runs a user's script in fresh processes, several at once, each with its changes from outside.

    processes = ScriptProcesses(store, command, steps=40, ...)

Each window of a process has a role. When the window ends it becomes a record in the store, where it is looked up before another
process is started, so that a killed proof continues with the window that was running. As many processes start together as have
room, so that a proof is not mostly imports and compilations; then one process runs its window while the others wait (turns.py). A
window gives one value, its mean step (steering.py). Roles of the same changes may share a process; if the script ends before all of
their windows, the remaining roles have processes of their own. A script of several ranks runs alone.
"""

import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from trainstep.config.import_path import python_command
from trainstep.config.script import text_of_changes
from trainstep.measure.run.changed.script_command import ScriptCommand
from trainstep.measure.run.changed.turns import in_turn
from trainstep.plan.trials import Options
from trainstep.records.facts import facts_of
from trainstep.records.record import Environment, Failure, Record, Samples
from trainstep.records.store import Store

_FIRST_S = 30.0
"""Expected seconds of a process, before any process has ended."""
_LATER_SHARE = 0.6
"""On a GPU a later start takes about this share of the first, which finds few files and compilations in a cache: 0.28 to 0.89, 0.56
to 1.2 and 0.60 to 1.1 in three proofs of one script (results/h200/script_nano_proof_kernel.ndjson, _fused, _loss)."""
_AROUND_S = 1.5
"""Seconds of a turn beside its timed steps: 0.3, and 2.3 to 3.6 for the last of a process, which ends in it (the same proofs)."""
_MOST_TOGETHER = 10
_CONTEXT_BYTES = 2**30
"""GPU memory that the driver takes for a process, beside torch's memory."""
_ROOM, _ROOM_KNOWN = 1.05, 1.02
"""Factors on the expected memory of changes that have not run, which may need more, and of those that have. A process that still
fails beside others runs again alone."""
_HELD_BYTES = 16
"""Bytes for each trained element that no batch size changes: weight, gradient and AdamW's two moments, in fp32. Other optimizers
have less, so that at most half of a process's memory is taken to be these."""

Role = tuple[Options, str]
"""The options of a window's process, and the window's name among windows with the same options."""


class ScriptProcesses:
    """Processes of one script, until the budget is spent; none in a dry run."""

    def __init__(
        self,
        store: Store,
        command: ScriptCommand,
        *,
        steps: int,
        pairs: int,
        timeout_s: float,
        facts: Mapping[str, Any],
        here: Environment,
        budget_minutes: float | None = None,
        began_s: float | None = None,
        dry_run: bool = False,
    ) -> None:
        """`pairs`: number of pairs of processes in a comparison. `facts`: added to every record. `here`: this machine."""
        self.store, self.command = store, command
        self._steps, self._pairs, self._timeout_s = steps, pairs, timeout_s
        self._facts, self._here = facts, here
        self._budget_minutes, self._dry_run = budget_minutes, dry_run
        self._began_s = time.monotonic() if began_s is None else began_s
        self.start: Options = {}
        """The options of the original, once known, such as its precision."""
        self.reserved = 0
        """Number of comparisons for which the budget must have room after the next measurement."""
        # A process that a time limit ended is tried again, as this command's limit may be longer.
        done = [record for record in store.finished() if record.failure is None or record.failure.kind != "timeout"]
        self._known = {str(record.fact("process")): record for record in done if record.fact("process")}
        self._starts_s: list[float] = []
        """Seconds of the first turn of processes that started together; it includes the start of all of them."""
        self._turns_s: list[float] = []
        """Seconds of the later turns: of the other processes, and of further windows."""
        self._turns_of: dict[str, list[float]] = {}
        """Seconds of the later turns of each set of changes, by its key."""
        self._steps_s = 0.0
        """Seconds of the timed steps of a window of the original; 0 before it has run."""
        self.may_share = command.ranks == 1 and command.record.config["device"] == "cuda"
        """Whether a process may have several windows. Not on a CPU: a start takes only seconds, and processes differ by more."""
        for record in self._known.values():
            if self._is_ours(record):
                self._note_time(record)

    def comparison_s(self, _: Options) -> float:
        """About how many seconds a comparison takes."""
        return self._expected_s([self.start] * 2 * self._pairs)

    def key_of(self, options: Options) -> str:
        """The key of a set of changes of this script as it is now."""
        of = [self.command.words, self.command.folder, self.command.source, self.command.ranks, self._steps]
        text = json.dumps([*of, sorted(self.changes(options).items())])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def changes(self, options: Options) -> dict[str, str]:
        """The options that differ from the original."""
        return {name: str(value) for name, value in options.items() if self.start.get(name) != value}

    def trial_s(self, _: Options) -> float:
        """About how many seconds a process takes."""
        if not self._starts_s:
            return _FIRST_S
        share = _LATER_SHARE if self.command.record.config["device"] == "cuda" else 1.0
        return median(self._starts_s[1:] or [share * self._starts_s[0]])

    def left_s(self, _: int) -> float:
        """About how many seconds are left: the changes have had their rounds, and the comparison of all together is to come."""
        return self.comparison_s({})

    def _expected_s(self, windows: Sequence[Options], *, shared: bool = False) -> float:
        """About how many seconds windows of these options take, if as many processes as have room start together."""
        roles = [(options, str(number)) for number, options in enumerate(windows)]
        groups = self._groups(roles, shared=shared)
        others = [options for group in groups for options, _ in group[1:]]
        starts_s = sum(self.trial_s({}) + self._more_s(group[0][0]) for group in groups)
        return starts_s + sum(map(self._turn_s, others))

    def _turn_s(self, options: Options) -> float:
        """About how many seconds another window of these options takes; the steps of a larger batch take longer."""
        if known := self._turns_of.get(self.key_of(options)):
            return median(known)
        usual_s = median(self._turns_s) if self._turns_s else self._steps_s + _AROUND_S
        return usual_s + self._more_s(options)

    def _more_s(self, options: Options) -> float:
        """About how many seconds longer the timed steps of these options take than the original's, for a larger batch."""
        return max(0.0, self._work(options) - 1) * self._steps_s

    def _note_time(self, record: Record) -> None:
        if record.key == self.key_of(self.start):
            self._steps_s = record.fact("timed_s") or self._steps_s
        if record.samples and record.fact("turn") is not None:  # files of before 2026-11-27 do not have it
            (self._turns_s if record.fact("turn") else self._starts_s).append(record.duration_s)
            if record.fact("turn"):
                self._turns_of.setdefault(record.key, []).append(record.duration_s)

    def _name(self, options: Options, role: str) -> str:
        return f"{self.key_of(options)} {role}"

    def _is_ours(self, record: Record) -> bool:
        return bool(record.config.get("script") == self.command.record.config["script"])

    def _is_spent(self, next_s: float) -> bool:
        """Whether so many more seconds, and what is reserved, would exceed the budget. The original's first process runs anyway."""
        if self._budget_minutes is None:
            return False
        needed_s = next_s + (self.reserved * self.comparison_s({}) if self.reserved else 0.0)
        return bool(time.monotonic() - self._began_s + needed_s > self._budget_minutes * 60)

    def _processes(self, roles: Sequence[Role], *, counts: bool = True, shared: bool = False) -> list[Record] | None:
        """The records of the windows with these roles: an earlier command's, or of processes that run now, on disk as each ends.

        `shared`: roles of the same changes may be windows of one process. Returns None in a dry run and, if the budget `counts`,
        when it has no room for them.
        """
        missing = [role for role in roles if self._name(*role) not in self._known]
        expected_s = self._expected_s([options for options, _ in missing], shared=shared)
        if missing and (self._dry_run or (counts and self._is_spent(expected_s))):
            return None
        while missing:
            together = self._groups(missing, shared=shared)[0]  # anew each time, as what has run tells what it takes
            failed = self._run_together(together, shared=shared)
            is_too_short = shared and not self.may_share  # the script is, for several windows
            shared = shared and self.may_share
            self._run_alone(failed, shared=shared)
            missing = [role for role in missing if self._name(*role) not in self._known]
            if is_too_short and self._is_spent(self._expected_s([options for options, _ in missing])):
                return None  # there are more starts to come than were expected
        return [self._known[self._name(*role)] for role in roles]

    def _run_together(self, roles: Sequence[Role], *, shared: bool = False) -> list[Role]:
        """Run processes that start together. Returns the roles that failed beside others; a failure is kept only if it ran alone.

        Windows that a script was too short for have no record, and no process is shared from then on.
        """
        seats = self._seats(roles, shared=shared)
        turns = [next(place for place, seat in enumerate(seats) if role in seat) for role in roles]
        changes = [self.changes(seat[0][0]) for seat in seats]
        left, failed = [list(seat) for seat in seats], []
        began_s, began_at = time.monotonic(), _now()
        with tempfile.TemporaryDirectory(prefix="trainstep-") as folder:
            out = [Path(folder) / f"{place}.jsonl" for place in range(len(seats))]
            with closing(self._run(changes, out, turns)) as ends:
                for number, (place, trouble, kind) in enumerate(ends):
                    window = len(seats[place]) - len(left[place]) + 1
                    record = self._whole(Store(out[place]).finished(), trouble, kind, changes[place], window)
                    now_s, role = time.monotonic(), left[place].pop(0)
                    if record is None:
                        self.may_share = False
                    elif record.failure is not None and len(seats) > 1:
                        failed += [role, *left[place]]
                    else:
                        self._keep(record, role, number, began_at, now_s - began_s)
                        for other in () if record.samples else left[place]:  # it has failed, or found nothing to change
                            self._keep(record, other, number, began_at, 0.0)
                    began_s, began_at = now_s, _now()
        return failed

    def _run_alone(self, roles: Sequence[Role], *, shared: bool) -> None:
        """Run each process that failed beside others once more by itself, as the others may have been the cause.

        If it fails alone too, its record is also kept for the other processes of the same changes, which do not run.
        """
        broken: dict[str, Record] = {}
        for seat in self._seats(roles, shared=shared):
            key, first = self.key_of(seat[0][0]), self._name(*seat[0])
            if key in broken:
                for role in seat:
                    self._keep(broken[key], role, 0, _now(), 0.0)
                continue
            self._run_together(seat, shared=shared)
            if first in self._known and self._known[first].failure is not None:
                broken[key] = self._known[first]

    def _seats(self, roles: Sequence[Role], *, shared: bool) -> list[list[Role]]:
        """The roles of each process."""
        seats: dict[str, list[Role]] = {}
        for options, name in roles:
            seat = self.key_of(options) if shared else self._name(options, name)
            seats.setdefault(seat, []).append((options, name))
        return list(seats.values())

    def _keep(self, record: Record, role: Role, turn: int, started_at: str, duration_s: float) -> None:
        """Write a window's record. `turn`: number of windows before it since the processes started; `duration_s`: its share."""
        process = self._name(*role)
        record = replace(
            record,
            key=self.key_of(role[0]),
            started_at=started_at,
            duration_s=round(duration_s, 3),
            facts={**record.facts, **facts_of(process=process, turn=turn, **self._facts)},
        )
        self.store.append(record)
        self._known[process] = record
        self._note_time(record)

    def _groups(self, roles: Sequence[Role], *, shared: bool = False) -> list[list[Role]]:
        """The roles, in their order, in groups whose processes have room at once."""
        groups: list[list[list[Role]]] = []
        for seat in self._seats(roles, shared=shared):
            if not groups or not self._have_room([each[0][0] for each in (*groups[-1], seat)]):
                groups.append([])
            groups[-1].append(seat)
        return [[role for role in roles if any(role in seat for seat in group)] for group in groups]

    def _have_room(self, together: Sequence[Options]) -> bool:
        """Whether processes of these options may live at once; one is tried in any case.

        Half of the machine's memory is left to workers of loaders, which a process's own figure does not include.
        """
        takes = [self._taken(options) for options in together]
        if self.command.ranks > 1 or None in takes or len(together) > _MOST_TOGETHER:  # or until the first has ended
            return len(together) == 1
        resident_bytes, gpu_bytes = (sum(each) for each in zip(*filter(None, takes), strict=True))
        return bool(resident_bytes <= self._here.memory_bytes / 2 and gpu_bytes <= (self._here.gpu_memory_bytes or 0))

    def _taken(self, options: Options) -> tuple[float, float] | None:
        """Expected bytes of the machine's memory and of the GPU's for a process of these options; None if unknown.

        They are what such a process took, or one with the same batch size, or else the original. For a batch k times as large, what
        is left after weights, gradients and AdamW's moments in fp32 is taken k times; with 16-bit weights everything is.
        """
        key, start = self.key_of(options), self.key_of(self.start)
        ran = [record for record in self._known.values() if self._is_ours(record) and not record.failure]
        batch_size = self.changes(options).get("batch_size")
        alike = [record for record in ran if batch_size and str(record.fact("loader_batch_size")) == batch_size]
        same = next((record for record in ran if record.key == key), next(iter(alike), None))
        first = same or next((record for record in ran if record.key == start), None) or next(iter(ran), None)
        if first is None:
            return None
        peak = first.fact("peak_reserved_bytes")
        if first.config["device"] == "cuda" and not (peak and self._here.gpu_memory_bytes):
            return None
        has_run = first.key == key
        room = _ROOM_KNOWN if has_run else _ROOM
        resident_bytes = room * (first.fact("peak_rss_bytes") or 0)
        if not peak:
            return resident_bytes, 0.0
        has_fp32_weights = first.fact("script_precision") not in ("bf16", "fp16")
        held_bytes = min(peak / 2, _HELD_BYTES * (first.fact("trained_elements") or 0)) if has_fp32_weights else 0
        work = self._work(options) if same is None else 1.0
        return resident_bytes, room * (held_bytes + work * (peak - held_bytes)) + _CONTEXT_BYTES

    def _work(self, options: Options) -> float:
        """Sequences of a step over those of the original: with another batch size, times per sequence are compared."""
        batch_size = self.start.get("batch_size")
        return float(int(options["batch_size"]) / int(batch_size)) if batch_size and "batch_size" in options else 1.0

    def _whole(
        self, records: Sequence[Record], trouble: str, kind: str, changes: Mapping[str, str], window: int
    ) -> Record | None:
        """The record of one window: its mean step, with its process's losses and facts; or its failure.

        None if the script ended before this window, but was long enough for an earlier one.
        """
        last = records[-1] if records else self.command.record
        config = {**last.config, "run": "proof", "first_step": 1}
        time_s, steps = last.fact("timed_s"), last.fact("timed_steps")
        if changes and records and not trouble and not time_s and last.fact("not_applied"):  # it ended before its turn
            return replace(last, config=config, samples={}, tables={})
        if window > 1 and not trouble and last.fact("timed_windows", 1) < window:
            return None
        if not trouble and not (records and time_s and steps):
            seen = last.fact("steps_seen", 0) if records else 0
            trouble = f"the script ended after {seen} steps of {self._steps}: let it run longer, or give --script-steps"
        if trouble:
            facts = facts_of(applied=text_of_changes(changes) or None)
            failure = Failure(kind=kind or "crash", phase="step", message=trouble)
            return replace(
                last, config=config, environment=self._here, samples={}, facts=facts, tables={}, failure=failure
            )
        kept = {"step": Samples(unit="s", values=(time_s / steps,))}
        losses = {name: table for name, table in last.tables.items() if name == "losses"}
        return replace(last, config=config, samples=kept, tables=losses)

    def _run(
        self, changes: Sequence[Mapping[str, str]], out: Sequence[Path], turns: Sequence[int]
    ) -> Generator[tuple[int, str, str]]:
        """Run the script with each of the changes. Yields after each turn: its place, what went wrong, its kind; or empty words."""
        commands = [partial(self._words, each, path) for each, path in zip(changes, out, strict=True)]
        folder, timeout_s = self.command.folder, self._timeout_s
        for place, end in in_turn(commands, turns, folder=folder, environment=_environment(), timeout_s=timeout_s):
            if end is None:
                yield place, "", ""
            elif end.code is None:
                yield place, f"did not end within {self._timeout_s:.0f} s", "timeout"
            else:
                yield place, *(failure_of(end.code, end.said) if end.code else ("", ""))

    def _words(self, changes: Mapping[str, str], out: Path, turn: int | None) -> list[str]:
        """The command of a process."""
        words = ["run", "--quiet", "--no-page", "--inspect-every", "0"]
        words += ["--stop-after", str(self._steps), "--out", str(out)]
        words += ["--apply", text_of_changes(changes)] if changes else []
        words += [] if turn is None else ["--turn", str(turn)]
        words += self.command.words
        if self.command.ranks > 1:
            torchrun = ("--standalone", "--nproc-per-node", str(self.command.ranks), "-m", "trainstep")
            return python_command("torch.distributed.run", *torchrun, *words)
        return python_command("trainstep", *words)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _environment() -> dict[str, str]:
    """This process's environment, with an import path that holds in another folder."""
    path = os.environ.get("PYTHONPATH", "")
    whole = os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep) if entry)
    return {**os.environ, **({"PYTHONPATH": whole} if whole else {})}


def failure_of(code: int, said: str) -> tuple[str, str]:
    """What to say of a process that ended with this code, and the kind of its failure: crash or out_of_memory."""
    if code < 0:
        return f"ended by {signal.strsignal(-code) or f'signal {-code}'}; its last words: {said}", "crash"
    return f"{said} (exit code {code})", "out_of_memory" if "OutOfMemoryError" in said else "crash"
