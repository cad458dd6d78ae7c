"""Compares a user's script with itself under changes from outside, for a proof.

    command = command_of(record)                    # script_command.py
    lab = ScriptLab(store, command, steps=40, ...)
    lab.measure_in_rounds([{"adamw": "fused"}, {"workers": "8"}])
    lab.trial({}, 0), lab.compare({}, {"adamw": "fused"}, 0)

The lab has the callbacks of plan/trials.py for a script, on processes that have one window or several (script_processes.py).

[Note: the order] In a round the original and each change have one window each; the next round has the opposite order. Where a
process may have several windows, the first two rounds share processes. All later rounds, of the changes that may still help, share
processes too. Where a process has one window, as many of the later rounds start together as have room. A change's pairs are its
windows and the original's in the same rounds. All changes that have room at once share the original's windows; the rounds of the
other changes follow, with an original of their own. If a killed command left a round incomplete, the changes that lack it begin a
new attempt, with the original again, so that a round's pair never comes from two commands. A comparison outside the rounds has the
order a b b a a b b a, each in a process of its own, and its first two pairs are the trial; after a kill it continues with the
process that was running. The interval is Student's over the pairs, as in every comparison of fresh processes (records/compare.py).
Windows that share processes do not show how processes differ, so the changes that are kept in the end are compared in fresh
processes.

[Note: futility] A change is given up after the first two pairs if it was faster by the least gain in neither. The least gain is
2 %, or 1 % where processes have several windows, which cost seconds and differ by half a per cent. A batch size is given up too if
another batch size was faster by more than 2 % in both pairs: only one of them can be taken, and no losses decide between them.
The rule loses changes of a few per cent on a noisy machine, and never invents one: the verdict `faster` always has all pairs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from trainstep.config.script import text_of_changes
from trainstep.measure.run.changed.script_command import ScriptCommand
from trainstep.measure.run.changed.script_processes import Role, ScriptProcesses
from trainstep.plan.trials import Options, Trial
from trainstep.records.compare import MINIMUM_PAIRS, Comparison, compare_samples
from trainstep.records.record import Record, Samples
from trainstep.records.store import Store

FEWEST_PAIRS = MINIMUM_PAIRS + 1
"""An even number, so that both orders are equally frequent."""
_TRIED_PAIRS = 2
_LEAST_GAIN, _LEAST_GAIN_SHARED = 0.02, 0.01
"""The least gain where processes have one window, and where they have several. [Note: futility]"""
_CLEARLY = 1.05
"""A round decides which changes give way, if one takes so many times the original's time and another so many times less."""
_ORIGINAL = "the original"
_FUTILE = "not {least:.0f} % faster in either of the first {pairs} pairs, so it was not compared further"


