"""`trainstep compare`: two files of records, cell by cell."""

import json
import re
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
    for entry in records:
        Store(path).append(entry)
    return path


def cells_of(line: str) -> list[str]:
    """The cells of a printed row, which two or more spaces separate."""
    return re.split(r" {2,}", line.strip())


def test_each_cell_gets_a_ratio_and_a_verdict(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    verdict, _, *lines = out.splitlines()
    assert verdict.startswith("The second file's step is faster in 1 of 2 cells (0.500 of the time)")
    assert (
        "small 512 ran before and fails in the second file (crash). `trainstep bench --compare` interleaves" in verdict
    )
    titles = ["cell", "before (ms)", "after (ms)", "ratio", "99 % interval", "verdict"]
    assert cells_of(lines[0]) == titles
    first, second, third = map(cells_of, lines[2:5])
    assert (first[:4], first[-1]) == (["small 128", "1,004", "502.2", "0.500"], "faster")
    assert (second[:4], second[-1]) == (["small 256", "2,009", "2,011", "1.001"], "under 2 %")
    assert third == ["small 512", "4,018", "crash", "–", "–", "cannot tell"]
    assert "small 256: difference below the minimum effect" in out
    assert "small 512: b failed: crash in steps" in out
    assert "The two files were not interleaved" in out
    assert lines[-2:] == [f"only in {before}: 1 cell", f"only in {after}: 1 cell"]


def test_the_table_fits_80_columns(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(before), str(after)]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 80
    places = [{line.index(word) for line in table if word in line} for word in ("verdict", "faster", "cannot tell")]
    assert len(set.union(*places)) == 1, "verdicts stand in one column"


def test_swapped_files_give_the_inverse_ratio(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(after), str(before)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("small 128"))
    assert line.split()[-1] == "slower"
    assert "2.000" in line


@pytest.mark.parametrize(
    ("step_s", "words", "code"),
    [
        (1.0, ["--fail-if-slower"], 0),
        (1.05, [], 0),
        (1.05, ["--fail-if-slower"], 1),
        (1.05, ["--fail-if-slower", "4"], 1),
        (1.05, ["--fail-if-slower=4"], 1),
        (1.05, ["--fail-if-slower", "4%"], 1),
        (1.05, ["--fail-if-slower", "5"], 0),
        (1.05, ["--fail-if-slower", "--minimum-effect", "0.1"], 0),
        (1.05, ["--fail-if-slower", "--json"], 1),
        (0.5, ["--fail-if-slower"], 0),
        (1.05, ["--fail-if-slower", "-1"], 2),
        (1.05, ["--fail-if-slower", "nan"], 2),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["option first", "files first"])
def test_fail_if_slower_decides_the_exit_code(
    before: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step_s: float,
    words: list[str],
    code: int,
    first: bool,
):
    after = write(tmp_path / "after.jsonl", record(128, step_s), record(256, 2.0))
    files = [str(before), str(after)]
    assert app.run(["compare", *(words + files if first else files + words)]) == code
    printed = capsys.readouterr()
    if code == 1:
        assert "small 128: slower, ratio 1.050" in printed.err
        assert "small 256" not in printed.err
    if code == 2:
        assert printed.err.startswith("trainstep: fail_if_slower: must be a percentage of at least 0")


def test_a_cell_that_fails_now_fails_the_gate(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(before), str(after), "--fail-if-slower"]) == 1
    assert capsys.readouterr().err.endswith("small 512: crash in steps, where it ran before\n")
    assert app.run(["compare", str(after), str(after), "--fail-if-slower"]) == 0, "it failed before, too"


def test_files_without_a_common_cell_are_refused_with_the_fields_that_differ(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The refusal names the fields that differ; where both files have every value, those of the two nearest cells."""

    def refusal(*records: Record) -> str:
        path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", *records)
        assert app.run(["compare", str(before), str(path)]) == 2
        error = capsys.readouterr().err
        assert "no cell in common: " in error, error
        return error.partition("no cell in common: ")[2]

    assert refusal(varied(context=128, steps=30)) == "they differ in steps (10; 30)\n"
    assert refusal(varied(context=64)) == "they differ in context (128, 256, 512, 1024; 64)\n"
    words = refusal(varied(context=128, steps=10, seed=1), varied(context=64, seed=0, steps=30))
    assert words == "the nearest two differ in seed (0; 1)\n"
    other = a_record(workload="own:X", config={"size": 1})
    assert refusal(other) == "they differ in workload (train_step; own:X)\n"
    old = {name: value for name, value in varied(context=64).config.items() if name != "capture"}
    words = refusal(a_record(key="old", config=old))
    assert words.startswith("they differ in"), words


def test_an_empty_file_is_refused(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty.jsonl").touch()
    assert app.run(["compare", str(before), str(tmp_path / "empty.jsonl")]) == 2
    assert capsys.readouterr().err == f"trainstep: {tmp_path / 'empty.jsonl'}: holds no records\n"


def test_machines_are_named_only_where_cells_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The file holds cells that were measured at two commits."""
    other = replace(ENVIRONMENT, commit="0123456789abcdef")
    path = write(tmp_path / "two.jsonl", record(128, 1.0), record(256, 2.0, other))
    assert app.run(["compare", str(path), str(path)]) == 0
    out = capsys.readouterr().out
    assert "small 256" in [cells_of(line)[0] for line in out.splitlines()]
    assert "commit" not in out


def varied(**fields: object) -> Record:
    config = to_plain(build_run({"model": "small", **fields}))
    return a_record(key=config_hash("train_step", config), config=config)


def test_the_minimum_effect_decides_the_verdict(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    after = write(tmp_path / "after.jsonl", record(128, 1.02))
    assert app.run(["compare", str(before), str(after), "--minimum-effect", "0.01"]) == 0
    assert "slower" in capsys.readouterr().out
    assert app.run(["compare", str(before), str(after), "--minimum-effect", "0.05"]) == 0
    assert "under 5 %" in capsys.readouterr().out


def test_json_rows_hold_config_times_and_verdict(before: Path, after: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["compare", str(before), str(after), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["verdict"] for row in rows] == ["faster", "cannot tell", "cannot tell"]
    assert [row["config"]["context"] for row in rows] == [128, 256, 512]
    assert (rows[0]["before_s"], rows[0]["after_s"]) == (pytest.approx(1.0045), pytest.approx(0.50225))
    assert (rows[2]["before_s"], rows[2]["after_s"]) == (pytest.approx(4.018), None)
    assert rows[0]["config"]["model"] == "small"
    assert rows[0]["ratio"] == pytest.approx(0.5)


def test_json_keeps_the_nested_config_of_a_users_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nested = a_record(workload="own:X", config={"shape": {"sides": [1, 2]}})
    path = write(tmp_path / "own.jsonl", nested)
    assert app.run(["compare", str(path), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["config"] == {"shape": {"sides": [1, 2]}}


def test_different_machines_are_refused_unless_allowed(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    elsewhere = write(tmp_path / "l4.jsonl", record(128, 0.5, replace(ENVIRONMENT, gpu="NVIDIA L4")))
    assert app.run(["compare", str(before), str(elsewhere)]) == 2
    assert "gpu NVIDIA H200 against NVIDIA L4" in capsys.readouterr().err
    assert app.run(["compare", str(before), str(elsewhere), "--allow-mixed"]) == 0
    assert "faster" in capsys.readouterr().out


def test_a_cell_without_the_quantity_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with_forward = replace(record(128, 1.0), samples={name: seconds([1.0] * 10) for name in ("step", "forward")})
    path = write(tmp_path / "mixed.jsonl", with_forward, record(256, 2.0))
    assert app.run(["compare", str(path), str(path), "--quantity", "forward"]) == 0
    out = capsys.readouterr().out
    assert "small 128: difference below the minimum effect" in out
    assert "small 256: a has no forward; it has step" in out
    assert app.run(["compare", str(path), str(path), "--quantity", "backward"]) == 2


def test_attention_is_compared_by_its_own_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    slow, fast = (attention(time_s=[time_s] * 10) for time_s in (0.002, 0.001))
    files = [str(write(tmp_path / f"{name}.jsonl", entry)) for name, entry in (("a", slow), ("b", fast))]
    assert app.run(["compare", *files]) == 0
    assert "trainstep 1024 64" in [cells_of(line)[0] for line in capsys.readouterr().out.splitlines()]
    assert app.run(["compare", *files, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["quantity"], row["verdict"], round(row["ratio"], 6)) == ("time_s", "faster", 0.5)
