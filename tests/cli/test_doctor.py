"""`trainstep doctor` on simulated machines: the text, the JSON, the measured ceilings, and what is refused."""

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_nvml import FakeNvml, install
from sources import ROOT
from trainstep.cli import app
from trainstep.cli import doctor as verb
from trainstep.config.collective import KINDS
from trainstep.config.grid import Cell
from trainstep.measure.machine import environment as environment_module
from trainstep.measure.machine import inspection
from trainstep.measure.machine.device import Probe
from trainstep.measure.machine.environment import environment
from trainstep.records.record import Fact, Failure, Record, record_from_plain
from trainstep.records.store import Store

H200 = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_bytes": 2**30,
    "sms": 132,
    "l2_bytes": 50 * 2**20,
    "shared_memory_per_sm_bytes": 228 * 2**10,
    "shared_memory_per_block_bytes": 227 * 2**10,
    "registers_per_sm": 65536,
    "peers": [1],
}
WORKING = Probe(cuda_available=True, devices=(H200, H200), threads=8, cpu_capability="AVX512")
CPU_ONLY = Probe(threads=8)


def machine(
    monkeypatch: pytest.MonkeyPatch,
    *gpus: str,
    probe: Probe = CPU_ONLY,
    torch: tuple[str | None, str | None] = ("2.13.0+cu130", "13.0"),
    cuda: int = 13000,
) -> None:
    """Simulate a machine: its driver shows these GPUs, this torch is installed, and the probe finds this."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, FakeNvml(*gpus, cuda=cuda) if gpus else None)
    monkeypatch.setattr(inspection, "probe_device", lambda: probe)
    monkeypatch.setattr(environment_module, "torch_build", lambda: torch)


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is calibrated, which takes seconds; one test does it."""
    monkeypatch.setattr(verb, "measure_calibration", lambda cells: [])


def record(cell: Cell, rate: float | None) -> Record:
    unit = "flop/s" if cell.config["kind"] == "matmul" else "bytes/s"
    failure = Failure(kind="crash", phase="build", message="no room") if rate is None else None
    facts = {} if rate is None else {"rate": Fact(value=rate, unit=unit), "counted": Fact(value="words")}
    return Record(
        workload="ceiling",
        key=cell.key,
        config=cell.config,
        environment=environment(),
        started_at="2026-11-20T00:00:00Z",
        duration_s=1.0,
        facts=facts,
        failure=failure,
    )


def as_json(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    verb.doctor(json=True, **options)
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_a_machine_without_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch, torch=("2.13.0+cpu", None))
    verb.doctor()
    printed = capsys.readouterr().out
    for words in ("none (no NVIDIA driver)", "2.13.0+cpu (CPU build)", "git", "C++ compiler", "records"):
        assert words in printed
    assert printed.startswith("trainstep measures here on the CPU (")
    assert ", where every verb but tune runs. Missing here: " in printed
    assert "\x1b" not in printed


def test_two_gpus_are_described_with_their_data_sheet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine(monkeypatch, "NVIDIA H200", "NVIDIA H200", probe=WORKING)
    verb.doctor()
    printed = capsys.readouterr().out
    for words in (
        "2 visible, driver 570.86.15, for CUDA up to 13.0",
        "GPU 1: NVIDIA H200",
        "132",
        "50 MiB",
        "228 KiB",
        "227 KiB",
        "65,536",
        "bf16 990 TFLOP/s",
        "memory 4.8 TB/s",
        "NVIDIA H200 data sheet, dense",
    ):
        assert words in printed


def test_an_unknown_gpu_has_no_data_sheet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch, "NVIDIA X1", probe=WORKING)
    verb.doctor()
    assert "unknown, so there is no MFU" in capsys.readouterr().out


def test_json_holds_device_gpus_and_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch, "NVIDIA H200", "NVIDIA H200", probe=WORKING)
    described = as_json(capsys)
    assert next(iter(described)) == "answer"
    [answer] = described["answer"]
    assert answer["verdict"].startswith("trainstep measures here on 2 GPUs (NVIDIA H200).")
    assert answer["suggestion"].startswith("`trainstep bench` times a step of small; `trainstep doctor --measure` ")
    assert described["problem"] is None
    assert described["device"] == "cuda"
    assert described["gpus"][0]["data_sheet"]["peak_flops"]["bf16"] == 990e12
    assert described["environment"]["gpu_count"] == 2
    assert described["ceilings"] == []


