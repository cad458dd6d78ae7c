"""Measures somebody's own script for a proof: fresh processes of `trainstep run`, with changes from outside or without.

    command = command_of(record)                    # how the record's script is started again; ValueError says why it cannot be
    lab = ScriptLab(store, command, steps=40, ...)
    lab.trial({}, 0), lab.compare({}, {"adamw": "fused"}, 0)

The callbacks of plan/trials.py for a script. Each process that ends is a record in the store, looked up before another is started,
so that a proof that was killed goes on with the process that it was at.

[Note: the order] A script's processes cannot be stopped between two steps, since workers of its loaders would go on. So they run
one after the other, a b b a a b b a: a pair is two neighbours, and both orders are equally frequent. A process gives one value,
the mean step of its window (steering.py), and the interval is Student's over the pairs, as of every comparison of fresh processes
(records/compare.py).

[Note: futility] A change that was not faster in the first two pairs is given up there. That loses changes of a few per cent on
a noisy machine, and never makes one: `faster` always has all of its pairs.
"""

import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from trainstep.config.import_path import python_command
from trainstep.config.script import text_of_changes
from trainstep.measure.run.script import find_script
from trainstep.plan.trials import Options, Trial
from trainstep.records.compare import MINIMUM_PAIRS, Comparison, compare_samples
from trainstep.records.facts import facts_of
from trainstep.records.record import Environment, Failure, Record, Samples
from trainstep.records.store import Store

FEWEST_PAIRS = MINIMUM_PAIRS + 1
"""An even number, so that both orders are equally frequent."""
_TRIED_PAIRS = 2
_LEAST_GAIN = 0.02
"""[Note: futility]"""
_FIRST_S = 30.0
"""Seconds that a process is thought to take before one has ended."""
_LAST_BYTES = 8192
_ORIGINAL = "the original"


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """How a recorded script is started again."""

    words: tuple[str, ...]
    """Of `trainstep run`: the script, and its arguments."""
    folder: str
    ranks: int
    source: str
    """SHA-256 of the script as it is now."""
    changed: bool
    """Whether that is not the script of the record."""
    record: Record


def command_of(record: Record) -> ScriptCommand:
    """How the script of a record is started again. ValueError where it cannot be."""
    name, ranks = str(record.config["script"]), int(record.config.get("ranks", 1))
    if not str(record.fact("command", "")).startswith("trainstep run"):
        raise ValueError(
            "prove: the record is of a watch in code, which does not say how its program is started; run the script by "
            "`trainstep run`, and give that record"
        )
    if record.fact("applied") or record.fact("stopped_after"):
        raise ValueError("prove: the record is of a run with --apply or --stop-after; give one of the script as it is")
    if ranks > 1 and record.fact("local_ranks") != ranks:
        raise ValueError(
            f"prove: the run had {ranks} ranks that were not all on one machine, or does not say so; a proof starts ranks by "
            "torchrun on this machine: run the script so, and give that record"
        )
    folder = str(record.fact("script_folder") or os.getcwd())
    head = ("-m", name[3:]) if name.startswith("-m ") else (name,)
    words = (*head, *shlex.split(str(record.config.get("arguments", ""))))
    before = os.getcwd()
    try:
        os.chdir(folder)
        script = find_script(words)
    except OSError as error:
        raise ValueError(f"prove: the run's folder {folder} cannot be entered: {error.strerror}") from None
    finally:
        os.chdir(before)
    known = record.fact("script_source")
    return ScriptCommand(
        words=words,
        folder=folder,
        ranks=ranks,
        source=script.source,
        changed=bool(known) and known != script.source,
        record=record,
    )


