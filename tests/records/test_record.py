"""Records cannot be changed, refuse fields of wrong types, and come back unchanged from plain values."""

import dataclasses
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.records.amounts import LONGEST_S
from trainstep.records.record import (
    FORMAT,
    Fact,
    Failure,
    Holder,
    Record,
    Samples,
    record_from_plain,
    record_to_plain,
)

FAILURE = Failure(
    kind="out_of_memory",
    phase="backward",
    message="Asked for too much.",
    asked_bytes=10,
    holders=(Holder(name="weights", bytes=5),),
    last_lines=("one", "two"),
)


def full_record(**changes) -> Record:
    given = {
        "config": {"model": {"name": "small", "sizes": [1, [2, 3]]}, "context": 256},
        "samples": {"step": seconds([1, 2], warmups=(3.0,))},
        "facts": {"loss": Fact(value=1.5), "tokens": Fact(value=1024, unit="count")},
        "tables": {"kernels": {"name": ["a", "b"], "time": [1, 2]}},
        "prediction": {"step_s": 0.9},
        "failure": FAILURE,
    }
    return a_record(**{**given, **changes})


def plain(**changes):
    return {**json.loads(json.dumps(record_to_plain(full_record()))), **changes}


# Immutability.


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Record)])
def test_no_field_can_be_assigned(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(full_record(), name, None)


@pytest.mark.parametrize(
    "mapping",
    [
        lambda record: record.config,
        lambda record: record.config["model"],
        lambda record: record.samples,
        lambda record: record.facts,
        lambda record: record.tables,
        lambda record: record.tables["kernels"],
        lambda record: record.prediction,
    ],
)
def test_no_mapping_inside_can_be_changed(mapping):
    inside = mapping(full_record())
    with pytest.raises(TypeError):
        inside["new"] = 1
    with pytest.raises(TypeError):
        del inside[next(iter(inside))]
    assert not hasattr(inside, "update")


def test_no_list_inside_stays_a_list():
    values, lines, holders = [1.0, 2.0], ["one"], [Holder(name="weights", bytes=5)]
    record = full_record(
        samples={"step": Samples(unit="s", values=values, warmups=values)},
        failure=Failure(kind="crash", phase="build", message="No.", last_lines=lines, holders=holders),
    )
    for inside in (
        record.samples["step"].values,
        record.samples["step"].warmups,
        record.config["model"]["sizes"],
        record.config["model"]["sizes"][1],
        record.tables["kernels"]["time"],
        record.failure.last_lines,
        record.failure.holders,
    ):
        assert isinstance(inside, tuple)


def test_changes_of_the_arguments_do_not_reach_the_record():
    config, values = {"context": 256}, [1.0, 2.0]
    record = full_record(config=config, samples={"step": Samples(unit="s", values=values)})
    config["context"] = 512
    values.append(9.0)
    assert record.config["context"] == 256
    assert record.samples["step"].values == (1.0, 2.0)


# Refusals and answers.


def test_a_key_that_is_no_string_is_refused():
    with pytest.raises(ValueError, match="key 1 is not a string"):
        full_record(config={"by_rank": {1: "a"}})


def test_unknown_kinds_of_failure_are_refused():
    with pytest.raises(ValueError, match="'oops' is not a kind of failure; known: out_of_memory"):
        Failure(kind="oops", phase="build", message="No.")


def test_fact_returns_the_value_or_the_default():
    record = full_record(facts={"launch_bound": Fact(value=False)})
    assert record.fact("launch_bound", True) is False
    assert record.fact("absent") is None
    assert record.fact("absent", 7) == 7


def test_difference_names_the_first_field_that_differs_of_those_asked():
    other = replace(ENVIRONMENT, cpu="another", torch="2.11.0")
    assert ENVIRONMENT.difference(other, "torch", "cpu") == "torch 2.13.0 against 2.11.0"
    assert ENVIRONMENT.difference(other, "python", "cpu") == "cpu a cpu against another"
    assert ENVIRONMENT.difference(other, "python", "os") is None


# Plain values and back.


def test_an_empty_failure_is_refused():
    with pytest.raises(ValueError, match=r"not a record.*kind"):
        record_from_plain(plain(failure={}))


def test_plain_values_are_json_and_come_back_as_the_same_record():
    assert record_from_plain(plain()) == full_record()
    assert record_to_plain(record_from_plain(plain())) == plain()
    assert record_from_plain(plain(failure=None)) == full_record(failure=None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
json_scalars = json_values.filter(lambda value: not isinstance(value, list | dict))
configs = st.dictionaries(st.text().map("any {}".format), json_values, max_size=4)
"""No declared name, which would have a declared type: hypothesis draws words that stand in the sources, too."""


@settings(deadline=None)
@given(config=configs, fact=json_scalars, values=st.lists(st.floats(0, LONGEST_S)))
def test_any_json_in_a_record_comes_back(config, fact, values):
    record = full_record(
        config=config,
        facts={"any": Fact(value=fact)},
        samples={"step": Samples(unit="s", values=values)},
        prediction=config,
    )
    assert record_from_plain(json.loads(json.dumps(record_to_plain(record)))) == record


@settings(deadline=None)
@given(name=st.sampled_from([field.name for field in dataclasses.fields(Record)]), value=json_values)
def test_any_value_of_a_field_gives_a_record_or_a_value_error(name, value):
    try:
        record = record_from_plain(plain(**{name: value}))
    except ValueError:
        return
    assert record_to_plain(record)[name] == value


@settings(deadline=None)
@given(json_values)
def test_values_that_are_no_record_are_refused(value):
    with pytest.raises(ValueError, match=r"not a record|format"):
        record_from_plain(value)


@pytest.mark.parametrize("name", ["workload", "key", "config", "environment", "started_at", "duration_s"])
def test_a_record_without_a_required_field_is_refused(name):
    without = {key: value for key, value in plain().items() if key != name}
    with pytest.raises(ValueError, match=f"not a record.*{name}"):
        record_from_plain(without)


@pytest.mark.parametrize("values", [["1.0"], [None], "123", [[1.0]]])
def test_samples_that_are_no_numbers_are_refused(values):
    with pytest.raises(ValueError, match="not all numbers"):
        record_from_plain(plain(samples={"step": {"unit": "s", "values": values, "warmups": []}}))


BEYOND = float("inf")
"""The value that Python reads from JSON's 1e999."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": 1}, r"record\.workload cannot be 1: it must be text"),
        ({"key": ["k"]}, r"record\.key cannot be a value of type list"),
        ({"started_at": None}, r"record\.started_at cannot be None"),
        ({"duration_s": "long"}, r"record\.duration_s cannot be 'long'"),
        ({"duration_s": BEYOND}, r"record\.duration_s cannot be inf"),
        ({"duration_s": True}, r"record\.duration_s cannot be True"),
        ({"prediction": [1]}, "prediction is not a mapping"),
        ({"environment": 3}, "environment is not a mapping"),
        ({"environment": {**plain()["environment"], "cores": "2"}}, r"environment\.cores cannot be '2'"),
        ({"environment": {**plain()["environment"], "cores": 1.5}}, r"environment\.cores cannot be 1\.5"),
        ({"environment": {**plain()["environment"], "gpu": {}}}, r"environment\.gpu cannot be a value of type mapping"),
        ({"environment": {**plain()["environment"], "cpu": None}}, r"environment\.cpu cannot be None"),
        ({"environment": {**plain()["environment"], "dirty": 1}}, r"environment\.dirty cannot be 1"),
        ({"facts": {"tokens": {"value": 1, "unit": 5}}}, r"facts\.tokens\.unit cannot be 5"),
        ({"facts": {"tokens": {"value": [1], "unit": ""}}}, "a fact is one value, not a list"),
        ({"facts": {"tokens": {"value": BEYOND, "unit": ""}}}, r"facts\.tokens\.value is not a finite number"),
        ({"facts": {"tokens": {"value": "many", "unit": "count"}}}, r"facts\.tokens\.value is not a finite number"),
        (
            {"samples": {"step": {"unit": "s", "values": [BEYOND], "warmups": []}}},
            "samples of step are not all numbers",
        ),
        (
            {"samples": {"step": {"unit": "s", "values": [10**400], "warmups": []}}},
            "samples of step are not all numbers",
        ),
        ({"samples": {"step": {"unit": 1, "values": [], "warmups": []}}}, r"samples\.step\.unit cannot be 1"),
        ({"failure": {**plain()["failure"], "message": 1}}, r"failure\.message cannot be 1"),
        ({"failure": {**plain()["failure"], "last_lines": [1]}}, r"failure\.last_lines are not all text"),
        ({"failure": {**plain()["failure"], "holders": [{"name": 1, "bytes": 1}]}}, r"failure\.holders\.name"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        record_from_plain(plain(**changes))


@pytest.mark.parametrize("newer", [FORMAT + 1, "2.0", None])
def test_another_format_is_refused_by_its_number(newer):
    with pytest.raises(ValueError, match=f"format {newer!r} of records is not known here.*format {FORMAT}.*update"):
        record_from_plain(plain(format=newer, whatever="a later format may hold"))