def test_visible_devices_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch, "NVIDIA H200", "NVIDIA L4", probe=Probe(cuda_available=True, devices=(H200,), threads=8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu["name"] for gpu in as_json(capsys)["gpus"]] == ["NVIDIA L4"]


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch, "NVIDIA H200", torch=("2.13.0+cpu", None), cuda=12080)
    with pytest.raises(ValueError, match="CPU build; install a build for CUDA 12"):
        verb.doctor(json=True)
    described = json.loads(capsys.readouterr().out)
    assert described["answer"][0]["verdict"].startswith(f"trainstep cannot measure here: {described['problem']}")
    assert "570.86.15" in described["problem"]
    assert as_json(capsys, device="cpu")["problem"] is None


def test_a_torch_that_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch, probe=Probe(error="torch does not import: libgomp.so.1 is missing"))
    with pytest.raises(ValueError, match=r"libgomp\.so\.1 is missing"):
        verb.doctor()
    assert "libgomp.so.1 is missing" in capsys.readouterr().out


def test_what_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch)
    monkeypatch.setattr(inspection, "installed_version", lambda name: None if name == "submitit" else "1.0")
    monkeypatch.setattr(inspection.shutil, "which", lambda command: "bin/c++" if command == "c++" else None)
    verb.doctor()
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    assert "pip install 'trainstep[slurm]'" in rows["submitit"]
    assert rows["C++ compiler"].strip() == "bin/c++"
    assert rows["nsys"].strip().startswith("missing")


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_line_is_printed_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
):
    printed_first = []

    def inspect(**_: Any) -> dict[str, Any]:
        printed_first.append(capsys.readouterr().err)
        raise ValueError("that is enough")

    monkeypatch.setattr(inspection, "inspect_machine", inspect)
    with pytest.raises(ValueError, match="that is enough"):
        verb.doctor(quiet=quiet)
    assert printed_first == [
        "" if quiet else "asking torch what it can do here: it is imported in a process of its own\n"
    ]


def test_every_extra_that_doctor_names_exists():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {install.split("[")[1].split("]")[0] for _, install, _ in inspection._PACKAGES if "[" in install}
    assert named <= declared.keys()


def test_a_terminal_shows_brackets_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch)
    monkeypatch.setattr(inspection, "installed_version", lambda name: None if name == "transformers" else "1.0")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    verb.doctor()
    printed = capsys.readouterr().out
    assert "machine" in printed
    assert "[hf]" in printed, "brackets are text, not rich's markup"


def test_each_device_has_its_ceiling_cells():
    on_cpu, on_gpu = inspection.ceiling_cells("cpu"), inspection.ceiling_cells("cuda", 3)
    assert {cell.config["device"] for cell in on_cpu} == {"cpu"}
    assert {cell.config["kind"] for cell in on_cpu} == {"matmul", "copy"}
    assert {cell.config["kind"] for cell in on_gpu} == set(KINDS)
    assert [cell.config["dtype"] for cell in on_gpu if cell.config["kind"] == "matmul"] == [
        "fp32",
        "tf32",
        "bf16",
        "fp16",
    ]
    assert [cell.config["peer"] for cell in on_gpu if cell.config["kind"] == "peer_copy"] == [1, 2]
    assert "peer_copy" not in {cell.config["kind"] for cell in inspection.ceiling_cells("cuda", 1)}
    assert len({cell.key for cell in on_gpu}) == len(on_gpu)


def test_measured_ceilings_stand_beside_the_data_sheet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine(monkeypatch, "NVIDIA H200", "NVIDIA H200", probe=WORKING)
    rates = {"matmul": 495e12, "copy": 4.32e12, "host_to_device": 55e9, "device_to_host": None, "peer_copy": 380e9}
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: [record(c, rates[c.config["kind"]]) for c in cells])
    verb.doctor(measure=True)
    printed = capsys.readouterr().out
    for words in (
        "495 TFLOP/s of 990 TFLOP/s on the data sheet (50%)",
        "495 TFLOP/s of 495 TFLOP/s on the data sheet (100%)",
        "4.32 TB/s of 4.8 TB/s on the data sheet (90%)",
        "55 GB/s",
        "failed: no room",
        "peer copy to GPU 1",
    ):
        assert words in printed
    ceilings = as_json(capsys, measure=True)["ceilings"]
    by_kind = {row["kind"]: row for row in ceilings}
    assert by_kind["copy"]["of_data_sheet"] == pytest.approx(0.9)
    assert by_kind["host_to_device"]["of_data_sheet"] is None
    assert by_kind["device_to_host"]["failure"] == "no room"


