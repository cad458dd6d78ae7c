"""Grades a search by grids of measured steps: how much slower is its choice than the fastest measured step?

    for grid in grids_of(records, calibration):
        grade = graded(grid)
        grade.loss, grade.chosen.measured_s, grade.best.measured_s

A grid is the same work on the same GPU: model, context, ranks, global batch and precision, measured with several options. The
search's choice is the fastest by prediction of those that surely fit. Cells without a predicted time (torch's strategies) cannot be
chosen, but they can be the best. A cell that was measured several times counts with the median; what differs in the timing alone
(steps, warm-ups, windows) is one cell.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import RanksConfig, needless
from trainstep.costs.strategies import BASELINE
from trainstep.plan.cell_config import ranks_config
from trainstep.plan.prediction import predict
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.grade import is_timed, measured_time_s
from trainstep.plan.time.step_time import StepTime, step_time
from trainstep.records.record import Record

LEAST_CELLS = 12
"""The fewest measured cells that count as a grid."""
_RUN = (
    "attention",
    "ops",
    "loss_sum_dtype",
    "compile",
    "recompute",
    "recompute_every",
    "narrow_blocks",
    "capture",
    "adamw",
    "update",
    "batch_size",
    "accumulation",
)
_SYNC = (
    *(
        "bucket_mib",
        "first_bucket_mib",
        "last_bucket_mib",
        "reduce_dtype",
        "keeps_gradient_dtype",
        "in_place",
        "compute_dtype",
    ),
    *("reshard_after_forward", "ahead", "shard_ranks", "transport", "inbox_mib"),
)

Work = tuple[str, str, int, int, int, str]
"""GPU, model, context, ranks, sequences in a step, precision."""


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """Options that were measured. `time`: the prediction; None, with `no_time`, if there is none."""

    options: Mapping[str, object]
    config: RanksConfig
    measured_s: float
    records: int
    time: StepTime | None = None
    no_time: str = ""
    is_known: bool = False
    """Whether the calibration has points from this cell."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells of the same work."""

    work: Work
    cells: tuple[GridCell, ...]

    @property
    def varied(self) -> tuple[str, ...]:
        """The options that differ among the cells."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.options)
        return tuple(name for name in names if len({str(cell.options.get(name)) for cell in self.cells}) > 1)


@dataclass(frozen=True, kw_only=True)
class GridGrade:
    """What a search chooses in a grid, and what was best."""

    grid: Grid
    chosen: GridCell
    best: GridCell

    @property
    def loss(self) -> float:
        """How much longer the choice takes than the best: 0.02 is 2 %."""
        return self.chosen.measured_s / self.best.measured_s - 1

    @property
    def place(self) -> int:
        """The place of the choice among the measured times, from 1 on."""
        return 1 + sum(cell.measured_s < self.chosen.measured_s for cell in self.grid.cells)


def grids_of(records: Iterable[Record], calibration: Calibration) -> list[Grid]:
    """The grids of at least LEAST_CELLS cells, those with most cells first."""
    works: dict[tuple[Any, ...], dict[str, list[tuple[Record, RanksConfig]]]] = {}
    for record in {record.key: record for record in records if is_timed(record)}.values():
        try:
            config = ranks_config(record)
        except ValueError:
            continue
        run = config.run
        if not isinstance(run.model, ModelConfig) or run.mode != "step" or run.clip_grad_norm is not None:
            continue
        if config.ranks > 1 and config.sync.name == BASELINE:  # each rank trains alone
            continue
        batch = config.ranks * run.batch_size * run.accumulation
        work = record.environment.gpu or "a CPU", run.model, run.context, config.ranks, batch, run.precision
        works.setdefault(work, {}).setdefault(str(options_of(config)), []).append((record, config))
    grids = []
    for (gpu, model, *rest), alike in works.items():
        if len(alike) >= LEAST_CELLS:
            cells = tuple(_cell(measured, calibration) for measured in alike.values())
            grids.append(Grid(work=(gpu, model.name, *rest), cells=cells))
    return sorted(grids, key=lambda grid: -len(grid.cells))


def graded(grid: Grid) -> GridGrade | None:
    """The grade; None if no cell has a predicted time and surely fits."""
    spec = machine_spec(grid.work[0])
    able = [(cell.time.step.time_s, number) for number, cell in enumerate(grid.cells) if cell.time is not None]
    for _, number in sorted(able):
        chosen = grid.cells[number]
        if spec is not None:
            prediction = predict(chosen.config, gpu_memory_bytes=spec.memory_bytes)
            if not prediction.fits or prediction.is_tight:
                continue
        return GridGrade(grid=grid, chosen=chosen, best=min(grid.cells, key=lambda cell: cell.measured_s))
    return None


def options_of(config: RanksConfig) -> dict[str, object]:
    """The options that a search may choose."""
    run = {name: getattr(config.run, name) for name in _RUN}
    if config.ranks == 1:
        return run
    idle = needless({"sync": config.sync.name})
    return {"sync": config.sync.name, **{name: getattr(config.sync, name) for name in _SYNC if name not in idle}, **run}


def _cell(measured: list[tuple[Record, RanksConfig]], calibration: Calibration) -> GridCell:
    _, config = measured[-1]
    time, no_time = None, ""
    try:
        time = step_time(config, calibration)
    except ValueError as error:
        no_time = str(error)
    return GridCell(
        options=options_of(config),
        config=config,
        measured_s=statistics.median(measured_time_s(record) for record, _ in measured),
        records=len(measured),
        time=time,
        no_time=no_time,
        is_known=any(record.key in calibration.used for record, _ in measured),
    )


def reasons_without_time(grid: Grid) -> Counter[str]:
    """Why cells cannot be chosen -> how many."""
    return Counter(cell.no_time for cell in grid.cells if cell.no_time)
