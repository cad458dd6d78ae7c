"""Proves the gains that a budget predicts: each change is measured against the original step, then all that helped together.

    predict = predictor(config, calibration, budget.measured_s)
    tried = candidates(budget, config, predict, precisions=["bf16_autocast"])
    proof = prove(start, tried, budget.measured_s, predict, key_of=..., trial=..., compare=..., reserve=...)
    proof.singles[0].measured(proof.measured_s), proof.chosen

The callbacks measure (measure/harness/lab.py); tests give them numbers. As in the search of a preset, a change costs a trial first,
whose losses must be the original's but for rounding (plan/trials.py has the rule). Unlike there, each change is compared with the
original and not with the best so far, because that is what was predicted.

[Note: a changed loss] A change of precision moves the losses lawfully, and one of the batch trains on other batches, so both are
tried only if the user allows them. With another batch size the losses of the original say nothing: they must be finite, and what is
combined with that batch must have the losses of that batch alone. Its step is compared by the time per token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.config.parallel import STRATEGY_FIELDS, RanksConfig
from trainstep.config.parsing import CONFIGS, given_values
from trainstep.config.run import RunConfig
from trainstep.explain.budget import Budget
from trainstep.explain.changes import changes_of
from trainstep.explain.floor import changed
from trainstep.explain.gain import predicted_gain
from trainstep.explain.proof import AGAIN, TOGETHER, Candidate, Proof, Tried
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
    name_of,
)

_BATCH = "batch_size"
_BATCH_CAUSE = "matmul_shapes"  # its page advises more tokens in a batch
_UNGRAPHED = "a CPU has no CUDA graphs: a captured step is replayed there operator by operator, and nothing is gained"
_ALWAYS = ("batch_size", "context", "device")
"""Fields that the start names even where they are defaults."""
_NEVER = ("keep_trace", "nvtx", "cold_compile")

Predict = Callable[[Mapping[str, Any]], Interval | None]
"""Fields of a config -> the seconds that the step should gain by them; None where nobody predicts them."""


def start_of(workload: str, config: RanksConfig) -> dict[str, Any]:
    """The flat options that describe the explained step again, for bench, or for parallel where it is of several ranks."""
    if workload == "parallel":
        values = given_values(CONFIGS["parallel"], config, always=(*_ALWAYS, "ranks", "sync"))
        return {"workload": "parallel", **{name: value for name, value in values.items() if name not in _NEVER}}
    values = given_values(RunConfig, config.run, always=_ALWAYS)
    return {name: value for name, value in values.items() if name not in _NEVER}


def predictor(config: RanksConfig, calibration: Calibration | None, measured_s: float) -> Predict:
    """Predicts by plan's step of the changed config; of a machine or model without formulas nothing."""
    try:
        now = None if calibration is None or config.run.device == "cpu" else step_time(config, calibration)
    except ValueError:
        now = None

    def predict(fields: Mapping[str, Any]) -> Interval | None:
        if now is None or calibration is None:
            return None
        after = changed(config, fields, calibration)
        return predicted_gain(
            measured_s, now, after, work=fields.get(_BATCH, config.run.batch_size) / config.run.batch_size
        )

    return predict


def candidates(
    budget: Budget,
    config: RanksConfig,
    predict: Predict,
    *,
    precisions: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
) -> list[Candidate]:
    """What is tried: every change that the config has not taken, the largest predicted gain first, those that are not last.

    A finding's change gains what the budget says of it. Another of its cause gains what plan predicts, or, where that predicts
    nothing, as much. `precisions`, `batch_sizes`: those that the user allows.
    """
    open_findings = [finding for finding in budget.findings if not finding.is_taken]
    known = {finding.cause: finding.gain for finding in open_findings}
    changes = changes_of(config)
    named = [fields.get("precision") for _, fields in changes]
    changes += [
        ("precision", {"precision": name}) for name in precisions if name not in named and name != config.run.precision
    ]
    changes += [(_BATCH_CAUSE, {_BATCH: size}) for size in batch_sizes if size != config.run.batch_size]
    found = []
    for cause, fields in changes:
        said = next((finding.gain for finding in open_findings if finding.change == fields), None)
        gain = said or predict(fields) or (None if _BATCH in fields else known.get(cause))
        found.append(Candidate(fields=fields, cause=cause, gain=gain, refusal=_refusal(config, fields, precisions)))

    def order(candidate: Candidate) -> tuple[bool, bool, float]:
        gain = candidate.gain
        return bool(candidate.refusal), gain is None, -gain.time_s if gain else 0.0

    return sorted(found, key=order)