class ScriptLab:
    """Measures what the store does not have, until the budget is spent; nothing in a dry run. As measure/harness/lab.py."""

    def __init__(
        self,
        store: Store,
        command: ScriptCommand,
        *,
        steps: int,
        pairs: int,
        timeout_s: float,
        say: Callable[[str], None],
        facts: Mapping[str, Any],
        here: Environment,
        budget_minutes: float | None = None,
        began_s: float | None = None,
        dry_run: bool = False,
    ) -> None:
        """`facts`: of every record. `here`: this machine. ValueError for too few pairs."""
        if pairs < MINIMUM_PAIRS:
            raise ValueError(
                f"processes: an interval needs at least {MINIMUM_PAIRS} processes a side of a script, not {pairs}"
            )
        self.store, self.command = store, command
        self._steps, self._pairs, self._timeout_s = steps, pairs, timeout_s
        self._say, self._facts, self._here = say, facts, here
        self._budget_minutes, self._dry_run = budget_minutes, dry_run
        self._began_s = time.monotonic() if began_s is None else began_s
        self.start: Options = {}
        """The original: its precision, once known."""
        self.reserved = 0
        """Number of comparisons for which the budget must have room after the next measurement."""
        # What a time limit ended is tried again, as this command's may be longer.
        done = [record for record in store.finished() if record.failure is None or record.failure.kind != "timeout"]
        self._known = {str(record.fact("process")): record for record in done if record.fact("process")}
        self._processes_s = [record.duration_s for record in self._known.values() if self._is_ours(record)]
        self._ran = 0

    def key_of(self, options: Options) -> str:
        """Tells sets of changes apart, of this script as it is now."""
        of = [self.command.words, self.command.folder, self.command.source, self.command.ranks, self._steps]
        text = json.dumps([*of, sorted(self.changes(options).items())])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def changes(self, options: Options) -> dict[str, str]:
        """The options that differ from the original."""
        return {name: str(value) for name, value in options.items() if self.start.get(name) != value}

    def first(self) -> Record | None:
        """The original's first process; None in a dry run that has none yet."""
        return self._process(self.start, "trial 0")

    def trial(self, options: Options, repeat: int) -> Trial | None:
        """One process alone, or an earlier command's record of it. A change that found nothing to change failed."""
        record = self._process(options, f"trial {repeat}", self.trial_s(options))
        if record is None:
            return None
        if failure := record.failure:
            return Trial(failure_kind=failure.kind, phase=failure.phase, message=failure.message)
        if self.changes(options) and (why := record.fact("not_applied")):
            return Trial(failure_kind="not applied", phase="build", message=f"it found nothing to change: {why}")
        if "compile" in self.changes(options) and not record.fact("compiled_graphs"):
            return Trial(failure_kind="not applied", phase="build", message="torch.compile found nothing to compile")
        losses = tuple(record.tables["losses"]["loss"]) if "losses" in record.tables else ()
        return Trial(losses=losses, step_s=record.samples["step"].values[0])

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        """Pairs of processes, or earlier commands' records of them. [Note: the order]"""
        name = text_of_changes(self.changes(after))
        left = [n for n in range(2 * self._pairs) if self._place(before, after, repeat, n) not in self._known]
        if left and (self._dry_run or self._is_spent(len(left) * self.trial_s(after))):
            return None
        times_s: tuple[list[float], list[float]] = ([], [])
        for pair in range(self._pairs):
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                options = after if side else before
                record = self._process(options, self._role(before, after, repeat, 2 * pair + side))
                if record is None:
                    return None
                if record.failure is not None:
                    who = name if side else _ORIGINAL
                    return Comparison(verdict="cannot tell", reason=f"{who} failed: {record.failure.message}")
                times_s[side].append(record.samples["step"].values[0])
            ratios = [b / a for a, b in zip(*times_s, strict=True)]
            self._say(f"{name}: pair {pair + 1} of {self._pairs}: {ratios[-1]:.3f} of the original's time")
            if pair + 1 == _TRIED_PAIRS and min(ratios) > 1 / (1 + _LEAST_GAIN):
                ratio = math.exp(fmean(map(math.log, ratios)))
                reason = (
                    f"not faster in the first {_TRIED_PAIRS} pairs (ratio {ratio:.3f}), so it was not compared further"
                )
                return Comparison(
                    verdict="cannot tell", reason=reason, quantity="step", ratio=ratio, n=pair + 1, paired=True
                )
        a, b = (Samples(unit="s", values=tuple(values)) for values in times_s)
        comparison = replace(compare_samples(a, b, process_steps=(1, 1)), quantity="step", interleaving="rounds")
        self._say(f"{name}: {comparison.reason}")
        return comparison

    def trial_s(self, _: Options) -> float:
        """About how many seconds a process takes."""
        return fmean(self._processes_s) if self._processes_s else _FIRST_S

    def comparison_s(self, options: Options) -> float:
        """About how many seconds a comparison takes."""
        return 2 * self._pairs * self.trial_s(options)

    def _role(self, before: Options, after: Options, repeat: int, place: int) -> str:
        return f"{self.key_of(before)} {self.key_of(after)} {repeat} {place}"

    def _place(self, before: Options, after: Options, repeat: int, place: int) -> str:
        options = after if place % 2 else before
        return f"{self.key_of(options)} {self._role(before, after, repeat, place)}"

    def _is_ours(self, record: Record) -> bool:
        return bool(record.config.get("script") == self.command.record.config["script"])

    def _is_spent(self, next_s: float) -> bool:
        """Whether so many seconds, and what is reserved, would end after the budget. The first process always runs."""
        if self._budget_minutes is None or not self._ran:
            return False
        needed_s = next_s + self.reserved * self.comparison_s({})
        return bool(time.monotonic() - self._began_s + needed_s > self._budget_minutes * 60)

    def _process(self, options: Options, role: str, needed_s: float = 0.0) -> Record | None:
        """The record of the process in this role: an earlier command's, or of one that runs now and is on disk afterwards."""
        process = f"{self.key_of(options)} {role}"
        if process in self._known:
            return self._known[process]
        if self._dry_run or (needed_s and self._is_spent(needed_s)):
            return None
        changes = self.changes(options)
        began_s, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        with tempfile.TemporaryDirectory(prefix="trainstep-") as folder:
            out = Path(folder) / "run.jsonl"
            trouble, kind = self._run(changes, out)
            records = Store(out).finished()
        record = self._whole(records, trouble, kind, changes)
        record = replace(
            record,
            key=self.key_of(options),
            started_at=started_at,
            duration_s=round(time.monotonic() - began_s, 3),
            facts={**record.facts, **facts_of(process=process, **self._facts)},
        )
        self.store.append(record)
        self._known[process] = record
        self._processes_s.append(record.duration_s)
        self._ran += 1
        return record

    def _whole(self, records: Sequence[Record], trouble: str, kind: str, changes: Mapping[str, str]) -> Record:
        """One record of a process: its window's mean step, its losses and facts; or its failure."""
        last = records[-1] if records else self.command.record
        config = {**last.config, "run": "proof", "first_step": 1}
        time_s, steps = last.fact("timed_s"), last.fact("timed_steps")
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

    def _run(self, changes: Mapping[str, str], out: Path) -> tuple[str, str]:
        """Run the script to its last step. Returns what went wrong with its kind of failure; both empty if nothing did."""
        ours = [
            "run",
            "--quiet",
            "--no-page",
            "--inspect-every",
            "0",
            "--stop-after",
            str(self._steps),
            "--out",
            str(out),
        ]
        ours += ["--apply", text_of_changes(changes)] if changes else []
        words = [*ours, *self.command.words]
        if self.command.ranks > 1:
            torchrun = ("--standalone", "--nproc-per-node", str(self.command.ranks), "-m", "trainstep")
            command = python_command("torch.distributed.run", *torchrun, *words)
        else:
            command = python_command("trainstep", *words)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.command.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                return f"did not end within {self._timeout_s:.0f} s", "timeout"
            finally:
                with suppress(ProcessLookupError, PermissionError):  # also what the script left running
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return (f"{_last_line(output)} (exit code {code})", "crash") if code else ("", "")


def _environment() -> dict[str, str]:
    """This process's environment, with an import path that holds in another folder."""
    path = os.environ.get("PYTHONPATH", "")
    whole = os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep) if entry)
    return {**os.environ, **({"PYTHONPATH": whole} if whole else {})}


def _last_line(output: Any) -> str:
    """The last line that is not empty."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")
