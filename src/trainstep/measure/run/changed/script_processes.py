"""Runs somebody's own script in fresh processes, several at once, each with its changes from outside and each once.

    processes = ScriptProcesses(store, command, steps=40, ...)

Each process has a role, is a record in the store when it ends, and is looked up before another is started, so that a proof that
was killed goes on with the process that it was at. Several start together, as many as have room, so that a proof is not mostly
imports and compilations; their windows follow one another while the others wait (turns.py). A process gives one value, the mean
step of its window (steering.py). A script of several ranks runs alone.
"""

import hashlib
import json
import os
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
"""Seconds that a process is thought to take before one has ended."""
_TURN_SHARE = 0.1
"""A process's turn takes about this share of the first one's time, most of which are imports and compilations: 0.08 and 0.15 on an
H200 (results/h200/script_hugging_face_proof.ndjson, script_nano_proof.ndjson)."""
_MOST_TOGETHER = 10
_CONTEXT_BYTES = 2**30
"""What the driver takes of a GPU for a process, beside torch's memory."""
_ROOM = 1.1
"""A change may need more memory than the original. What fails for it beside others runs again alone."""

Role = tuple[Options, str]
"""What a process runs, and its name among those that run the same."""


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
        """`pairs`: of processes, in a comparison. `facts`: of every record. `here`: this machine."""
        self.store, self.command = store, command
        self._steps, self._pairs, self._timeout_s = steps, pairs, timeout_s
        self._facts, self._here = facts, here
        self._budget_minutes, self._dry_run = budget_minutes, dry_run
        self._began_s = time.monotonic() if began_s is None else began_s
        self.start: Options = {}
        """The original: its precision, once known."""
        self.reserved = 0
        """Number of comparisons for which the budget must have room after the next measurement."""
        # What a time limit ended is tried again, as this command's may be longer.
        done = [record for record in store.finished() if record.failure is None or record.failure.kind != "timeout"]
        self._known = {str(record.fact("process")): record for record in done if record.fact("process")}
        self._earlier = set(self._known)
        """Names of the processes that earlier commands ran."""
        self._starts_s: list[float] = []
        """Of processes that started together, the first one's share of their time: all start in it."""
        self._turns_s: list[float] = []
        """The others' shares."""
        for record in self._known.values():
            if self._is_ours(record):
                self._note_time(record)

    def comparison_s(self, _: Options) -> float:
        """About how many seconds a comparison takes."""
        return self._expected_s([self.start] * 2 * self._pairs)

    def key_of(self, options: Options) -> str:
        """Tells sets of changes apart, of this script as it is now."""
        of = [self.command.words, self.command.folder, self.command.source, self.command.ranks, self._steps]
        text = json.dumps([*of, sorted(self.changes(options).items())])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def changes(self, options: Options) -> dict[str, str]:
        """The options that differ from the original."""
        return {name: str(value) for name, value in options.items() if self.start.get(name) != value}

    def trial_s(self, _: Options) -> float:
        """About how many seconds a process takes."""
        return median(self._starts_s) if self._starts_s else _FIRST_S

    def left_s(self, _: int) -> float:
        """About how many seconds are left: the changes have had their rounds, and the comparison of all together is to come."""
        return self.comparison_s({})

    def _expected_s(self, processes: Sequence[Options]) -> float:
        """About how many seconds processes of these options take, as many as have room together."""
        groups = len(self._groups([(options, "") for options in processes]))
        start_s = self.trial_s({})
        turn_s = median(self._turns_s) if self._turns_s else _TURN_SHARE * start_s
        return groups * start_s + (len(processes) - groups) * turn_s

    def _note_time(self, record: Record) -> None:
        if record.samples and record.fact("turn") is not None:  # files of before 2026-11-27 do not have it
            (self._turns_s if record.fact("turn") else self._starts_s).append(record.duration_s)

    def _name(self, options: Options, role: str) -> str:
        return f"{self.key_of(options)} {role}"

    def _is_ours(self, record: Record) -> bool:
        return bool(record.config.get("script") == self.command.record.config["script"])

    def _is_spent(self, next_s: float) -> bool:
        """Whether so many seconds, and what is reserved, would end after the budget. The original's first process runs anyway."""
        if self._budget_minutes is None:
            return False
        needed_s = next_s + self.reserved * self.comparison_s({})
        return bool(time.monotonic() - self._began_s + needed_s > self._budget_minutes * 60)

    def _processes(self, roles: Sequence[Role], *, counts: bool = True) -> list[Record] | None:
        """The records of processes in their roles: an earlier command's, or of those that run now, on disk as each ends.

        None in a dry run, and where the budget has no room for them, if that `counts`.
        """
        missing = [role for role in roles if self._name(*role) not in self._known]
        if missing and (
            self._dry_run or (counts and self._is_spent(self._expected_s([options for options, _ in missing])))
        ):
            return None
        while missing:
            together = self._groups(missing)[0]  # anew each time, as what has run tells what it takes
            failed = self._run_together(together)
            if len(together) > 1:  # it may be for what the others took: alone it has the whole machine
                for role in failed:
                    self._run_together([role])
            missing = missing[len(together) :]
        return [self._known[self._name(*role)] for role in roles]

    def _run_together(self, roles: Sequence[Role]) -> list[Role]:
        """Run processes that start together. Returns those that failed, whose records are kept only where they ran alone."""
        failed = []
        changes = [self.changes(options) for options, _ in roles]
        began_s, began_at = time.monotonic(), _now()
        with tempfile.TemporaryDirectory(prefix="trainstep-") as folder:
            out = [Path(folder) / f"{place}.jsonl" for place in range(len(roles))]
            with closing(self._run(changes, out)) as ends:
                for place, trouble, kind in ends:
                    record = self._whole(Store(out[place]).finished(), trouble, kind, changes[place])
                    now_s = time.monotonic()
                    if record.failure is not None and len(roles) > 1:
                        failed.append(roles[place])
                    else:
                        self._keep(record, roles[place], place, began_at, now_s - began_s)
                    began_s, began_at = now_s, _now()
        return failed

    def _keep(self, record: Record, role: Role, turn: int, started_at: str, duration_s: float) -> None:
        """Write a process's record. `turn`: its place among those that started together; `duration_s`: its share of their time."""
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

    def _groups(self, roles: Sequence[Role]) -> list[list[Role]]:
        """The roles, in their order, in groups that have room at once."""
        groups: list[list[Role]] = []
        for role in roles:
            if not groups or not self._room([options for options, _ in (*groups[-1], role)]):
                groups.append([])
            groups[-1].append(role)
        return groups

    def _room(self, together: Sequence[Options]) -> int:
        """How many times processes of these options may live at once; 0 where not even once.

        Half of the machine's memory is left to workers of loaders, which a process's own does not count.
        """
        if self.command.ranks > 1:
            return int(len(together) == 1)
        takes = [self._taken(options) for options in together]
        if None in takes:  # until the first has ended
            return int(len(together) == 1)
        resident_bytes, gpu_bytes = (sum(each) for each in zip(*filter(None, takes), strict=True))
        rooms = [_MOST_TOGETHER / len(together)]
        if resident_bytes:
            rooms.append(self._here.memory_bytes / 2 / resident_bytes)
        if gpu_bytes:
            rooms.append((self._here.gpu_memory_bytes or 0) / gpu_bytes)
        return int(min(rooms))

    def _taken(self, options: Options) -> tuple[float, float] | None:
        """Bytes of the machine's memory and of the GPU's that such a process is thought to take; None if nobody can say.

        What such a process took, or else what the original took; with a larger batch so many times as much of the GPU.
        """
        key, start = self.key_of(options), self.key_of(self.start)
        ran = [record for record in self._known.values() if self._is_ours(record) and not record.failure]
        same = next((record for record in ran if record.key == key), None)
        first = same or next((record for record in ran if record.key == start), None) or next(iter(ran), None)
        if first is None:
            return None
        held = first.fact("peak_reserved_bytes")
        if first.config["device"] == "cuda" and not (held and self._here.gpu_memory_bytes):
            return None
        work = self._work(options) if same is None else 1.0
        return _ROOM * (first.fact("peak_rss_bytes") or 0), (_ROOM * held * work + _CONTEXT_BYTES) if held else 0.0

    def _work(self, options: Options) -> float:
        """Sequences of a step over those of the original: with another batch the time of each is compared."""
        batch_size = self.start.get("batch_size")
        return float(int(options["batch_size"]) / int(batch_size)) if batch_size and "batch_size" in options else 1.0

    def _whole(self, records: Sequence[Record], trouble: str, kind: str, changes: Mapping[str, str]) -> Record:
        """One record of a process: its window's mean step, its losses and facts; or its failure."""
        last = records[-1] if records else self.command.record
        config = {**last.config, "run": "proof", "first_step": 1}
        time_s, steps = last.fact("timed_s"), last.fact("timed_steps")
        if changes and records and not trouble and not time_s and last.fact("not_applied"):  # it ended before its turn
            return replace(last, config=config, samples={}, tables={})
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

    def _run(self, changes: Sequence[Mapping[str, str]], out: Sequence[Path]) -> Generator[tuple[int, str, str]]:
        """Run the script with each of the changes. For each, as it ends: its place, what went wrong, its kind; or empty words."""
        commands = [partial(self._words, each, path) for each, path in zip(changes, out, strict=True)]
        ends = in_turn(commands, folder=self.command.folder, environment=_environment(), timeout_s=self._timeout_s)
        for place, end in ends:
            if end.code is None:
                yield place, f"did not end within {self._timeout_s:.0f} s", "timeout"
            else:
                yield place, *((f"{end.said} (exit code {end.code})", "crash") if end.code else ("", ""))

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
