"""The workload `run`: records of a user's script. The script makes them while it runs, so no cell can be measured."""

from collections.abc import Mapping
from typing import Any

from trainstep.measure.harness.failures import refused
from trainstep.measure.harness.workload import Measurement, Stage


class ScriptWorkload:
    """Refuses to be measured as a cell of a sweep."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        """CellFailed: a script is started by `trainstep run`."""
        raise refused(f"run: a script is measured while it runs, not as a cell: trainstep run {config.get('script')}")


WORKLOAD = ScriptWorkload()
