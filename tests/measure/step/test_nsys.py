"""Steps under nsys: its command line, and the process that it profiles."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.step import nsys_steps
from trainstep.measure.step.nsys import CAPTURE_RANGE, export_command, steps_command

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 8, "batch_size": 1, "steps": 1}
CONFIG = build_config("profile", {**SMALL, "warmups": 1, "profiled_steps": 2})


def test_the_command_captures_the_profiled_steps(tmp_path: Path):
    command = steps_command(CONFIG, tmp_path / "50%.nsys-rep")
    assert command[:2] == ["nsys", "profile"]
    for option in (
        "--trace=cuda,nvtx",
        "--capture-range=nvtx",
        f"--nvtx-capture={CAPTURE_RANGE}",
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
        "--cuda-graph-trace=node",
        "--sample=none",
        f"--output={tmp_path}/50%%",
    ):
        assert option in command, option
    assert not [option for option in command if option.startswith(("--pytorch", "--python-backtrace"))]
    assert command[-5:-1] == [sys.executable, "-P", "-m", "trainstep.measure.step.nsys_steps"]
    assert json.loads(command[-1]) == to_plain(CONFIG)


def test_options_of_the_report_reach_the_command(tmp_path: Path):
    command = steps_command(CONFIG, tmp_path / "r.nsys-rep", pytorch="autograd-nvtx", python_backtrace=True)
    assert {"--pytorch=autograd-nvtx", "--python-backtrace=cuda", "--cudabacktrace=all"} <= set(command)
    assert "--sample=none" not in command, "stacks need sampling"
    assert export_command(tmp_path / "r.nsys-rep")[-2:] == [f"--output={tmp_path}/r.sqlite", f"{tmp_path}/r.nsys-rep"]


def test_the_capture_range_is_around_the_profiled_steps_only(monkeypatch: pytest.MonkeyPatch):
    """Inside the capture range, trainstep's spans are NVTX ranges."""
    opened: list[str] = []
    depth = 0

    @contextmanager
    def noted_range(name: str) -> Iterator[None]:
        nonlocal depth
        opened.append(f"{depth} {name}")
        depth += 1
        yield
        depth -= 1

    monkeypatch.setattr(torch.cuda.nvtx, "range", noted_range)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert nsys_steps.main(json.dumps(to_plain(CONFIG))) == 0
    assert opened[:3] == [f"0 {CAPTURE_RANGE}", "1 step 0", "2 forward"]
    assert [name for name in opened if name.startswith("0 ")] == [f"0 {CAPTURE_RANGE}"]
    assert [name for name in opened if name.startswith("1 ")] == ["1 step 0", "1 step 1"]
    assert opened.count("2 backward") == opened.count("2 optimizer") == 2


def test_a_failure_of_the_process_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "path", list(sys.path))
    absent = build_config("profile", {"model": "no_such_module:build", "steps": 1})
    assert nsys_steps.main(json.dumps(to_plain(absent))) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("trainstep: ")
    assert "no_such_module" in stderr
    assert stderr.count("\n") == 1
