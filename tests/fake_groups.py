"""Stands for the processes of cells: records with made-up times, so that what decides over them can be tested in no time.

fake = FakeGroups(speeds={"sdpa": 0.5})
monkeypatch.setattr(lab, "run_groups", fake)          # fake.ran: the labels of what was "measured", in order
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.config.grid import Cell, group_name
from trainstep.measure.harness.runner import with_facts
from trainstep.records.record import Environment, Record

STEPS = 2
SETS = 6


class FakeGroups:
    """Answers as `run_groups` of measure/harness/local.py. `speeds`: value of a config's field -> factor of 20 ms."""

    def __init__(self, speeds: Mapping[Any, float], environment: Environment = ENVIRONMENT) -> None:
        self.speeds, self.environment = speeds, environment
        self.ran: list[str] = []
        self.dies_after: int | None = None
        """Number of groups after which the program is interrupted."""

    def __call__(
        self, groups: Sequence[Sequence[Cell]], _limits: object, tell: Callable[[Cell, str], None]
    ) -> Iterator[list[Record]]:
        for group in groups:
            if len(self.ran) == self.dies_after:
                raise KeyboardInterrupt
            self.ran.append(" / ".join(cell.label for cell in group))
            for cell in group:
                tell(cell, "steps 1/2")
                yield [self._record(cell, group)]

    def _record(self, cell: Cell, group: Sequence[Cell]) -> Record:
        step_s = 0.02
        for name, value in cell.config.items():
            step_s *= self.speeds.get(value, 1.0) if name != "model" and not isinstance(value, bool) else 1.0
        count = STEPS * SETS if len(group) > 1 else STEPS
        samples = {"step": seconds([step_s] * count)}
        record = a_record(
            workload=cell.workload,
            key=cell.key,
            config=cell.config,
            environment=self.environment,
            samples=samples,
            tables={"losses": {"loss": [2.0, 1.5, 1.25]}},
        )
        if len(group) == 1:
            return record
        name = f"{group_name(group)} {len(self.ran)}"
        return with_facts(record, interleaving="live", interleaving_group=name, turn_steps=1, process_steps=STEPS)
