"""Proves the gains that a budget predicts: each change is measured against the original step, then all that helped together.

    predict = predictor(config, calibration, budget.measured_s)
    tried = candidates(budget, config, predict, precisions=["bf16_autocast"])
    proof = prove(start, tried, budget.measured_s, predict, key_of=..., trial=..., compare=..., reserve=...)
    proof.singles[0].measured(proof.measured_s), proof.chosen

The callbacks measure (measure/harness/lab.py); in tests they return given numbers. As in the search of a preset, each change first
gets a trial, whose losses must equal the original's up to rounding (plan/trials.py has the rule). Unlike there, each change is
compared with the original and not with the best so far, because gains were predicted against the original.

[Note: a changed loss] A new precision changes the losses legitimately, and a new batch size trains on other batches, so both are
tried only if the user allows them. With another batch size the original's losses are no reference: the losses must only be finite,
and a combination with that batch size must have the losses of that batch size alone. Steps are then compared by the time per token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.config.parallel import STRATEGY_FIELDS, RanksConfig
from trainstep.config.parsing import CONFIGS, given_values
from trainstep.config.run import RunConfig
from trainstep.config.script import text_of_changes
from trainstep.explain.budget import Budget
from trainstep.explain.changes import changes_of
from trainstep.explain.floor import changed
from trainstep.explain.gain import predicted_gain
from trainstep.explain.proof import (
    AGAIN,
    BATCH,
    BATCH_CAUSE,
    TOGETHER,
    Candidate,
    Proof,
    Tried,
    in_order,
    precision_refusal,
    ratio_of,
)
from trainstep.explain.room import what_fits
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import step_time
from trainstep.plan.trials import (
    BudgetSpent,
    CompareFunction,
    KeyFunction,
    LossCheck,
    Options,
    Reference,
    Step,
    Trial,
    TrialFunction,
    Trials,
)

_UNGRAPHED = "a CPU has no CUDA graphs: a captured step is replayed there operator by operator, and nothing is gained"
_ALWAYS = ("batch_size", "context", "device")
"""Fields that the start's options always name, even at their defaults."""
_ONCE_A_STEP = ("adamw", "capture", "copies", "gc", "pin_memory")
_LAUNCHES = {"compile": "reduce_overhead"}
"""Changes that are taken to save the same time in a step of any batch size, which is a smaller share of a larger step."""
_LEAST_LEFT = 0.005
"""Such a change joins a larger batch only if it saves this share of its step: each may keep the whole from running."""
_NEVER = ("keep_trace", "nvtx", "cold_compile")

Predict = Callable[[Mapping[str, Any]], Interval | None]
"""Fields of a config -> the seconds that the step should gain by them; None without a prediction."""


def start_of(workload: str, config: RanksConfig) -> dict[str, Any]:
    """The explained step as flat options: of bench, or of parallel if the record is of parallel."""
    if workload == "parallel":
        values = given_values(CONFIGS["parallel"], config, always=(*_ALWAYS, "ranks", "sync"))
        return {"workload": "parallel", **{name: value for name, value in values.items() if name not in _NEVER}}
    values = given_values(RunConfig, config.run, always=_ALWAYS)
    return {name: value for name, value in values.items() if name not in _NEVER}


def predictor(config: RanksConfig, calibration: Calibration | None, measured_s: float) -> Predict:
    """A function that predicts a change's gain by plan; it returns None for a machine or model without formulas."""
    try:
        now = None if calibration is None or config.run.device == "cpu" else step_time(config, calibration)
    except ValueError:
        now = None

    def predict(fields: Mapping[str, Any]) -> Interval | None:
        if now is None or calibration is None:
            return None
        after = changed(config, fields, calibration)
        return predicted_gain(
            measured_s, now, after, work=fields.get(BATCH, config.run.batch_size) / config.run.batch_size
        )

    return predict