def test_a_cpu_is_not_compared_with_the_data_sheet_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine(monkeypatch, "NVIDIA H200", probe=WORKING)
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: [record(cell, 1e11) for cell in cells])
    ceilings = as_json(capsys, measure=True, device="cpu")["ceilings"]
    assert ceilings
    assert all(row["of_data_sheet"] is None for row in ceilings)


def test_measured_ceilings_are_appended_to_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    machine(monkeypatch)
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: [record(cell, 1e11) for cell in cells])
    out = tmp_path / "new" / "ceilings.jsonl"
    for times in (1, 2):
        verb.doctor(measure=True, out=out)
        assert len(Store(out).read()) == times * len(inspection.ceiling_cells("cpu", 0))


@pytest.mark.parametrize(
    "text", ["a note", "a note\n", '{"workload":"mine"}', '{"a": 1}\n', "\0" * 100], ids=lambda text: repr(text[:12])
)
def test_a_file_that_holds_no_records_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
):
    machine(monkeypatch)
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: pytest.fail("measured"))
    out = tmp_path / "notes.jsonl"
    out.write_text(text)
    with pytest.raises(ValueError, match=r"notes\.jsonl: line 1"):
        verb.doctor(measure=True, out=out)
    assert out.read_text() == text


def test_a_locked_store_and_a_path_that_is_no_regular_file_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    machine(monkeypatch)
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: pytest.fail("measured"))
    out = tmp_path / "runs.jsonl"
    with Store(out).locked(), pytest.raises(ValueError, match="another trainstep is writing to it"):
        verb.doctor(measure=True, out=out)
    for path in (Path("/dev/null"), tmp_path, Path("/")):
        with pytest.raises(ValueError, match=r"is not a regular file|is a folder"):
            verb.doctor(measure=True, out=path)


def test_a_calibration_is_kept_beside_the_ceilings_and_planned_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    machine(monkeypatch)
    shipped = json.loads((ROOT / "src/trainstep/plan/time/calibrations/h200.json").read_text())
    asked: list[Cell] = []

    def calibrated(cells: list[Cell]) -> list[Record]:
        asked.extend(cells)
        return [record_from_plain(shipped)]

    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: [record(cell, 1e11) for cell in cells])
    monkeypatch.setattr(verb, "measure_calibration", calibrated)
    out = tmp_path / "here.jsonl"
    verb.doctor(measure=True, out=out)
    printed = capsys.readouterr().out
    assert printed.startswith("This machine reaches ")
    assert "in bf16 matmuls" in printed
    assert [cell.workload for cell in asked] == ["calibration"]
    assert app.run(["plan", "--model", "tiny", "--calibration", str(out)]) == 0
    assert f"measured on NVIDIA H200, {out}" in capsys.readouterr().out


def test_a_calibration_that_failed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(monkeypatch)
    failure = Failure(kind="crash", phase="host", message="it fell over")
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: [record(cell, 1e11) for cell in cells])
    monkeypatch.setattr(
        verb,
        "measure_calibration",
        lambda cells: [replace(record(cell("matmul"), 1e11), workload="calibration", facts={}, failure=failure)],
    )
    verb.doctor(measure=True, quiet=True)
    assert "calibration: was not measured: it fell over" in capsys.readouterr().err


def cell(kind: str) -> Cell:
    return next(cell for cell in inspection.ceiling_cells("cpu") if cell.config["kind"] == kind)


def test_messages_are_measured_where_there_are_several_gpus():
    cells = inspection.calibration_cells("cuda", 2)
    assert {cell.workload for cell in cells} == {"calibration", "collective"}
    assert {cell.config["ranks"] for cell in cells[1:]} == {2}
    assert len({cell.key for cell in cells}) == len(cells)
    assert [cell.workload for cell in inspection.calibration_cells("cuda", 1)] == ["calibration"]


def test_nothing_is_measured_after_a_problem(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, "NVIDIA H200", torch=("2.13.0+cpu", None))
    monkeypatch.setattr(verb, "measure_ceilings", lambda cells: pytest.fail("measured on the wrong device"))
    with pytest.raises(ValueError, match="CPU build"):
        verb.doctor(measure=True)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (990e12, "flop/s", "990 TFLOP/s"),
        (2250e12, "flop/s", "2250 TFLOP/s"),
        (3.35e12, "bytes/s", "3.35 TB/s"),
        (55.31e9, "bytes/s", "55.3 GB/s"),
        (0.4e9, "bytes/s", "0.4 GB/s"),
        (999.7e9, "bytes/s", "1000 GB/s"),
    ],
)
def test_rates_in_words(value: float, unit: str, text: str):
    assert verb._rate(value, unit) == text
