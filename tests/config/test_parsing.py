"""Flat values to configs and back, and the hash that identifies a finished cell."""

import dataclasses
import datetime
import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sources import ROOT
from trainstep.config.collective import CeilingConfig
from trainstep.config.model import ModelConfig, UserModel, size
from trainstep.config.parsing import (
    CONFIGS,
    build_config,
    build_run,
    config_hash,
    fields_of,
    from_plain,
    parse_value,
    to_plain,
)
from trainstep.config.run import RunConfig

RUNS = [
    {},
    {"model": "tiny", "clip_grad_norm": 1.0, "sync": 5, "data": "stdlib"},
    {"model": "2.7B", "layers": 3, "rope_theta": 500_000.0, "sync": "phase"},
    {"model": "package.module:build", "mode": "forward", "compile": "model"},
]


def refusal(**values: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build_run(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_built_from_flat_values():
    run = build_run({"model": "small", "layers": 6, "context": 128, "learning_rate": 1})
    assert run == RunConfig(model=dataclasses.replace(size("small"), layers=6), context=128, learning_rate=1.0)
    assert isinstance(run.learning_rate, float)
    assert build_run({}).model == size("small")


def test_none_is_a_name_for_fields_that_are_names():
    assert build_run({"compile": None}).compile == "none"
    assert build_run({"clip_grad_norm": None}).clip_grad_norm is None


def test_a_users_model_takes_no_shape_options():
    assert build_run({"model": "a.b:c"}).model == UserModel(function="a.b:c")
    assert refusal(model="a.b:c", layers=3).startswith("layers: belongs to the built-in model; a.b:c decides")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"contxt": 128}, "run: unknown key 'contxt' (did you mean context?)"),
        ({"name": "mine"}, "run: unknown key 'name'"),
        ({"model": 3}, "model: must be a size's name or package.module:function, not 3"),
        ({"model": "smal"}, "model: unknown size 'smal' (did you mean small?)"),
        ({"context": "long"}, "context: must be a whole number, not 'long'"),
        ({"context": 1.5}, "context: must be a whole number, not 1.5"),
        ({"context": True}, "context: must be a whole number, not True"),
        ({"context": -1}, "context: must be a whole number of at least 1, not -1"),
        ({"clip_grad_norm": "no"}, "clip_grad_norm: must be a number or none, not 'no'"),
        ({"learning_rate": None}, "learning_rate: must be a number, not None"),
        ({"nvtx": 1}, "nvtx: must be true or false, not 1"),
        ({"precision": 16}, "precision: must be a name, not 16"),
        ({"sync": 2.5}, "sync: must be a name or a whole number, not 2.5"),
        ({"layers": "many"}, "layers: must be a whole number, not 'many'"),
        ({"heads": 11}, "heads: 11 does not divide d_model 768; 12 would"),
        ({"context": {"a": 1}}, "context: must be a whole number, not {'a': 1}"),
    ],
)
def test_bad_values_are_refused_by_field(values: dict[str, Any], words: str):
    assert refusal(**values).startswith(words)


def test_a_ceiling_is_built_from_flat_values():
    assert build_config("ceiling", {"kind": "copy", "mib": 3}) == CeilingConfig(kind="copy", mib=3)
    with pytest.raises(ValueError, match=r"ceiling: unknown key 'knd' \(did you mean kind\?\)"):
        build_config("ceiling", {"knd": "copy"})
    with pytest.raises(ValueError, match="n: must be a whole number, not 'x'"):
        build_config("ceiling", {"n": "x"})


def test_fields_that_a_user_may_set_have_help():
    names = set(fields_of(RunConfig))
    assert {"model", "context", "layers", "d_model", "sync"} < names
    assert "name" not in names
    assert set(fields_of(CeilingConfig)) == {field.name for field in dataclasses.fields(CeilingConfig)}
    assert all(field.metadata["help"] for name, field in fields_of(RunConfig).items() if name != "model")


