"""Every fact and table that our code names or a committed record holds is declared once, with its unit and types."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from record_maker import ENVIRONMENT, a_record, seconds
from run_records import WAITS
from sources import ROOT
from trainstep.config.instruments import INSTRUMENTS
from trainstep.config.parsing import flat_form, to_plain
from trainstep.config.script import ScriptConfig
from trainstep.records.facts import FACTS, IN_EVERY_ROW, Fact, facts_of
from trainstep.records.record import Record, Samples, record_from_plain, record_to_plain
from trainstep.records.store import Store
from trainstep.records.tables import RANK_FACTS, RANKS, TABLES, table_kind

SOURCES = sorted((ROOT / "src/trainstep").rglob("*.py"))
COMMITTED = sorted((ROOT / "results").rglob("*.jsonl"))
OTHER_UNITS = {"rate": {"bytes/s"}}
UNITS = {"", "s", "bytes", "count", "flops", "flop/s", "ratio", "W", "Hz", "C"}
OPEN = object()
"""The value with which `changed` removes a column."""


class Call(NamedTuple):
    path: Path
    function: str
    """Its name, or `.NAME` of a method."""
    keywords: tuple[str, ...]
    first: object
    """The first argument where that is a constant, else None."""


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Every call by name in the sources."""
    return [call for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if (call := call_at(path, node))]


def call_at(path: Path, node: ast.AST) -> Call | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    function = node.func.id if isinstance(node.func, ast.Name) else f".{node.func.attr}"
    first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    return Call(path, function, tuple(word.arg for word in node.keywords if word.arg), first)


def test_every_fact_that_our_code_names_is_declared(calls: list[Call]):
    written = {
        (name, call.path.name)
        for call in calls
        if call.function in ("facts_of", "with_facts")
        for name in call.keywords
    }
    assert len(written) > 80, "the walk finds the calls"
    assert {name for name, _ in written} <= FACTS.keys()
    read = {call.first for call in calls if call.function == ".fact" and call.first is not None}
    assert len(read) > 40
    assert read <= FACTS.keys()


def test_facts_are_made_by_facts_of_alone(calls: list[Call]):
    """Exceptions: a fact whose unit depends on the cell, and facts that another process sent."""
    files = {f"{call.path.parent.name}/{call.path.name}" for call in calls if call.function == "Fact"}
    assert files == {"records/facts.py", "step/ceilings.py", "memory/tables.py"}


def test_a_fact_that_is_not_declared_cannot_be_made():
    with pytest.raises(KeyError, match="invented"):
        facts_of(invented=1)


def test_none_makes_no_fact_and_units_are_the_declared_ones():
    assert facts_of(loss=None, tokens=5, build_s=0.5) == {
        "tokens": Fact(value=5, unit="count"),
        "build_s": Fact(value=0.5, unit="s"),
    }


def test_declarations_have_units_meanings_and_known_workloads():
    for name, kind in FACTS.items():
        assert kind.unit in UNITS, name
        assert kind.meaning, name
        assert not name.endswith("_bytes") or kind.unit == "bytes", name
        assert not name.endswith("_s") or kind.unit == "s", name
    assert list(FACTS)[: len(IN_EVERY_ROW)] == list(IN_EVERY_ROW)
    for workload, tables in TABLES.items():
        assert workload in INSTRUMENTS
        assert all(kind.rows and kind.columns for kind in tables.values())
    for instrument in INSTRUMENTS.values():
        assert set(instrument.facts) <= FACTS.keys() - IN_EVERY_ROW.keys()
        assert set(instrument.always.get("facts", ())) <= FACTS.keys()
        assert set(instrument.always.get("config", ())) <= flat_form(instrument.config).keys()
        assert all(table_kind(instrument.name, name) for name in instrument.always.get("tables", ()))


@pytest.fixture(scope="module")
def committed() -> list[Record]:
    return [record for path in COMMITTED for record in Store(path).read()]


def test_committed_records_hold_declared_facts_and_tables_only(committed: list[Record]):
    """Reading the files checked the types; records of older formats hold no undeclared name either."""
    assert len(committed) > 1000
    for record in (record for record in committed if record.workload in INSTRUMENTS):
        for name, fact in record.facts.items():
            assert fact.unit in {FACTS[name].unit, *OTHER_UNITS.get(name, ())}, name
        for name, table in record.tables.items():
            kind = table_kind(record.workload, name)
            assert kind is not None, name
            assert kind.others is not object or table.keys() <= {*kind.columns, *kind.optional}, name


