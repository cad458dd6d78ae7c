"""Cells of the workload `parallel`, measured inside the tests' own ranks: `run_ranks(2, measured, {...}, (4,))`."""

from typing import Any
from unittest.mock import patch

import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.parallel import meeting
from trainstep.measure.parallel import workload as parallel
from trainstep.parallel.ranks import Ranks
from trainstep.records.record import Failure

SMALL = {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2, "vocab_size": 256, "batch_size": 1, "context": 8}


def measured(ranks: Ranks, values: dict[str, Any], turns: tuple[int, ...] = (2,), drift: bool = False) -> Any:
    """Measure the cell on this rank; its findings or its Failure. `drift`: rank 1 changes its first norm before the check."""
    config = build_config("parallel", {**SMALL, "ranks": ranks.world_size, "warmups": 1, "window_steps": 2, **values})
    with patch.object(meeting, "start_ranks", lambda *_, **__: ranks):
        try:
            measurement = parallel.WORKLOAD.prepare(to_plain(config), lambda _stage: None)
            for steps in turns:
                measurement.take(steps)
            if drift and ranks.rank == 1:
                measurement._wait_for_parameters()  # otherwise the gather would overwrite the change
                module = measurement.timed.assembly.module
                with torch.no_grad():
                    next(value for name, value in module.named_parameters() if "norm" in name and value.numel()).add_(
                        1.0
                    )
            return measurement.finish()
        except CellFailed as error:
            return error.failure


def failure_of(result: Any) -> Failure:
    assert isinstance(result, Failure)
    return result
