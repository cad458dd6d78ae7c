"""A record without one of its config fields, samples, facts or tables is refused in one sentence or reported without it."""

import json
from typing import Any

import pytest

from op_records import op
from run_records import a_full_run
from sources import ROOT
from trainstep.config.instruments import INSTRUMENTS
from trainstep.records.amounts import limits_of
from trainstep.records.record import Record, record_from_plain, record_to_plain
from trainstep.records.store import Store
from trainstep.report.answers import answers
from trainstep.report.kit.notes import notes, summary
from trainstep.report.kit.rows import rows_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.page import sections, title_of

PARTS = ("config", "samples", "facts", "tables")


FILES = {
    "train_step": "h200/compile",
    "parallel": "h200/ddp_xl_messages",
    "attention": "h200/attention_memory",
    "attention_tiles": "h200/attention_tiles",
    "ceiling": "h200/matmul_ceiling",
    "collective": "h200/all_reduce_four",
    "numerics": "h200/numerics",
    "profile": "h200/profile_again",
    "memory": "h200/memory_sizes",
}
SHIPPED = ROOT / "src/trainstep/plan/time/calibrations/h200.json"
MADE = {
    "op": op(implementation="trainstep"),
    "run": a_full_run(),
    "calibration": record_from_plain(json.loads(SHIPPED.read_text())),
}
"""Workloads without a published file."""


def fullest(workload: str) -> Record:
    """The finished record of this workload with the most facts and tables in a published file, or one made by hand."""
    if workload in MADE:
        return MADE[workload]
    records = [
        record for record in Store(ROOT / f"results/{FILES[workload]}.jsonl").read() if record.workload == workload
    ]
    return max(
        (record for record in records if not record.failure), key=lambda record: len(record.facts) + len(record.tables)
    )


def report(plain: dict[str, Any]) -> bool:
    """Report a record in every form; whether it could be read."""
    try:
        record = record_from_plain(plain)
    except ValueError:
        return False
    rows = rows_of([("r.jsonl", record)])
    assert all_tables(rows)
    assert all_tables(rows, compared=False)
    # A run whose steps have no times has tables and an answer alone.
    assert sections(rows) or (record.workload == "run" and "step" not in record.samples)
    assert all(map(str, (title_of(rows), summary(rows), *notes(rows), *answers(rows))))
    return True


@pytest.mark.parametrize("workload", list(INSTRUMENTS))
def test_a_record_without_one_of_its_parts_is_refused_or_reported(workload: str):
    plain = record_to_plain(fullest(workload))
    read = 0
    assert report(plain)
    for part in PARTS:
        for name in plain[part]:
            less = {**plain, part: {other: value for other, value in plain[part].items() if other != name}}
            try:
                read += report(less)
            except Exception as error:
                raise AssertionError(f"without {part}.{name}: {error!r}") from error
    assert read > 10


@pytest.mark.parametrize("workload", list(INSTRUMENTS))
def test_a_table_without_rows_is_reported(workload: str):
    plain = record_to_plain(fullest(workload))
    for name, table in plain["tables"].items():
        for empty in ({}, {column: [] for column in table}):
            try:
                assert report({**plain, "tables": {**plain["tables"], name: empty}})
            except Exception as error:
                raise AssertionError(f"with {name} as {empty}: {error!r}") from error


@pytest.mark.parametrize("workload", list(INSTRUMENTS))
def test_times_of_zero_and_the_longest_times_are_reported(workload: str):
    """A longer time is refused, because sums of it overflow."""
    plain = record_to_plain(fullest(workload))
    for name, samples in plain["samples"].items():
        for value, may_be_read in (
            (0.0, True),
            (5e-324, True),
            (limits_of(samples["unit"]).largest, True),
            (1e308, False),
        ):
            extreme = {**samples, "values": [value] * len(samples["values"])}
            try:
                was_read = report({**plain, "samples": {**plain["samples"], name: extreme}})
            except Exception as error:
                raise AssertionError(f"with {name} of {value}: {error!r}") from error
            assert was_read == may_be_read


def test_a_verdict_over_a_step_of_zero_seconds_is_reported():
    plain = record_to_plain(fullest("profile"))
    verdict = {**plain["tables"]["verdict"], "step_s": [0.0]}
    assert report({**plain, "tables": {**plain["tables"], "verdict": verdict}})