def test_undeclared_facts_and_tables_of_a_users_workload_are_kept(tmp_path: Path):
    odd = a_record(
        workload="mine:WORKLOAD",
        facts={"colour": Fact(value="red")},
        tables={"layers": {"x": [1, 2], "y": ["a", None]}, "odd": {"a": [1], "b": [1, 2]}},
    )
    store = Store(tmp_path / "r.jsonl")
    store.append(odd)
    assert store.read() == [odd]


RANK_TABLE = {"rank": [0, 1], "quantity": ["time", "time"], "unit": ["s", "s"], "values": [[1.0], [2.0]]}
VERDICT = {"kind": ["compute-bound"], "on_device": [True], "profiled_step": [False], "enqueue_s": [None]} | {
    name: [0.5] for name in ("step_s", "busy_s", "exposed_share", "matmul_share", "overhead_share")
}


def changed(table: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """The table with other columns; the value OPEN removes a column."""
    return {name: values for name, values in {**table, **columns}.items() if values is not OPEN}


RUN = to_plain(ScriptConfig(script="train.py", run="run-1"))


@pytest.mark.parametrize(
    ("workload", "changes", "reason"),
    [
        (
            "train_step",
            {"facts": {"tokens": Fact(value="many")}},
            "facts.tokens cannot be 'many': it must be a whole number",
        ),
        (
            "mine:W",
            {"facts": {"launch_bound": Fact(value="no")}},
            "facts.launch_bound cannot be 'no': it must be true or",
        ),
        ("parallel", {"tables": {RANKS: changed(RANK_TABLE, values=OPEN)}}, "ranks has no column 'values'"),
        ("mine:W", {"tables": {RANKS: changed(RANK_TABLE, values=OPEN)}}, "ranks has no column 'values'"),
        (
            "parallel",
            {"tables": {RANKS: changed(RANK_TABLE, rank=[0])}},
            "has 1 values of 'rank' beside 2 of 'quantity'",
        ),
        (
            "parallel",
            {"tables": {RANKS: changed(RANK_TABLE, values=[[1.0], ["x"]])}},
            "in row 2 of its column 'values'",
        ),
        ("parallel", {"tables": {RANKS: changed(RANK_TABLE, values=[[1.0], 2.0])}}, "in row 2 of its column 'values'"),
        ("parallel", {"tables": {RANKS: changed(RANK_TABLE, rank=[0, None])}}, "it must be a whole number"),
        ("parallel", {"tables": {RANKS: changed(RANK_TABLE, unit="ss")}}, "has no list in its column 'unit'"),
        ("profile", {"tables": {"verdict": changed(VERDICT, on_device=[1])}}, "it must be true or false"),
        ("profile", {"tables": {"verdict": changed(VERDICT, step_s=[10**400])}}, "it must be a finite number"),
        (
            "profile",
            {"tables": {"verdict": changed(VERDICT, more=[1, 2])}},
            "has 1 values of 'kind' beside 2 of 'more'",
        ),
        ("memory", {"tables": {"timeline": {"time_s": [0.0], "phase": ["x"], "anything": ["y"]}}}, "'anything'"),
        ("memory", {"tables": {"layers": {"layer": ["a"], "bytes": [1], "rank": ["x"]}}}, "column 'rank'"),
        ("memory", {"tables": {RANK_FACTS: {"rank": [0], "fact": ["tokens"], "value": ["x"], "unit": [""]}}}, "tokens"),
        # Amounts that no measurement has
        (
            "run",
            {"facts": facts_of(exposed_s=-5)},
            "facts.exposed_s cannot be -5: it must be a number from 0 to 3155760000",
        ),
        ("mine:W", {"facts": facts_of(build_s=1e308)}, "facts.build_s cannot be 1e+308: it must be a number from 0"),
        ("run", {"facts": facts_of(gradient_messages=-1)}, "facts.gradient_messages cannot be -1: it must be"),
        ("memory", {"facts": facts_of(peak_allocated_bytes=-1)}, "facts.peak_allocated_bytes cannot be -1"),
        ("memory", {"facts": facts_of(nccl_bytes=-1e200)}, "it must be a number from -1e+100 to 1e+100 (GPU memory"),
        (
            "mine:W",
            {"samples": {"step": seconds([1, -1])}},
            "samples.step.values cannot have -1.0: it must be a number from 0",
        ),
        ("mine:W", {"samples": {"step": seconds([1], warmups=(1e308,))}}, "samples.step.warmups cannot have 1e+308"),
        ("mine:W", {"samples": {"x": Samples(unit="", values=(1e308,))}}, "samples.x.values cannot have 1e+308"),
        ("mine:W", {"duration_s": -1.5}, "record.duration_s cannot be -1.5: it must be a number from 0 to"),
        (
            "mine:W",
            {"environment": replace(ENVIRONMENT, cores=-2)},
            "environment.cores cannot be -2: it must be a number",
        ),
        (
            "run",
            {"tables": {"waits": WAITS | {"time_s": [-0.1]}}},
            "has -0.1 in row 1 of its column 'time_s'; it must be",
        ),
        ("run", {"tables": {"waits": WAITS | {"calls": [-1]}}}, "tables.waits has -1 in row 1 of its column 'calls'"),
        (
            "run",
            {"tables": {"waits": WAITS | {"why": [3]}}},
            "tables.waits has 3 in row 1 of its column 'why'; it must be text",
        ),
        (
            "run",
            {"tables": {"waits": WAITS | {"why": [[3]]}}},
            "has a value of type list in row 1 of its column 'why'; it must be text",
        ),
        (
            "mine:W",
            {"tables": {RANKS: changed(RANK_TABLE, values=[[1.0], [-1.0]])}},
            "has -1.0 in row 2 of its column 'values'",
        ),
        # The config by which ranks and windows of a run are joined
        (
            "run",
            {"config": RUN | {"first_step": -7}},
            "config.first_step: must be a whole number of at least 1, not -7",
        ),
        ("run", {"config": RUN | {"rank": 999_999_999}}, "config.rank: must be at most 0, not 999999999"),
        ("parallel", {"config": {"ranks": "two"}}, "config.ranks cannot be 'two': it must be a whole number"),
        ("train_step", {"config": {"model": {"d_model": None}}}, "config.model.d_model cannot be None"),
        ("parallel", {"config": {"ranks": 2, "sync": "flat"}}, "config.bucket_mib is missing"),
    ],
)
def test_a_wrong_type_is_one_sentence_with_file_and_line(
    workload: str, changes: dict[str, Any], reason: str, tmp_path: Path
):
    store = Store(tmp_path / "r.jsonl")
    if "config" not in changes and workload == "parallel":
        changes = changes | {"config": {"ranks": 2, "sync": "flat", "bucket_mib": None}}
    if "config" not in changes and workload == "run":
        changes = changes | {"config": RUN}
    store.append(a_record())
    line = json.dumps(record_to_plain(a_record(workload=workload, **changes)))
    store.path.write_text(store.path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl: line 2: not a record: ") as refused:
        store.read()
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_signed_quantities_may_be_negative():
    """Differences of two readings or of two clocks, ratios, temperatures, and whatever a user's workload calls its own."""
    host = {name: [0.0] for name in TABLES["profile"]["host"].columns} | {"phase": ["forward"], "lead_s": [-1e-6]}
    record = a_record(
        workload="profile",
        config={"precision": "fp32"},
        facts=facts_of(allocated_residual_bytes=-5, nccl_bytes=-1, temperature_c=-3.0, update_share=-0.1, loss=-1e200)
        | {"gained_s": Fact(value=-1.0, unit="s")},
        samples={"ratio": Samples(unit="ratio", values=(-1.0, 1e99)), "step": seconds([0.0])},
        tables={"host": host},
    )
    assert record_from_plain(record_to_plain(record)) == record


def test_a_table_in_its_own_file_is_checked_too(tmp_path: Path):
    long = {"layer": ["x"] * 20_000, "bytes": [1.5] * 20_000}
    store = Store(tmp_path / "r.jsonl")
    store.append(a_record(workload="memory", tables={"layers": long}))
    assert list((tmp_path / "r.tables").iterdir())
    with pytest.raises(
        ValueError, match=r"line 1: not a record: tables\.layers has 1\.5 in row 1 of its column 'bytes'"
    ):
        store.read()


def test_an_empty_table_has_no_rows():
    record = a_record(workload="profile", config={"precision": "fp32"}, tables={"host": {}})
    assert record_from_plain(record_to_plain(record)) == record
