"""Cells of the workload `parallel`, measured inside the tests' own ranks: `run_ranks(2, measured, {...}, (4,))`."""

from typing import Any
from unittest.mock import patch

import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.measure import meeting, parallel
from trainstep.measure.failures import CellFailed
from trainstep.parallel.ranks import Ranks
from trainstep.records.record import Failure

SMALL = {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 2, "vocab_size": 256, "batch_size": 1, "context": 8}


def measured(ranks: Ranks, values: dict[str, Any], turns: tuple[int, ...] = (2,), drift: bool = False) -> Any:
    """What this rank found, or the Failure it came to. `drift`: before it is checked, rank 1's first norm gets another value."""
    config = build_config("parallel", {**SMALL, "ranks": ranks.world_size, "warmups": 1, "window_steps": 2, **values})
    with patch.object(meeting, "start_ranks", lambda *_, **__: ranks):
        try:
            measurement = parallel.WORKLOAD.prepare(to_plain(config), lambda _stage: None)
            for steps in turns:
                measurement.take(steps)
            if drift and ranks.rank == 1:
                measurement._wait_for_parameters()  # or their gather would put it right again
                module = measurement.timed.assembly.module
                with torch.no_grad():
                    next(value for name, value in module.named_parameters() if "norm" in name).add_(1.0)
            return measurement.finish()
        except CellFailed as error:
            return error.failure


def failure_of(found: Any) -> Failure:
    assert isinstance(found, Failure)
    return found
