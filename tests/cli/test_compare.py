"""`trainstep compare`: two files of records, cell by cell."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attention_records import attention
from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.cli import app
from trainstep.config.parsing import build_run, config_hash, to_plain
from trainstep.records.record import Environment, Failure, Record
from trainstep.records.store import Store


def record(
    context: int, step_s: float, environment: Environment = ENVIRONMENT, failure: Failure | None = None
) -> Record:
    config = to_plain(build_run({"model": "small", "context": context}))
    return a_record(
        key=config_hash("train_step", config),
        config=config,
        environment=environment,
        failure=failure,
        samples={"step": seconds([step_s * (1 + 0.001 * index) for index in range(10)])},
    )


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write(tmp_path / "before.jsonl", record(128, 1.0), record(256, 2.0), record(512, 4.0), record(1024, 8.0))


@pytest.fixture
def after(tmp_path: Path) -> Path:
    crash = Failure(kind="crash", phase="steps", message="planted")
    cells = [record(128, 0.5), record(256, 2.002), record(512, 5.0, failure=crash), record(64, 1.0)]
    return write(tmp_path / "after.jsonl", *cells)


def write(path: Path, *records: Record) -> Path:
    for one in records:
        Store(path).append(one)
    return path


def test_cell_by_cell(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(before), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "128" in lines[0]
    assert "faster: b's time over a's: ratio 0.500" in lines[0]
    assert "cannot tell: difference below the minimum effect" in lines[1]
    assert "cannot tell: b failed: crash in steps" in lines[2]
    assert lines[3:] == [f"only in {before}: 1 cell", f"only in {after}: 1 cell"]


def test_the_other_way_round(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(after), str(before)]) == 0
    assert "slower: b's time over a's: ratio 2.000" in capsys.readouterr().out


def test_a_smaller_minimum_effect(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    after = write(tmp_path / "after.jsonl", record(128, 1.02))
    assert app.run(["compare", str(before), str(after), "--minimum-effect", "0.01"]) == 0
    assert "slower" in capsys.readouterr().out
    assert app.run(["compare", str(before), str(after), "--minimum-effect", "0.05"]) == 0
    assert "cannot tell" in capsys.readouterr().out


def test_as_json(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(before), str(after), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in found] == ["faster", "cannot tell", "cannot tell"]
    assert [row["config"]["context"] for row in found] == [128, 256, 512]
    assert found[0]["config"]["model"] == "small"
    assert found[0]["ratio"] == pytest.approx(0.5)


def test_json_of_a_workload_with_nested_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nested = a_record(workload="own:X", config={"shape": {"sides": [1, 2]}})
    path = write(tmp_path / "own.jsonl", nested)
    assert app.run(["compare", str(path), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["config"] == {"shape": {"sides": [1, 2]}}


def test_unlike_machines(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    elsewhere = write(tmp_path / "l4.jsonl", record(128, 0.5, replace(ENVIRONMENT, gpu="NVIDIA L4")))
    assert app.run(["compare", str(before), str(elsewhere)]) == 2
    assert "gpu NVIDIA H200 against NVIDIA L4" in capsys.readouterr().err
    assert app.run(["compare", str(before), str(elsewhere), "--allow-mixed"]) == 0
    assert "faster" in capsys.readouterr().out


def test_a_cell_without_the_quantity_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with_forward = replace(record(128, 1.0), samples={name: seconds([1.0] * 10) for name in ("step", "forward")})
    path = write(tmp_path / "mixed.jsonl", with_forward, record(256, 2.0))
    assert app.run(["compare", str(path), str(path), "--quantity", "forward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "difference below the minimum effect" in lines[0]
    assert lines[1].endswith("cannot tell: a holds no forward; it holds step")
    assert app.run(["compare", str(path), str(path), "--quantity", "backward"]) == 2


def test_attention_is_compared_by_its_own_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    slow, fast = (attention(time_s=[time_s] * 10) for time_s in (0.002, 0.001))
    files = [str(write(tmp_path / f"{name}.jsonl", one)) for name, one in (("a", slow), ("b", fast))]
    assert app.run(["compare", *files]) == 0
    assert capsys.readouterr().out.startswith("trainstep 1024 64  ")
    assert app.run(["compare", *files, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["quantity"], found["verdict"], round(found["ratio"], 6)) == ("time_s", "faster", 0.5)
