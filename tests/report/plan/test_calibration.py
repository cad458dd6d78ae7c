"""The answer about a calibration: bandwidth is stated for a size that was measured."""

import pytest

from record_maker import a_record
from trainstep.records.facts import facts_of
from trainstep.report.kit.rows import rows_of
from trainstep.report.plan.calibration import calibration_answer


@pytest.mark.parametrize(
    ("largest_bytes", "end"),
    [(3 * 2**20, " and 7.9 GB/s in copies of 3.0 MiB."), (2**28, " and 671.1 GB/s of memory.")],
)
def test_a_bandwidth_is_that_of_a_size_which_was_measured(largest_bytes: float, end: str):
    """A CPU's largest copy fits its caches: 4 times its size takes 4 times as long in no memory."""
    sizes, times = [largest_bytes / 4, largest_bytes], [1e-4, 4e-4]
    tables = {
        "traffic": {"kind": ["contiguous"] * 2, "bytes": sizes, "time_s": times},
        "matmuls": {
            "dtype": ["fp32"] * 2,
            "m": [8, 64],
            "n": [8] * 2,
            "k": [8] * 2,
            "batch": [1] * 2,
            "time_s": [1e-6, 8e-6],
        },
    }
    record = a_record(workload="calibration", tables=tables, facts=facts_of(multiprocessors=1))
    answer = calibration_answer(rows_of([("c.jsonl", record)]))
    assert answer is not None
    assert answer.verdict.endswith(end)
