"""Measures somebody's own script for a proof: fresh processes of `trainstep run`, with changes from outside or without.

    command = command_of(record)                    # script_command.py
    lab = ScriptLab(store, command, steps=40, ...)
    lab.measure_in_rounds([{"adamw": "fused"}, {"workers": "8"}])
    lab.trial({}, 0), lab.compare({}, {"adamw": "fused"}, 0)

The callbacks of plan/trials.py for a script. Each process that ends is a record in the store, looked up before another is started,
so that a proof that was killed goes on with the process that it was at.

[Note: the order] A process gives one value, the mean step of its window (steering.py). Several start together, as many as have
room, so that a proof is not mostly imports and compilations; their windows follow one another while the others wait (turns.py). In
a round the original and each change have a window; the next round has the opposite order. A change's pairs are its windows with the
original's in the same rounds, which all changes share. A comparison outside the rounds has the order a b b a a b b a. The interval
is Student's over the pairs, as of every comparison of fresh processes (records/compare.py). A script of several ranks runs alone.

[Note: futility] A change that was not faster in the first two pairs is given up there. That loses changes of a few per cent on
a noisy machine, and never makes one: `faster` always has all of its pairs.
"""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from trainstep.config.import_path import python_command
from trainstep.config.script import text_of_changes
from trainstep.measure.run.changed.script_command import ScriptCommand
from trainstep.measure.run.changed.turns import in_turn
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
_FEW = 2
"""Processes after which their mean tells how long one takes: the first one's imports and compilations are the slowest."""
_TOGETHER = 1.5
"""Processes that start together take this many times as long as the first one, by a guess."""
_MOST_TOGETHER = 10
_CONTEXT_BYTES = 2**30
"""What the driver takes of a GPU for a process, beside torch's memory."""
_ROOM = 1.25
"""A change may need more memory than the original."""
_ORIGINAL = "the original"


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
        """Of processes that started together, each one's share of their time."""
        self._ran = 0
        self._in_rounds: set[str] = set()
        """Keys of the changes that rounds measure."""
        self.cut_off: list[str] = []
        """Names of the changes that have had some of their rounds when the budget ended."""

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
        records = self._processes([(self.start, "trial 0")])
        return None if records is None else records[0]

    def measure_in_rounds(self, tried: Sequence[Options]) -> None:
        """Measure these against the original, all in each round, as far as the budget goes. `trial` and `compare` find them then.

        [Note: the order] In the end the budget keeps room for one comparison: of all that helped, together.
        """
        self._in_rounds = {self.key_of(options) for options in tried}
        left = list(tried)
        for pair in range(self._pairs):
            if pair >= _TRIED_PAIRS:
                left = self._affordable(
                    [options for options in left if not self._is_futile(options)], self._pairs - pair
                )
            if not left:
                return
            roles = [(self.start, f"trial {pair + 1}"), *[(options, f"trial {pair}") for options in left]]
            if self._processes(roles[::-1] if pair % 2 else roles, self.comparison_s({})) is None:
                return
            left = [options for options in left if not self._trouble(options) and self._ratios(options)]
            self._say(f"round {pair + 1} of {self._pairs}: {self._ratio_words(left)}")

    def _trouble(self, options: Options) -> str:
        tried = self.trial(options, 0)
        return "" if tried is None else tried.failure_kind

    def _ratios(self, options: Options) -> list[float]:
        """What the change takes of the original's time, in each round so far."""
        ratios = []
        for pair in range(self._pairs):
            before, after = (
                self._known.get(self._name(self.start, f"trial {pair + 1}")),
                self._known.get(self._name(options, f"trial {pair}")),
            )
            if before is None or after is None or before.failure or after.failure:
                break
            ratios.append(after.samples["step"].values[0] / before.samples["step"].values[0])
        return ratios

    def _is_futile(self, options: Options) -> bool:
        """[Note: futility]"""
        return min(self._ratios(options)[:_TRIED_PAIRS], default=0.0) > 1 / (1 + _LEAST_GAIN)

    def _affordable(self, left: Sequence[Options], rounds: int) -> list[Options]:
        """The fastest of these, as many as the budget has room for."""
        best = sorted(left, key=lambda options: fmean(self._ratios(options) or [1.0]))
        while best and self._is_spent(rounds * self._expected_s(len(best) + 1) + self.comparison_s({})):
            best.pop()
        return [options for options in left if options in best]

    def _ratio_words(self, left: Sequence[Options]) -> str:
        words = [f"{text_of_changes(self.changes(options))} {self._ratios(options)[-1]:.3f}" for options in left]
        return f"{', '.join(words) or 'no change'} of the original's time"

    def trial(self, options: Options, repeat: int) -> Trial | None:
        """One process, or an earlier command's record of it. A change that found nothing to change failed."""
        records = self._processes([(options, f"trial {repeat}")])
        if records is None:
            return None
        [record] = records
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
        roles = self._roles(before, after, repeat)
        left = [role for role in roles if self._name(*role) not in self._known]
        if left and (self._dry_run or self._is_spent(self._expected_s(len(left)))):
            return self._cut_off(name, self._ratios(after) if self._is_in_rounds(before, after, repeat) else ())
        ratios: list[float] = []
        times_s: tuple[list[float], list[float]] = ([], [])
        for part in (roles[: 2 * _TRIED_PAIRS], roles[2 * _TRIED_PAIRS :]):
            records = self._processes(part, counts=False)
            if records is None:
                return None
            for first, second in zip(records[::2], records[1::2], strict=True):
                pair = (second, first) if len(ratios) % 2 else (first, second)
                for record, who in zip(pair, (_ORIGINAL, name), strict=True):
                    if record.failure is not None:
                        return Comparison(verdict="cannot tell", reason=f"{who} failed: {record.failure.message}")
                for side, record in zip(times_s, pair, strict=True):
                    side.append(record.samples["step"].values[0])
                ratios.append(times_s[1][-1] / times_s[0][-1])
                if left:
                    self._say(f"{name}: pair {len(ratios)} of {self._pairs}: {ratios[-1]:.3f} of the original's time")
            if len(ratios) == _TRIED_PAIRS and min(ratios) > 1 / (1 + _LEAST_GAIN):
                ratio = math.exp(fmean(map(math.log, ratios)))
                reason = (
                    f"not faster in the first {_TRIED_PAIRS} pairs (ratio {ratio:.3f}), so it was not compared further"
                )
                return Comparison(
                    verdict="cannot tell", reason=reason, quantity="step", ratio=ratio, n=_TRIED_PAIRS, paired=True
                )
        a, b = (Samples(unit="s", values=tuple(values)) for values in times_s)
        comparison = replace(compare_samples(a, b, process_steps=(1, 1)), quantity="step", interleaving="rounds")
        self._say(f"{name}: {comparison.reason}")
        return comparison

    def _cut_off(self, name: str, ratios: Sequence[float]) -> Comparison | None:
        """A comparison of which the budget has ended the rounds, so that those of other changes count; None without any round."""
        if not ratios or self._dry_run:
            return None
        self.cut_off.append(name)
        reason = f"the budget had room for {len(ratios)} of {self._pairs} rounds"
        ratio = math.exp(fmean(map(math.log, ratios)))
        return Comparison(
            verdict="cannot tell", reason=reason, quantity="step", ratio=ratio, n=len(ratios), paired=True
        )

    def trial_s(self, _: Options) -> float:
        """About how many seconds a process takes."""
        return fmean(self._processes_s) if self._processes_s else _FIRST_S

    def comparison_s(self, options: Options) -> float:
        """About how many seconds a comparison takes."""
        return self._expected_s(2 * self._pairs)

    def _expected_s(self, processes: int) -> float:
        """About how many seconds these take, as many as have room together."""
        if len(self._processes_s) > _FEW:
            return processes * self.trial_s({})
        return math.ceil(processes / self._room()) * _TOGETHER * self.trial_s({})

    def _roles(self, before: Options, after: Options, repeat: int) -> list[tuple[Options, str]]:
        """Of a comparison's processes, in their order. [Note: the order]"""
        pairs = []
        own = f"{self.key_of(before)} {self.key_of(after)} {repeat}"
        in_rounds = self._is_in_rounds(before, after, repeat)
        for pair in range(self._pairs):
            names = (
                (f"trial {pair + 1}", f"trial {pair}") if in_rounds else (f"{own} {2 * pair}", f"{own} {2 * pair + 1}")
            )
            both = [(before, names[0]), (after, names[1])]
            pairs += both[::-1] if pair % 2 else both
        return pairs

    def _is_in_rounds(self, before: Options, after: Options, repeat: int) -> bool:
        return repeat == 0 and not self.changes(before) and self.key_of(after) in self._in_rounds

    def _name(self, options: Options, role: str) -> str:
        return f"{self.key_of(options)} {role}"

    def _is_ours(self, record: Record) -> bool:
        return bool(record.config.get("script") == self.command.record.config["script"])

    def _is_spent(self, next_s: float) -> bool:
        """Whether so many seconds, and what is reserved, would end after the budget. The first process always runs."""
        if self._budget_minutes is None or not self._ran:
            return False
        needed_s = next_s + self.reserved * self.comparison_s({})
        return bool(time.monotonic() - self._began_s + needed_s > self._budget_minutes * 60)

    def _processes(
        self, roles: Sequence[tuple[Options, str]], further_s: float = 0.0, *, counts: bool = True
    ) -> list[Record] | None:
        """The records of processes in their roles: an earlier command's, or of those that run now, on disk as each ends.

        None where the budget has no room for them (where this `counts`) and for `further_s` after them.
        """
        missing = [role for role in roles if self._name(*role) not in self._known]
        needed_s = self._expected_s(len(missing)) + further_s
        if missing and (self._dry_run or (counts and self._is_spent(needed_s))):
            return None
        while missing:
            together = missing[: self._room()]
            failed = self._run_together(together)
            if len(together) > 1:  # it may be for what the others took: alone it has the whole machine
                for role in failed:
                    self._run_together([role])
            missing = missing[len(together) :]
        return [self._known[self._name(*role)] for role in roles]

    def _run_together(self, roles: Sequence[tuple[Options, str]]) -> list[tuple[Options, str]]:
        """Run processes that start together. Returns those that failed, whose records are kept only where they ran alone."""
        failed = []
        changes = [self.changes(options) for options, _ in roles]
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="trainstep-") as folder:
            out = [Path(folder) / f"{place}.jsonl" for place in range(len(roles))]
            for place, trouble, kind in self._run(changes, out):
                started_at = datetime.now(UTC).isoformat(timespec="seconds")
                record = self._whole(Store(out[place]).finished(), trouble, kind, changes[place])
                now_s = time.monotonic()
                if record.failure is not None and len(roles) > 1:
                    failed.append(roles[place])
                else:
                    self._keep(record, roles[place], started_at, now_s - began_s)
                began_s = now_s
        return failed

    def _keep(self, record: Record, role: tuple[Options, str], started_at: str, duration_s: float) -> None:
        """Write a process's record. `duration_s`: its share of the time that those took which started together."""
        process = self._name(*role)
        record = replace(
            record,
            key=self.key_of(role[0]),
            started_at=started_at,
            duration_s=round(duration_s, 3),
            facts={**record.facts, **facts_of(process=process, **self._facts)},
        )
        self.store.append(record)
        self._known[process] = record
        self._processes_s.append(record.duration_s)
        self._ran += 1

    def _room(self) -> int:
        """How many processes may live at once, by the memory that the first one took; one before that, and of several ranks."""
        first = next((record for record in self._known.values() if self._is_ours(record) and not record.failure), None)
        if first is None or self.command.ranks > 1:
            return 1
        rooms = [_MOST_TOGETHER]
        if resident_bytes := first.fact("peak_rss_bytes"):
            rooms.append(int(self._here.memory_bytes / 2 // (_ROOM * resident_bytes)))
        if first.config["device"] == "cuda":
            total, held = self._here.gpu_memory_bytes, first.fact("peak_reserved_bytes")
            rooms.append(int(total // (_ROOM * held + _CONTEXT_BYTES)) if total and held else 1)
        return max(1, min(rooms))

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

    def _run(self, changes: Sequence[Mapping[str, str]], out: Sequence[Path]) -> Iterator[tuple[int, str, str]]:
        """Run the script to its last step with each of the changes: place, what went wrong and its kind; both empty if nothing did.

        [Note: the order]
        """
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


def _environment() -> dict[str, str]:
    """This process's environment, with an import path that holds in another folder."""
    path = os.environ.get("PYTHONPATH", "")
    whole = os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep) if entry)
    return {**os.environ, **({"PYTHONPATH": whole} if whole else {})}
