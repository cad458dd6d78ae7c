"""Grades predicted peaks against the peaks of records.

    grades, refusals = grade_records(records)
    grades[0].allocated_error      # predicted / measured - 1

Each different cell is graded once, by its latest record. A record with a failure, on a CPU, or without the allocator's peaks
is left out; one for which there are no formulas is a refusal with its reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.plan.cell_config import ranks_config
from trainstep.plan.live_tensors import CATEGORIES
from trainstep.plan.step_memory import replay
from trainstep.plan.step_replay import StepMemory
from trainstep.records.record import Record


@dataclass(frozen=True, kw_only=True)
class TermError:
    """A category of a ledger at a moment."""

    moment: str
    term: str
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, kw_only=True)
class Grade:
    """A cell with its predicted and its measured peaks."""

    record: Record
    config: RanksConfig
    memory: StepMemory
    allocated_bytes: int
    reserved_bytes: int
    terms: tuple[TermError, ...] = ()

    @property
    def allocated_error(self) -> float:
        return self.memory.peak.allocated_bytes / self.allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        return self.memory.peak.reserved_bytes / self.reserved_bytes - 1


def grade_records(records: Iterable[Record]) -> tuple[list[Grade], dict[str, int]]:
    """The grades in the records' order, and the reasons why there is none -> number of cells."""
    latest = {record.key: record for record in records if _is_measured(record)}
    grades, refusals = list[Grade](), Counter[str]()
    for record in latest.values():
        try:
            config = ranks_config(record)
            memory = replay(config)
        except ValueError as error:
            refusals[str(error)] += 1
            continue
        grades.append(
            Grade(
                record=record,
                config=config,
                memory=memory,
                allocated_bytes=record.fact("peak_allocated_bytes"),
                reserved_bytes=record.fact("peak_reserved_bytes"),
                terms=tuple(_term_errors(record, memory)),
            )
        )
    return grades, dict(refusals)


def _is_measured(record: Record) -> bool:
    facts = ("peak_allocated_bytes", "peak_reserved_bytes")
    return record.failure is None and record.config.get("device") == "cuda" and all(record.fact(name) for name in facts)


_LEDGER = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "activations": "activations",
    "autocast weight copies": "autocast weight copies",
    "logits and loss": "logits and loss",
    "workspaces": "workspaces",
}
"""Category of the replay -> line of a ledger, where both mean the same."""


def _term_errors(record: Record, memory: StepMemory) -> Iterable[TermError]:
    """The categories of a ledger at its moments. A forward without gradients keeps nothing, so its ledger has other categories."""
    if record.config.get("mode") == "forward_no_grad":
        return
    ledger: Mapping[str, Any] = record.tables.get("ledger", {})
    moments = {moment.name: moment for moment in memory.moments} | {"peak": memory.peak}
    for moment, predicted in moments.items():
        if moment not in ledger:
            continue
        measured = dict(zip(ledger["line"], ledger[moment], strict=True))
        for category in CATEGORIES:
            line = _LEDGER.get(category)
            if line in measured and (measured[line] or predicted.categories[category]):
                yield TermError(
                    moment=moment,
                    term=category,
                    predicted_bytes=predicted.categories[category],
                    measured_bytes=measured[line] or 0,
                )
