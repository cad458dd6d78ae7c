"""The file of a gate: whole blocks only, torn lines, other gates' files, locks."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainstep.records.gate_file import (
    BASE,
    HEAD,
    WARMUP,
    Ending,
    GateFile,
    Plan,
    Run,
    blocks_of,
    order_of,
    used_seconds,
)

PLAN = Plan(
    base="main at 1",
    head="HEAD at 2",
    command=("a", "b c"),
    measure="wall",
    threshold=0.02,
    budget_s=180.0,
    environment={"cpu": "x"},
)


def run(block: int, side: str, second: float = 1.0) -> Run:
    return Run(block=block, side=side, used_s=2.0, seconds={"wall time": second}, wall_s=second, cpu_s=0.5)


def block(number: int, base: float, head: float) -> list[Run]:
    return [run(number, side, base if side == BASE else head) for side in order_of(number)]


def test_what_is_written_is_read_again(tmp_path: Path):
    file = GateFile(tmp_path / "new" / "g.jsonl")
    ending = Ending(verdict="fail", reason="head: gone", output=("a", "b"), notes=("n",), is_over=True)
    with file.locked():
        assert file.open_for(PLAN) == ([], None)
        file.add(run(0, BASE))
        file.end(ending)
    with file.locked():
        assert file.open_for(PLAN) == ([run(0, BASE)], ending)


@pytest.mark.parametrize("kept", [1, 20, 60])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, kept: int):
    file = GateFile(tmp_path / "g.jsonl")
    with file.locked():
        file.open_for(PLAN)
        file.add(run(0, BASE))
        whole = file.path.read_bytes()
        file.add(run(0, HEAD))
        file.path.write_bytes(file.path.read_bytes()[: len(whole) + kept])
        assert file.open_for(PLAN)[0] == [run(0, BASE)]
        assert file.path.read_bytes() == whole


def test_a_plan_that_was_torn_begins_again(tmp_path: Path):
    file = GateFile(tmp_path / "g.jsonl")
    file.path.write_bytes(b'{"plan":{"ba')
    with file.locked():
        assert file.open_for(PLAN) == ([], None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "HEAD at 3"}, "its head is HEAD at 2 and not HEAD at 3"),
        ({"command": ("a", "b")}, "its command is a b c and not a b"),
        ({"budget_s": 600.0}, "its budget_s is 180.0 and not 600.0"),
        ({"environment": {"cpu": "y"}}, "its cpu is x and not y"),
    ],
)
def test_another_gates_file_is_refused_with_the_difference(tmp_path: Path, change, words: str):
    file = GateFile(tmp_path / "g.jsonl")
    file.open_for(PLAN)
    with pytest.raises(ValueError, match=words):
        file.open_for(replace(PLAN, **change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"used_s": 1e308}, "line 3: used_s cannot be 1e+308: it must be a number from 0 to 3155760000, a century"),
        ({"cpu_s": -1.0}, "line 3: cpu_s cannot be -1.0: it must be a number from 0"),
        ({"seconds": {"wall time": 1e308}}, "line 3: seconds of wall time cannot be 1e+308"),
        ({"seconds": {"wall time": "x"}}, "line 3: seconds of wall time cannot be 'x'"),
        ({"seconds": {"wall time": 0}}, "line 3: a cell took no time at all"),
        ({"seconds": {"another": 1.0}}, "its runs have different cells"),
        ({"seconds": 3}, "is not the file of a gate"),
        ({"block": "0"}, "line 3: a run has no side or no block"),
    ],
)
def test_a_run_with_impossible_values_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str):
    file = GateFile(tmp_path / "g.jsonl")
    file.open_for(PLAN)
    file.add(run(0, BASE))
    with open(file.path, "a") as written:
        written.write(json.dumps({"run": asdict(run(0, HEAD)) | change}) + "\n")
    with pytest.raises(ValueError, match=r"g\.jsonl: is not the file of a gate") as refused:
        file.read()
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "hello\n",
        "{}\n",
        "[1]\n",
        '{"plan": {}}\n',
        '{"plan": {"format": 2}}\n',
        "\x00\x01\n",
    ],
)
def test_other_files_are_refused_and_kept(tmp_path: Path, text: str):
    path = tmp_path / "g.jsonl"
    path.write_text(text)
    with GateFile(path).locked(), pytest.raises(ValueError, match=r"g.jsonl: "):
        GateFile(path).open_for(PLAN)
    assert path.read_text() == text


def test_a_second_gate_may_not_write_at_the_same_time(tmp_path: Path):
    first, second = GateFile(tmp_path / "g.jsonl"), GateFile(tmp_path / "g.jsonl")
    with first.locked(), pytest.raises(ValueError, match="another trainstep"), second.locked():
        pass


def test_a_block_is_the_mean_of_its_logs_in_either_order():
    times = [1.0, 1.2, 1.1, 1.3]  # base head head base
    runs = [run(0, side, second) for side, second in zip(order_of(0), times, strict=True)]
    [found] = blocks_of(runs)
    expected = (math.log(1.2) + math.log(1.1) - math.log(1.0) - math.log(1.3)) / 2
    assert found.log_ratios["wall time"] == pytest.approx(expected)
    mirrored = [run(1, side, second) for side, second in zip(order_of(1), times, strict=True)]
    assert blocks_of(mirrored)[0].log_ratios["wall time"] == pytest.approx(-expected)


def test_a_steady_drift_cancels_in_a_block():
    for number in (0, 1):
        runs = [run(number, side, math.exp(0.1 * place)) for place, side in enumerate(order_of(number))]
        assert blocks_of(runs)[0].log_ratios["wall time"] == pytest.approx(0.0)


def test_a_block_that_a_kill_cut_short_does_not_count_but_its_time_does():
    warm = [run(WARMUP, BASE), run(WARMUP, HEAD)]
    runs = [*warm, *block(0, 1.0, 2.0), *block(1, 1.0, 2.0)[:3], *warm, *block(1, 1.0, 3.0)]
    found = blocks_of(runs)
    assert [math.exp(entry.log_ratios["wall time"]) for entry in found] == pytest.approx([2.0, 3.0])
    assert found[-1].used_s == used_seconds(runs) == 2.0 * len(runs)