class ScriptLab(ScriptProcesses):
    """Measures what the store lacks until the budget is spent, and nothing in a dry run, as measure/harness/lab.py does."""

    def __init__(
        self, store: Store, command: ScriptCommand, *, pairs: int, say: Callable[[str], None], **options: Any
    ) -> None:
        """`options`: those of ScriptProcesses. ValueError for too few pairs."""
        if pairs < MINIMUM_PAIRS:
            raise ValueError(
                f"processes: an interval needs at least {MINIMUM_PAIRS} processes a side of a script, not {pairs}"
            )
        super().__init__(store, command, pairs=pairs, **options)
        self._say = say
        self._in_rounds: dict[str, Options] = {}
        """Key -> change, for the changes that are measured in rounds."""
        self._gave_way: set[str] = set()
        """Names of the changes whose further rounds went to others, as they had lost the first."""
        self.cut_off: list[str] = []
        """Names of the changes that had only some of their rounds when the budget ended."""

    def comparison_s(self, _: Options) -> float:
        """About how many seconds the last comparison takes: half of its windows take as long as those of its slowest change."""
        every = self._in_rounds.values()
        measured = [options for options in every if self._ratios(options)]  # without what failed
        may_join = [options for options in measured or every if not self._given_up(options)]
        slowest = max(may_join, key=self._turn_s, default=self.start)
        return self._expected_s([self.start, slowest] * self._pairs)

    def first(self) -> Record | None:
        """The original's first process; None in a dry run that has none yet."""
        records = self._processes([(self.start, "trial 0")], counts=False)
        return None if records is None else records[0]

    def measure_in_rounds(self, tried: Sequence[Options]) -> None:
        """Measure these changes against the original, all in each round, within the budget. `trial` and `compare` find them then.

        [Note: the budget] While two changes may help, the budget keeps room for one last comparison, of all changes that helped
        together. If it lacks room for both that comparison and further rounds of all changes that may help, the rounds end after
        the first two and the comparison decides: it has all of its pairs, in fresh processes, which is worth more than one change
        with all of its rounds. Where the first two rounds do not start together, what clearly lost the first gives way
        to what clearly gained, if time is short: losers would take the windows that a verdict of the others needs.
        """
        self._in_rounds = {self.key_of(options): options for options in tried}
        left, pair = list(tried), 0
        while pair < self._pairs:
            if pair >= _TRIED_PAIRS:
                left = [options for options in left if not self._given_up(options)]
            elif pair:
                left = self._without_losers(left, pair)
            to_come = self._coming(left, pair)
            has_room = self._affordable(left, to_come)
            if pair >= _TRIED_PAIRS and len(has_room) < len(left) and self._can_end_together(left):
                break  # [Note: the budget]
            left = has_room
            if not left:
                break
            known = len(self._known)
            if not all(self._measure_rounds(part, to_come) for part in self._parts(left)):
                break
            left = [options for options in left if not self._trouble(options) and self._ratios(options)]
            if len(self._known) > known:
                for each in to_come:
                    self._say(f"round {each + 1} of {self._pairs}: {self._ratio_words(left, each)}")
            pair += len(to_come)
        # A change that had no round for lack of time is compared with an original of its own if time is left after all
        for key in [key for key, options in self._in_rounds.items() if not self._has_round(options, 0)]:
            del self._in_rounds[key]

    def _coming(self, left: Sequence[Options], pair: int) -> range:
        """The rounds from `pair` on whose processes start together."""
        end = _TRIED_PAIRS if pair < _TRIED_PAIRS else self._pairs
        if self.may_share:
            return range(pair, end)
        count = 1
        while pair >= _TRIED_PAIRS and pair + count < end and self._have_room([self.start, *left] * (count + 1)):
            count += 1
        return range(pair, pair + count)

    def _parts(self, left: Sequence[Options]) -> list[list[Options]]:
        """The changes, split into parts that each have room beside an original."""
        parts: list[list[Options]] = []
        for options in left:
            if not parts or (self.may_share and not self._have_room([self.start, *parts[-1], options])):
                parts.append([])
            parts[-1].append(options)
        return parts

    def _measure_rounds(self, part: Sequence[Options], rounds: Sequence[int]) -> bool:
        """Measure the windows that these rounds still lack. False if no process may run, or no longer."""
        roles = [role for each in rounds for role in self._lacking(part, each)]
        shared = self.may_share and self._have_room([self.start, *part])
        return self._processes(roles, counts=False, shared=shared) is not None

    def _lacking(self, left: Sequence[Options], pair: int) -> list[Role]:
        """The roles that a round of these still lacks: the original's, and that of each change without a pair. [Note: the order]"""
        lacking = [options for options in left if not self._has_round(options, pair)]
        attempt = self._next_attempt(pair)
        roles = [self._of_round(options, pair, attempt) for options in (self.start, *lacking)] if lacking else []
        return roles[::-1] if pair % 2 else roles

    def _trouble(self, options: Options) -> str:
        tried = self.trial(options, 0)
        return "" if tried is None else tried.failure_kind

    def _ratios(self, options: Options) -> list[float]:
        """The change's time over the original's, in each round so far."""
        ratios = []
        for pair in range(self._pairs):
            before, after = (self._known.get(self._name(*role)) for role in self._in_round(options, pair))
            if before is None or after is None or not before.samples or not after.samples:
                break
            ratios.append(after.samples["step"].values[0] / before.samples["step"].values[0] / self._work(options))
        return ratios

    def _of_round(self, options: Options, pair: int, attempt: int) -> Role:
        """The role of a window in a round. The original's first trial is not part of a round. [Note: the order]"""
        number = pair if self.changes(options) else pair + 1
        return options, f"trial {number}" + (f" attempt {attempt}" if attempt else "")

    def _in_round(self, options: Options, pair: int) -> tuple[Role, Role]:
        """The roles of the original and of the change in a round: in the attempt that measured both, else in the next attempt."""
        coming = self._next_attempt(pair)
        for attempt in range(coming, -1, -1):
            both = self._of_round(self.start, pair, attempt), self._of_round(options, pair, attempt)
            if all(self._name(*role) in self._known for role in both):
                return both
        return self._of_round(self.start, pair, coming), self._of_round(options, pair, coming)

    def _has_round(self, options: Options, pair: int) -> bool:
        return all(self._name(*role) in self._known for role in self._in_round(options, pair))

    def _next_attempt(self, pair: int) -> int:
        """The number of the first attempt at a round that has no record yet."""
        attempt, taking_part = 0, (self.start, *self._in_rounds.values())
        while any(self._name(*self._of_round(options, pair, attempt)) in self._known for options in taking_part):
            attempt += 1
        return attempt

    def _given_up(self, options: Options) -> str:
        """Why the change has no further rounds after the first two; empty if it has. [Note: futility]"""
        ratios = self._ratios(options)[:_TRIED_PAIRS]
        if len(ratios) < _TRIED_PAIRS:
            return ""
        if self._is_futile(ratios, self._least_gain):
            return _FUTILE.format(least=100 * self._least_gain, pairs=_TRIED_PAIRS)
        sizes = [each for each in self._in_rounds.values() if self.changes(each).keys() == {"batch_size"}]
        for rival in sizes if options in sizes else ():
            others = self._ratios(rival)[:_TRIED_PAIRS]
            is_faster = len(others) == _TRIED_PAIRS and max(others) * (1 + _LEAST_GAIN) < min(ratios)
            if is_faster and not self._trouble(rival) and self._failure_in(self._roles(self.start, rival, 0)) is None:
                faster = text_of_changes(self.changes(rival))
                return f"{faster} was faster in the first {_TRIED_PAIRS} rounds, so it was not compared further"
        return ""

    def _affordable(self, left: Sequence[Options], rounds: Sequence[int]) -> list[Options]:
        """The fastest of these, as many as the budget has room for."""
        best = sorted(left, key=lambda options: fmean(self._ratios(options) or [1.0]))
        while best:
            missing = [options for each in rounds for options, _ in self._lacking(best, each)]
            together_s = self.comparison_s({}) if self._may_join(best) else 0.0
            if not missing or not self._is_spent(self._expected_s(missing, shared=self.may_share) + together_s):
                break
            best.pop()
        return [options for options in left if options in best]

    def _without_losers(self, left: Sequence[Options], pair: int) -> list[Options]:
        """Without the changes that clearly lost so far, if others clearly gained and time is short. [Note: the budget]"""
        ratios = {self.key_of(options): self._ratios(options) for options in left}
        losers = [options for options in left if min(ratios[self.key_of(options)], default=1.0) > _CLEARLY]
        winners = [options for options in left if max(ratios[self.key_of(options)], default=1.0) < 1 / _CLEARLY]
        if not losers or not winners:
            return list(left)
        missing = self._lacking(left, pair)
        missing += [role for later in range(pair + 1, self._pairs) for role in self._lacking(winners, later)]
        if not self._is_spent(self._expected_s([options for options, _ in missing]) + self.comparison_s({})):
            return list(left)
        names = [", ".join(text_of_changes(self.changes(options)) for options in group) for group in (losers, winners)]
        self._say("time is short: no further rounds now of {}, slower in the first, as {} gained in it".format(*names))
        self._gave_way |= {text_of_changes(self.changes(options)) for options in losers}
        return [options for options in left if options not in losers]

    def _can_end_together(self, left: Sequence[Options]) -> bool:
        """Whether two of these may help, and there is time to compare them together."""
        return self._may_join(left) and not self._is_spent(self.comparison_s({}))

    def _may_join(self, left: Sequence[Options]) -> bool:
        """Whether two of these, not two values of one change, may help, so that they are compared together in the end."""
        helping = (options for options in left if not self._is_futile(self._ratios(options), self._least_gain))
        return len({frozenset(self.changes(options)) for options in helping}) > 1

    @property
    def _least_gain(self) -> float:
        return _LEAST_GAIN_SHARED if self.may_share else _LEAST_GAIN

    def _is_futile(self, ratios: Sequence[float], least: float) -> bool:
        return min(ratios, default=0.0) > 1 / (1 + least)

    def _ratio_words(self, left: Sequence[Options], pair: int) -> str:
        known = [(options, self._ratios(options)) for options in left]
        words = [
            f"{text_of_changes(self.changes(options))} {ratios[pair]:.3f}"
            for options, ratios in known
            if len(ratios) > pair
        ]
        return f"{', '.join(words) or 'no change'} of the original's time"

    def trial(self, options: Options, repeat: int) -> Trial | None:
        """The process of a trial, which runs if there is no record of it (`_trial_record`).

        A change that found nothing to change counts as failed.
        """
        record = self._trial_record(options, repeat)
        if record is None:
            return None
        if failure := record.failure:
            return Trial(failure_kind=failure.kind, phase=failure.phase, message=failure.message)
        if self.changes(options) and (why := record.fact("not_applied")):
            return Trial(failure_kind="not applied", phase="build", message=f"it found nothing to change: {why}")
        batch_size = self.changes(options).get("batch_size")
        if batch_size is not None and str(record.fact("loader_batch_size")) != batch_size:
            why = f"the script reads batches of {record.fact('loader_batch_size')}, not of {batch_size}"
            return Trial(failure_kind="not applied", phase="build", message=f"it found nothing to change: {why}")
        if "compile" in self.changes(options) and not record.fact("compiled_graphs"):
            return Trial(failure_kind="not applied", phase="build", message="torch.compile found nothing to compile")
        # A process's later windows repeat the losses of its first ten steps, so they do not count as another run.
        firsts = (known for known in self._known.values() if known.fact("timed_windows", 1) == 1)
        alike = [known for known in firsts if known.key == record.key and known is not record]
        others = tuple(losses for losses in map(_losses, alike) if losses and None not in losses)
        return Trial(losses=_losses(record), others=others, step_s=record.samples["step"].values[0])

    def _trial_record(self, options: Options, repeat: int) -> Record | None:
        """The record of a trial. What has no rounds is tried in the first pairs of its comparison with the original.

        So these pairs, which start together where they have room, are the trial's start as well.
        """
        if not self.changes(options) or self._is_in_rounds(self.start, options, 0):
            role = self._in_round(options, repeat)[1] if self.changes(options) else (options, f"trial {repeat}")
            records = self._processes([role])
            return None if records is None else records[0]
        roles = self._roles(self.start, options, 0)[: 2 * _TRIED_PAIRS]
        role = roles[1 + repeat]  # the second pair has the opposite order
        if not self._have_room([each for each, _ in roles]):
            roles = roles[2 * repeat :][:2]
        left = [each for each, name in roles if self._name(each, name) not in self._known]
        if left and self._is_spent(0.0 if self.reserved else self._expected_s(left)):  # what is reserved has their time
            return None
        records = self._processes(roles, counts=False)
        return None if records is None else records[roles.index(role)]

    def compare(self, before: Options, after: Options, repeat: int) -> Comparison | None:
        """Compare pairs of processes, or earlier commands' records of them. [Note: the order]"""
        name = text_of_changes(self.changes(after))
        roles = self._roles(before, after, repeat)
        if failed := self._failure_in(roles):
            return failed
        left = [role for role in roles if self._name(*role) not in self._known]
        in_rounds = self._is_in_rounds(before, after, repeat)
        if left and (self._dry_run or in_rounds or self._is_spent(self._expected_s([options for options, _ in left]))):
            # Processes that would run now cannot be paired with the originals of rounds that are over
            if in_rounds and (why := self._given_up(after)):
                return _ended(why, self._ratios(after)[:_TRIED_PAIRS])
            return self._cut_off(name, self._ratios(after) if in_rounds else ())
        ratios: list[float] = []
        times_s: tuple[list[float], list[float]] = ([], [])
        tried = 0 if repeat else 2 * _TRIED_PAIRS  # a change that helped once is not given up early: all start together
        for part in (roles[:tried], roles[tried:]):
            records = self._processes(part, counts=False)
            if records is None:
                return None
            if failed := self._failure_in(part):
                return failed
            for first, second in zip(records[::2], records[1::2], strict=True):
                pair = (second, first) if len(ratios) % 2 else (first, second)
                for side, record, options in zip(times_s, pair, (before, after), strict=True):
                    side.append(record.samples["step"].values[0] / self._work(options))
                ratios.append(times_s[1][-1] / times_s[0][-1])
                if left:
                    self._say(f"{name}: pair {len(ratios)} of {self._pairs}: {ratios[-1]:.3f} of the original's time")
            least = self._least_gain if in_rounds else _LEAST_GAIN
            if tried and len(ratios) == _TRIED_PAIRS and self._is_futile(ratios, least):
                return _ended(_FUTILE.format(least=100 * least, pairs=_TRIED_PAIRS), ratios)
        a, b = (Samples(unit="s", values=tuple(values)) for values in times_s)
        comparison = compare_samples(a, b, process_steps=(1, 1))
        reason = comparison.reason.replace("pairs of processes", "rounds") if in_rounds else comparison.reason
        comparison = replace(comparison, reason=reason, quantity="step", interleaving="rounds")
        self._say(f"{name}: {comparison.reason}")
        return comparison

    def _failure_in(self, roles: Sequence[Role]) -> Comparison | None:
        """The result of a comparison if one of its processes is known to have failed; None if none has."""
        for options, role in roles:
            known = self._known.get(self._name(options, role))
            if known is not None and not known.samples:
                who = text_of_changes(self.changes(options)) or _ORIGINAL
                failed = known.failure and f"failed: {known.failure.message}"
                why = failed or "found nothing to change in another process"
                return Comparison(verdict="cannot tell", reason=f"{who} {why}")
        return None

    def _cut_off(self, name: str, ratios: Sequence[float]) -> Comparison | None:
        """The result of a comparison whose rounds the budget ended, so that those of other changes count; None without a round."""
        if not ratios:
            return None
        self.cut_off.append(name)
        reason = f"the budget had room for {len(ratios)} of {self._pairs} rounds"
        if name in self._gave_way:
            reason = f"slower in the first of {self._pairs} rounds, it gave way to changes that gained"
        return _ended(reason, ratios, is_cut_off=True)

    def _roles(self, before: Options, after: Options, repeat: int) -> list[Role]:
        """The processes of a comparison, in their order. [Note: the order]"""
        pairs: list[Role] = []
        own = f"{self.key_of(before)} {self.key_of(after)} {repeat}"
        in_rounds = self._is_in_rounds(before, after, repeat)
        for pair in range(self._pairs):
            apart = (before, f"{own} {2 * pair}"), (after, f"{own} {2 * pair + 1}")
            both = self._in_round(after, pair) if in_rounds else apart
            pairs += both[::-1] if pair % 2 else both
        return pairs

    def _is_in_rounds(self, before: Options, after: Options, repeat: int) -> bool:
        return repeat == 0 and not self.changes(before) and self.key_of(after) in self._in_rounds


def _losses(record: Record) -> tuple[Any, ...]:
    return tuple(record.tables["losses"]["loss"]) if "losses" in record.tables else ()


def _ended(reason: str, ratios: Sequence[float], *, is_cut_off: bool = False) -> Comparison:
    """The result of a comparison that ended before it had all of its pairs."""
    ratio = math.exp(fmean(map(math.log, ratios)))
    return Comparison(
        verdict="cannot tell",
        reason=f"{reason} (ratio {ratio:.3f})",
        quantity="step",
        ratio=ratio,
        each=tuple(ratios),
        n=len(ratios),
        paired=True,
        is_cut_off=is_cut_off,
    )
