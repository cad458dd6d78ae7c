"""Cells of the workload `memory` on several ranks, measured inside the tests' own: `run_ranks(2, measured, {...})`."""

from typing import Any
from unittest.mock import patch

from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.harness.workload import Findings
from trainstep.measure.memory import workload as step_memory
from trainstep.measure.parallel import meeting
from trainstep.parallel.ranks import Ranks

SHAPE = {"d_model": 32, "d_ff": 64, "layers": 3, "heads": 2, "vocab_size": 300}
SMALL = {**SHAPE, "batch_size": 2, "context": 16, "attention": "plain"}


def measured(ranks: Ranks, values: dict[str, Any]) -> Findings:
    """Measure the cell on these ranks; the findings of all of them."""
    config = build_config("memory", {**SMALL, "ranks": ranks.world_size, **values})
    with patch.object(meeting, "start_ranks", lambda *_, **__: ranks):
        measurement = step_memory.WORKLOAD.prepare(to_plain(config), lambda _stage: None)
        measurement.take(1)
        return measurement.finish()