@pytest.mark.parametrize("values", RUNS)
def test_plain_values_give_the_same_run(values: dict[str, Any]):
    run = build_run(values)
    plain = to_plain(run)
    assert from_plain(RunConfig, plain) == run
    assert from_plain(RunConfig, json.loads(json.dumps(plain))) == run


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 100), st.integers(1, 64), st.integers(1, 64)),
    rates=st.tuples(st.floats(1e-9, 1e9), st.none() | st.floats(1e-9, 1e9)),
    windows=st.tuples(st.integers(1, 50), st.integers(2, 9)),
)
def test_any_run_comes_back(shape: tuple[int, int, int], rates: tuple[float, float | None], windows: tuple[int, int]):
    layers, heads, half_width = shape
    model = ModelConfig(d_model=2 * heads * half_width, d_ff=8, layers=layers, heads=heads)
    steps = windows[0] * windows[1]
    run = RunConfig(model=model, learning_rate=rates[0], clip_grad_norm=rates[1], steps=steps, sync=windows[1])
    back = from_plain(RunConfig, json.loads(json.dumps(to_plain(run))))
    assert back == run
    assert config_hash("train_step", to_plain(back)) == config_hash("train_step", to_plain(run))


def reordered(value: Any) -> Any:
    return {name: reordered(value[name]) for name in reversed(value)} if isinstance(value, dict) else value


@pytest.mark.parametrize("values", RUNS)
def test_the_hash_ignores_the_order_of_keys(values: dict[str, Any]):
    plain = to_plain(build_run(values))
    assert list(reordered(plain)) != list(plain)
    assert config_hash("train_step", reordered(plain)) == config_hash("train_step", plain)


def test_the_hash_is_that_of_the_json():
    text = '["train_step",{"a":[1,2.5],"b":null}]'
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert config_hash("train_step", {"b": None, "a": [1, 2.5]}) == expected


def test_the_hash_depends_on_every_field():
    runs = [build_run({**values, **more}) for values in RUNS for more in ({}, {"seed": 1}, {"steps": 20})]
    hashes = {config_hash(workload, to_plain(run)) for run in runs for workload in ("train_step", "my.own:workload")}
    assert len(hashes) == 2 * len(runs)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_computes_the_same_hash(hash_seed: str):
    code = (
        "from trainstep.config.parsing import *;"
        "print(config_hash('train_step', to_plain(build_run({'model': 'tiny', 'sync': 5}))))"
    )
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == config_hash("train_step", to_plain(build_run({"sync": 5, "model": "tiny"})))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("1.5", 1.5),
        ("3e-4", 3e-4),
        ("true", True),
        ("False", False),
        ("none", None),
        ("2.7B", "2.7B"),
        ("a.b:c", "a.b:c"),
        ("", ""),
    ],
)
def test_words_are_parsed_to_typed_values(text: str, value: Any):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), datetime.date(2026, 1, 1), [{"a": {1}}]], ids=str)
def test_a_value_that_json_cannot_hold_is_refused_by_its_field(value: Any):
    with pytest.raises(ValueError, match=r"^sides: .* is not a value that a record can hold"):
        config_hash("mine:IT", {"steps": 3, "sides": value})


def test_a_whole_number_beyond_floats_is_refused():
    with pytest.raises(ValueError, match="learning_rate: must be positive, not inf"):
        build_run({"learning_rate": 10**400})


def test_every_published_record_reads_back_to_its_key():
    """Every committed record keeps its flat form, order and hash; older records have fewer fields."""
    seen = set()
    for path in (ROOT / "results").rglob("*.jsonl"):
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            workload, config = record["workload"], record["config"]
            seen.add(workload)
            assert config_hash(workload, config) == record["key"]
            if workload in CONFIGS:
                back = to_plain(from_plain(CONFIGS[workload], config))
                assert list({name: back[name] for name in back if name in config}.items()) == list(config.items())
    assert seen >= CONFIGS.keys() - {"calibration"}, "no GPU's calibration is measured yet"