def _refusal(config: RanksConfig, fields: Mapping[str, Any], precisions: Sequence[str]) -> str:
    precision = fields.get("precision")
    if precision is not None and precision not in precisions:
        return f"it changes the losses: --allow-precision {precision} allows it"
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
    said: Callable[[int, int, Candidate], None] = lambda place, of, candidate: None,
    needs_losses: bool = True,
) -> Proof:
    """Measure the candidates in their order, each against the start, then all that helped together.

    `reserve`: is told for how many comparisons the budget must have room after the next measurement, so that what helped is
    measured together before the budget ends. `said`: is told of each candidate that is measured, the joined one last,
    with its place and their number. `needs_losses`: nothing is tried where the start does not repeat its losses.
    """
    return _Prover(start, measured_s, predict, key_of, trial, compare, reserve, needs_losses).run(tried, said)


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
        self._names: dict[str, str] = {}
        """Key -> the candidate that has these options."""
        self._is_ending = False
        """Whether what is measured alone is over."""
        self._count = 0
        """How many comparisons there will be, with the one of all together."""

    def run(self, tried: Sequence[Candidate], said: Callable[[int, int, Candidate], None]) -> Proof:
        proof, waiting = self.proof, list(tried)
        try:
            self._begin()
            can_run = [candidate for candidate in tried if not self._why_not(candidate)]
            self._count = len(can_run) + 1
            while waiting and not proof.trouble:
                if waiting[0] in can_run:
                    said(can_run.index(waiting[0]) + 1, self._count, waiting[0])
                proof.singles.append(self._single(waiting[0]))
                waiting.pop(0)
        except BudgetSpent:
            proof.untried += [candidate.name for candidate in waiting if not self._why_not(candidate)]
            proof.singles += [self._not_run(candidate) for candidate in waiting if self._why_not(candidate)]
        self._is_ending = True
        try:
            self._measure_together(said)
            self._measure_again(said)
        except BudgetSpent:
            proof.untried.append(
                TOGETHER if proof.together is None else f"{proof.unconfirmed[0].candidate.name}, {AGAIN}"
            )
        return proof

    def measured(self, options: Options, repeat: int = 0) -> Any:
        """The trial, if the budget has room for what it leads to, too; those of the start lead to everything."""
        self._reserve(0 if self.proof.start_s is None else 1 + self._comparisons_to_come)
        return super().measured(options, repeat)

    def judged(self, name: str, before: Options, after: Options, tried: Any) -> Step:
        """The comparison, if the budget has room for the one of all changes together, too."""
        self._reserve(self._comparisons_to_come)
        return super().judged(name, before, after, tried)

    @property
    def _comparisons_to_come(self) -> int:
        """1 while something may be joined in the end."""
        return int(bool(self.proof.may_join) and not self._is_ending)

    def check_losses(self, tried: Trial, precision: str, reference: Reference) -> LossCheck:
        """As of all trials; where the start's tell nothing, they need only be finite."""
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
        if _BATCH in fields:  # [Note: a changed loss]
            work = fields[_BATCH] / start[_BATCH]
            lone = {**start, _BATCH: fields[_BATCH]}
            is_lone = len(fields) == 1
            reference = Reference("", ()) if is_lone else self.reference_like(lone, self.measured(lone))
        step, _ = self.attempt(
            name, start, {**start, **fields}, fastest_s=self.proof.start_s, reference=reference, work=work
        )
        return step

    def _measure_together(self, said: Callable[[int, int, Candidate], None]) -> None:
        """Join what helped or may, the fastest first, as far as a config takes it, and compare that with the start."""
        proof = self.proof
        fields: dict[str, Any] = {}
        whose: dict[str, Tried] = {}
        left_out: list[tuple[str, str]] = []
        for tried in proof.may_join:
            more = dict(tried.candidate.fields)
            rivals = [name for name in more if fields.get(name, more[name]) != more[name]]
            if STRATEGY_FIELDS & set(more):  # a strategy and its options are one choice
                rivals += sorted(STRATEGY_FIELDS & set(fields))
            if rivals:
                is_sure = whose[rivals[0]].step.kept and tried.step.kept
                verb = "is" if is_sure else "seems"
                left_out.append((tried.candidate.name, f"{name_of({rivals[0]: fields[rivals[0]]})} {verb} faster"))
            elif why := self.refusal({**proof.start, **fields, **more}):
                left_out.append((tried.candidate.name, f"beside {name_of(fields)} it is refused: {why}"))
            else:
                fields |= more
                whose |= dict.fromkeys(more, tried)
        if fields:
            candidate = Candidate(fields=fields, gain=self._predict(fields))
            if fields == dict(proof.may_join[0].candidate.fields):
                candidate = proof.may_join[0].candidate
            said(self._count, self._count, candidate)
            proof.together = Tried(candidate=candidate, step=self._against_start(TOGETHER, fields))
            proof.left_out += left_out

    def _measure_again(self, said: Callable[[int, int, Candidate], None]) -> None:
        """Compare the fastest alone a second time, then the next, until one is confirmed; where all together are not taken."""
        proof = self.proof
        if proof.together is None or proof.takes_all:
            return
        for tried in proof.unconfirmed:
            candidate = tried.candidate
            said(self._count, self._count, candidate)
            proof.again.append(Tried(candidate=candidate, step=self._against_start(AGAIN, candidate.fields)))
            if proof.again[-1].step.kept:
                return
