"""Writes what a watch sees as records, one for each window of steps, so that a kill loses seconds and not the run.

    recording = Recording(identity, environment, Store(path))
    recording.add(StepTimes(...))                     # each step
    recording.write(facts, tables)                    # the steps since the last record

Records of a run share `config.run`; `config.first_step` tells them apart. A record has a value for each of its steps in each of its
samples: `step`, the parts of config/script.py, `garbage_collection`, and on a GPU `device_forward`, `device_backward` and
`device_optimizer`. The first steps of a run are warm-ups, and inspected steps have no values.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from trainstep.config.parsing import config_hash, to_plain
from trainstep.config.script import Part, ScriptConfig
from trainstep.measure.run.script import ending_words
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Environment, Record, Samples
from trainstep.records.store import Store

WARMUPS = 3
"""The first steps allocate, load kernels and make the optimizer's state."""
_DIGITS = 9


class StepTimes(NamedTuple):
    """The times of one step, as the clocks of the host give them; they become seconds where somebody reads them."""

    step_ns: int
    parts_ns: Mapping[Part, int]
    collection_ns: int
    device_s: Mapping[Part, float] = MappingProxyType({})
    """On the GPU, by part; empty on a CPU."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.step_ns / 1e9

    @property
    def parts_s(self) -> dict[Part, float]:
        """Part -> seconds on the host."""
        return {part: spent / 1e9 for part, spent in self.parts_ns.items()}

    def values(self) -> dict[str, float]:
        """Sample -> value."""
        values = {"step": self.step_s, **{part.value: seconds for part, seconds in self.parts_s.items()}}
        device = {f"device_{part.value}": seconds for part, seconds in self.device_s.items()}
        return values | {"garbage_collection": self.collection_ns / 1e9} | device


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a script ended, in words: `finished`, `exit code 3`, `interrupted`, `RuntimeError: ...`."""

    words: str


def ended_by(error: BaseException) -> Ending:
    """The ending of a script that raised an error."""
    return Ending(words=ending_words(error))


class Recording:
    """The records of one run. `first_step`: the first step of the next record."""

    def __init__(
        self,
        identity: ScriptConfig,
        environment: Environment,
        store: Store,
        command: str | None,
        facts: Mapping[str, Fact] = MappingProxyType({}),
    ) -> None:
        """`facts`: added to every record."""
        self.identity = identity
        self.store = store
        self.written = 0
        self._environment = environment
        self._facts = {**facts_of(command=command), **facts}
        self._steps: list[StepTimes] = []
        self._warmups: list[StepTimes] = []
        self._start_record()

    def add(self, times: StepTimes, *, warmup: bool) -> None:
        """Add the times of a step that has ended."""
        (self._warmups if warmup else self._steps).append(times)

    def write(
        self, facts: Mapping[str, Fact], tables: Mapping[str, Mapping[str, Sequence[Any]]], *, next_step: int
    ) -> Sequence[StepTimes]:
        """Write and return the steps since the last record. ValueError if the record cannot be written: the steps are lost."""
        steps, warmups = self._steps, self._warmups
        config = dataclasses.replace(self.identity, first_step=self._first_step)
        plain = to_plain(config)
        record = Record(
            workload="run",
            key=config_hash("run", plain),
            config=plain,
            environment=self._environment,
            started_at=self._started_at,
            duration_s=round(time.monotonic() - self._started_s, 3),
            samples=_samples(steps, warmups),
            facts={**self._facts, **facts},
            tables=tables,
        )
        self._start_record(next_step)
        self.store.append(record)
        self.written += 1
        return [*warmups, *steps]

    def _start_record(self, first_step: int = 1) -> None:
        self._first_step = first_step
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._started_s = time.monotonic()
        self._steps, self._warmups = [], []


def _samples(steps: Sequence[StepTimes], warmups: Sequence[StepTimes]) -> dict[str, Samples]:
    def column(rows: Sequence[Mapping[str, float]], name: str) -> tuple[float, ...]:
        return tuple(round(row.get(name, 0.0), _DIGITS) for row in rows)

    rows, early = [step.values() for step in steps], [step.values() for step in warmups]
    names = dict.fromkeys(name for row in (*early, *rows) for name in row)
    return {name: Samples(unit="s", values=column(rows, name), warmups=column(early, name)) for name in names}
