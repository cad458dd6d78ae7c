"""Every row of the sweeps of the 8B step fits by plan, so that none ends in a time limit that others pay."""

import pytest

from sources import ROOT
from trainstep.config.grid import Cell, expand_all
from trainstep.config.parallel import ParallelConfig, RanksConfig
from trainstep.config.parsing import from_plain
from trainstep.config.run import BenchConfig
from trainstep.config.sweep import load_sweep
from trainstep.plan.prediction import predict
from trainstep.plan.step_memory import alone

H200_BYTES = 139 * 2**30
"""A little less than the driver reports."""


def cells(name: str) -> list[Cell]:
    path = ROOT / "sweeps" / f"{name}.toml"
    return expand_all(load_sweep(path).grids({}), {"device": "cuda"}) if path.exists() else []


def planned(cell: Cell) -> RanksConfig:
    if cell.workload == "parallel":
        return from_plain(ParallelConfig, cell.config)
    return alone(from_plain(BenchConfig, cell.config))


@pytest.mark.parametrize("cell", [*cells("step_8b"), *cells("step_8b_alone")], ids=lambda cell: cell.label)
def test_a_row_fits(cell: Cell):
    prediction = predict(planned(cell), gpu_memory_bytes=H200_BYTES, steps=2)
    assert prediction.fits
    assert not prediction.is_tight or prediction.spare_bytes > 0