def candidates(
    budget: Budget,
    config: RanksConfig,
    predict: Predict,
    *,
    precisions: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    gpu_memory_bytes: int | None = None,
) -> list[Candidate]:
    """The changes to try: all that the config does not have, in their order.

    Less recomputation is tried as far as plan says that the step fits `gpu_memory_bytes`, as explain advises it (room.py).

    The change of a finding has the finding's gain. Another change for the same cause has the gain that plan predicts, or the
    finding's gain if plan predicts none. `precisions`, `batch_sizes`: those that the user allows.
    """
    open_findings = [finding for finding in budget.findings if not finding.is_taken]
    gain_by_cause = {finding.cause: finding.gain for finding in open_findings}
    changes = changes_of(config)
    named = [fields.get("precision") for _, fields in changes]
    changes += [
        ("precision", {"precision": name}) for name in precisions if name not in named and name != config.run.precision
    ]
    changes += [(BATCH_CAUSE, {BATCH: size}) for size in batch_sizes if size != config.run.batch_size]
    all_candidates = []
    for cause, change in changes:
        fits, no_room = what_fits(config, gpu_memory_bytes, change)
        fields = fits or change
        own_gain = next((finding.gain for finding in open_findings if finding.change == fields), None)
        gain = own_gain or predict(fields) or (None if BATCH in fields else gain_by_cause.get(cause))
        refusal = _refusal(config, fields, precisions) if fits else no_room
        all_candidates.append(Candidate(fields=fields, cause=cause, gain=gain if fits else None, refusal=refusal))
    return in_order(all_candidates)


def _refusal(config: RanksConfig, fields: Mapping[str, Any], precisions: Sequence[str]) -> str:
    if why := precision_refusal(fields, precisions):
        return why
    if "capture" in fields and config.run.device == "cpu":
        return _UNGRAPHED
    if "attention" in fields or "ops" in fields:
        return "" if hasattr(config.run.model, "d_model") else "a model of your own brings its own attention and ops"
    return ""


def prove(
    start: Options,
    tried: Sequence[Candidate],
    measured_s: float,
    predict: Predict,
    *,
    key_of: KeyFunction,
    trial: TrialFunction,
    compare: CompareFunction,
    reserve: Callable[[int], None],
    announce: Callable[[int, int, Candidate], None] = lambda place, of, candidate: None,
    needs_losses: bool = True,
) -> Proof:
    """Measure the candidates in their order, each against the start, then all that helped together.

    `reserve` is called before each measurement with the number of comparisons for which the budget must still have room
    afterwards, so that the changes that helped are measured together before it ends. `announce` is called for each measured
    candidate, the joined one last, with its place and their number. `needs_losses`: try nothing if the start does not repeat its
    losses.
    """
    return _Prover(start, measured_s, predict, key_of, trial, compare, reserve, needs_losses).run(tried, announce)


class _Prover(Trials):
    def __init__(
        self,
        start: Options,
        measured_s: float,
        predict: Predict,
        key_of: KeyFunction,
        trial: TrialFunction,
        compare: CompareFunction,
        reserve: Callable[[int], None],
        needs_losses: bool,
    ) -> None:
        super().__init__(key_of, trial, compare)
        self.proof = Proof(start=start, measured_s=measured_s)
        self._predict, self._reserve, self._needs_losses = predict, reserve, needs_losses
        self.has_precisions = needs_losses  # a script of the user's own has the precision that it has
        self._names: dict[str, str] = {}
        """Key of options -> the name of the candidate that has them."""
        self._is_ending = False
        """Whether all single changes have been measured."""
        self._count = 0
        """The number of comparisons, including the one of all changes together."""

    def run(self, tried: Sequence[Candidate], announce: Callable[[int, int, Candidate], None]) -> Proof:
        proof, waiting = self.proof, list(tried)
        try:
            self._begin()
            can_run = [candidate for candidate in tried if not self._why_not(candidate)]
            self._count = len(can_run) + 1
            while waiting and not proof.trouble:
                if waiting[0] in can_run:
                    announce(can_run.index(waiting[0]) + 1, self._count, waiting[0])
                proof.singles.append(self._single(waiting[0]))
                waiting.pop(0)
        except BudgetSpent:
            proof.untried += [candidate.name for candidate in waiting if not self._why_not(candidate)]
            proof.singles += [self._not_run(candidate) for candidate in waiting if self._why_not(candidate)]
        self._is_ending = True
        try:
            self._measure_together(announce)
            self._measure_again(announce)
        except BudgetSpent:
            proof.untried.append(
                TOGETHER
                if proof.together is None or proof.together.step.comparison is None
                else f"{proof.unconfirmed[0].candidate.name}, {AGAIN}"
            )
        return proof

    def measured(self, options: Options, repeat: int = 0) -> Any:
        """Measure a trial, if the budget also has room for the comparisons after it; the start's trials reserve no room."""
        self._reserve(0 if self.proof.start_s is None else 1 + self._comparisons_to_come)
        return super().measured(options, repeat)

    def judged(self, name: str, before: Options, after: Options, tried: Any) -> Step:
        """Compare two options, if the budget also has room for the comparison of all changes together."""
        self._reserve(self._comparisons_to_come)
        return super().judged(name, before, after, tried)

    @property
    def _comparisons_to_come(self) -> int:
        """1 if some changes will be compared together at the end, else 0."""
        return int(bool(self.proof.may_join) and not self._is_ending)

    def check_losses(self, tried: Trial, precision: str, reference: Reference) -> LossCheck:
        """Check the losses as in all trials; if the start's losses are no reference, they need only be finite."""
        if self.proof.unchecked and not tried.losses:
            return LossCheck("")
        return super().check_losses(tried, precision, Reference("", ()) if self.proof.unchecked else reference)

    def _begin(self) -> None:
        start, proof = self.proof.start, self.proof
        tried = self.measured(start)
        if tried.failure_kind:
            proof.trouble = tried.message
            return
        self._names[self.key_of(start)] = "the original"
        why = self.repeats(start, tried)
        proof.spread = self.spread
        proof.trouble, proof.unchecked = (why, "") if self._needs_losses else ("", why)
        if not proof.trouble:
            proof.start_s = tried.step_s

    def _why_not(self, candidate: Candidate) -> str:
        """Why the candidate is not measured; empty if it is."""
        return candidate.refusal or self.refusal({**self.proof.start, **candidate.fields})

    def _not_run(self, candidate: Candidate) -> Tried:
        return Tried(candidate=candidate, step=Step(change=candidate.name, reason=self._why_not(candidate)))

    def _single(self, candidate: Candidate) -> Tried:
        if self._why_not(candidate):
            return self._not_run(candidate)
        key = self.key_of({**self.proof.start, **candidate.fields})
        if key in self._names:
            why = f"these are the options of {self._names[key]}"
            return Tried(candidate=candidate, step=Step(change=candidate.name, reason=why))
        self._names[key] = candidate.name
        return Tried(candidate=candidate, step=self._against_start(candidate.name, candidate.fields))

    def _against_start(self, name: str, fields: Mapping[str, Any]) -> Step:
        start = self.proof.start
        reference, work = None, 1.0
        if BATCH in fields:  # [Note: a changed loss]
            work = fields[BATCH] / start[BATCH]
            lone = {**start, BATCH: fields[BATCH]}
            is_lone = len(fields) == 1
            reference = Reference("", ()) if is_lone else self.reference_like(lone, self.measured(lone))
        step, _ = self.attempt(
            name, start, {**start, **fields}, fastest_s=self.proof.start_s, reference=reference, work=work
        )
        return step

    def _measure_together(self, announce: Callable[[int, int, Candidate], None]) -> None:
        """Join the changes that helped or may help, fastest first, as far as a config accepts them; compare with the start.

        If they do not run together, or not with the same losses, the faster half of them is tried, then half of that, and so on.
        """
        proof = self.proof
        whole, refused = self._joined()
        failed: list[tuple[str, str]] = []
        while whole:
            joined, too_little = self._worth_joining(whole)
            fields = {name: value for tried in joined for name, value in tried.candidate.fields.items()}
            candidate = Candidate(fields=fields, gain=self._predict(fields))
            if fields == dict(proof.may_join[0].candidate.fields):
                candidate = proof.may_join[0].candidate
            announce(self._count, self._count, candidate)
            proof.together = Tried(candidate=candidate, step=self._against_start(TOGETHER, fields))
            proof.left_out = [*refused, *too_little, *failed]
            if proof.together.step.comparison is not None or len(joined) == 1:
                return
            kept = (len(joined) + 1) // 2
            why = f"{text_of_changes(fields)}, together: {proof.together.step.word}: {proof.together.step.reason}"
            failed += [(tried.candidate.name, why) for tried in joined[kept:]]
            whole = [tried for tried in whole if tried not in joined[kept:]]

    def _worth_joining(self, whole: Sequence[Tried]) -> tuple[list[Tried], list[tuple[str, str]]]:
        """Those of which a larger batch among them leaves enough, and the others with the reason."""
        sizes = (tried.candidate.fields[BATCH] for tried in whole if BATCH in tried.candidate.fields)
        size = next(sizes, None)
        if size is None:
            return list(whole), []
        work = size / self.proof.start[BATCH]
        little = [tried for tried in whole if _saves_once(tried) and (1 - ratio_of(tried.step)) / work < _LEAST_LEFT]
        why = f"it saves the same time in a step of any batch, less than {100 * _LEAST_LEFT:g} % with {BATCH}={size}"
        return [tried for tried in whole if tried not in little], [(tried.candidate.name, why) for tried in little]

    def _joined(self) -> tuple[list[Tried], list[tuple[str, str]]]:
        """The changes to measure together, the fastest first; and those that are left out, with the reason."""
        start = self.proof.start
        joined: list[Tried] = []
        fields: dict[str, Any] = {}
        whose: dict[str, Tried] = {}
        left_out: list[tuple[str, str]] = []
        for tried in self.proof.may_join:
            more = dict(tried.candidate.fields)
            rivals = [name for name in more if fields.get(name, more[name]) != more[name]]
            if STRATEGY_FIELDS & set(more):  # a strategy and its options are one choice
                rivals += sorted(STRATEGY_FIELDS & set(fields))
            if rivals:
                is_sure = whose[rivals[0]].step.kept and tried.step.kept
                verb = "is" if is_sure else "seems"
                left_out.append(
                    (tried.candidate.name, f"{text_of_changes({rivals[0]: fields[rivals[0]]})} {verb} faster")
                )
            elif why := self.refusal({**start, **fields, **more}):
                left_out.append((tried.candidate.name, f"together with {text_of_changes(fields)} it is refused: {why}"))
            else:
                joined.append(tried)
                fields |= more
                whose |= dict.fromkeys(more, tried)
        return joined, left_out

    def _measure_again(self, announce: Callable[[int, int, Candidate], None]) -> None:
        """If all together are not taken, compare single changes a second time, fastest first, until one is confirmed."""
        proof = self.proof
        if proof.together is None or proof.takes_all:
            return
        for tried in proof.unconfirmed:
            candidate = tried.candidate
            announce(self._count, self._count, candidate)
            proof.again.append(Tried(candidate=candidate, step=self._against_start(AGAIN, candidate.fields)))
            if proof.again[-1].step.kept:
                return


def _saves_once(tried: Tried) -> bool:
    """Whether a change saves the same time in a step of any batch size."""
    fields = tried.candidate.fields.items()
    return all(name in _ONCE_A_STEP or _LAUNCHES.get(name) == value for name, value in fields)
