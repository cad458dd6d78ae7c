"""The workload `memory` on a CPU accounts for every byte of a step, in every mode, as the model's shape gives them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from trainstep.capture.inputs import Baked
from trainstep.config.memory import MemoryConfig, RecordedRunConfig
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.parsing import from_plain, to_plain
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import Findings
from trainstep.measure.memory.tables import POINTS
from trainstep.measure.memory.workload import WORKLOAD
from trainstep.traces.snapshot import read_snapshot
from trainstep.training.build import Assembly

SHAPE = ModelConfig(d_model=32, d_ff=64, layers=3, heads=2, vocab_size=300)
STREAM_BYTES = 2 * 16 * 32 * 4


def measured(**fields: Any) -> Findings:
    config = from_plain(MemoryConfig, {"model": SHAPE, "batch_size": 2, "context": 16, "attention": "plain", **fields})
    assert from_plain(MemoryConfig, to_plain(config)) == config
    measurement = WORKLOAD.prepare(to_plain(config), lambda _stage: None)
    measurement.take(1)
    return measurement.finish()


def line(findings: Findings, name: str) -> dict[str, Any]:
    ledger = findings.tables["ledger"]
    row = list(ledger["line"]).index(name)
    return {moment: sizes[row] for moment, sizes in ledger.items() if moment != "line"}


def value(findings: Findings, name: str) -> Any:
    return findings.facts[name].value


@pytest.fixture(scope="module")
def step() -> Findings:
    return measured()


def test_a_step_is_accounted_for_to_the_byte(step: Findings):
    assert set(line(step, "allocated, unexplained").values()) == {0}
    assert value(step, "allocated_residual_share") == 0
    assert value(step, "peak_allocated_bytes") == line(step, "allocated")["peak"]
    assert not value(step, "history_full")


def test_sizes_follow_from_the_shape(step: Findings):
    weights = 4 * SHAPE.parameters
    assert set(line(step, "parameters").values()) == {weights}
    assert line(step, "gradients") | {"peak": 0} == {
        "init": 0,
        "after forward": 0,
        "after backward": weights,
        "after step": 0,
        "peak": 0,
    }
    assert line(step, "optimizer state")["init"] == 0
    assert line(step, "optimizer state")["after step"] == pytest.approx(2 * weights, rel=0.01)
    assert value(step, "parameter_bytes_each") == value(step, "gradient_bytes_each") == 4
    assert value(step, "optimizer_state_bytes_each") == pytest.approx(8, rel=0.01)
    assert value(step, "residual_stream_bytes") == STREAM_BYTES


def test_activations_belong_to_layers(step: Findings):
    layers = dict(zip(step.tables["layers"]["layer"], step.tables["layers"]["bytes"], strict=True))
    assert list(layers) == ["embedding", "layer 0", "layer 1", "layer 2", "norm"]
    assert layers["layer 0"] == layers["layer 1"] == layers["layer 2"] > 10 * STREAM_BYTES
    assert layers["embedding"] == STREAM_BYTES
    assert sum(layers.values()) == line(step, "activations")["after forward"]
    assert line(step, "activations")["after backward"] == 0


def test_the_timeline_keeps_the_peak_and_its_phases(step: Findings):
    table = step.tables["timeline"]
    assert len(table["time_s"]) <= POINTS + 8
    assert list(table["time_s"]) == sorted(table["time_s"])
    categories = [name for name in table if name not in ("time_s", "phase")]
    totals = [sum(sizes) for sizes in zip(*(table[name] for name in categories), strict=True)]
    assert max(totals) == value(step, "timeline_peak_bytes")
    assert [phase for phase in dict.fromkeys(table["phase"]) if phase in step.tables["peaks"]["phase"]] == [
        "forward",
        "backward",
        "optimizer",
    ]


def test_largest_allocations_have_a_place(step: Findings):
    table = step.tables["allocations"]
    totals = [size * count for size, count in zip(table["bytes"], table["count"], strict=True)]
    assert totals == sorted(totals, reverse=True)
    assert any("aten::mm" in stack and "layer 0" in stack for stack in table["stack"])


def test_small_allocations_are_hidden():
    assert not measured(min_share=1.0).tables["allocations"]["bytes"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "forward_no_grad"},
        {"mode": "forward"},
        {"mode": "forward_backward", "accumulation": 2},
        {"precision": "bf16"},
        {"precision": "bf16_master", "adamw": "trainstep"},
        {"update": "in_backward", "adamw": "trainstep"},
        {"precision": "bf16_autocast", "clip_grad_norm": 1.0},
        {"precision": "bf16_autocast", "mode": "forward_no_grad"},
        {"recompute": "block"},
        {"recompute": "selective", "precision": "bf16_autocast"},
        {"adamw": "foreach", "warmups": 2},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_every_mode_and_option_is_accounted_for(fields: dict[str, Any]):
    findings = measured(**fields)
    assert {
        unexplained for unexplained in line(findings, "allocated, unexplained").values() if unexplained is not None
    } == {0}
    assert line(findings, "workspaces")["after step"] == 0
    assert line(findings, "temporaries")["after step"] == 0


def test_recomputing_keeps_one_stream_tensor_per_layer():
    stored, recomputed = measured(), measured(recompute="block")
    assert line(recomputed, "activations")["after forward"] < 0.3 * line(stored, "activations")["after forward"]
    layers = dict(zip(recomputed.tables["layers"]["layer"], recomputed.tables["layers"]["bytes"], strict=True))
    assert layers["layer 1"] - STREAM_BYTES < 0.5 * 16384  # the state of the random numbers is kept too
    assert recomputed.facts["peak_allocated_bytes"].value < stored.facts["peak_allocated_bytes"].value


@pytest.mark.parametrize(("precision", "each"), [("fp32", (4, 4, 8)), ("bf16", (2, 2, 4)), ("bf16_master", (2, 2, 12))])
def test_bytes_of_a_parameter_follow_the_precision(precision: str, each: tuple[int, int, int]):
    findings = measured(precision=precision)
    names = ("parameter_bytes_each", "gradient_bytes_each", "optimizer_state_bytes_each")
    assert [value(findings, name) for name in names] == pytest.approx(list(each), rel=0.01)


def test_an_update_in_backward_never_holds_all_gradients():
    """The largest part is the embedding or the head; after backward no gradient is left."""
    plain, updated = (measured(adamw="trainstep", update=update) for update in ("after_backward", "in_backward"))
    assert line(updated, "gradients")["after backward"] == 0 < line(plain, "gradients")["after backward"]
    largest = 4 * max(SHAPE.vocab_size * SHAPE.d_model, 4 * SHAPE.d_model**2 + 3 * SHAPE.d_model * SHAPE.d_ff)
    held = updated.tables["timeline"]["gradients"]
    assert 0 < max(held) <= largest + 4 * 2 * SHAPE.d_model
    assert max(plain.tables["timeline"]["gradients"]) == 4 * SHAPE.parameters


def test_autocast_keeps_copies_of_weights():
    findings = measured(precision="bf16_autocast")
    matrices = SHAPE.parameters - SHAPE.parameter_counts()["embedding"] - SHAPE.parameter_counts()["norms"]
    assert line(findings, "autocast weight copies")["after forward"] == 2 * matrices
    assert line(findings, "autocast weight copies")["after step"] == 0


def test_a_full_ring_gives_no_peak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainstep.measure.memory.history._CpuHistory.ring_entries", 100)
    findings = measured()
    assert value(findings, "history_full")
    assert not findings.tables
    assert not {"timeline_peak_bytes", "peak_allocated_bytes"} & set(findings.facts)


def test_a_users_model_has_a_ledger_by_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "class Part(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).relu()\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.parts = torch.nn.ModuleList(Part(8, 8) for _ in range(3))\n"
        "    def forward(self, x):\n"
        "        for part in self.parts:\n"
        "            x = part(x)\n"
        "        return x.square().mean()\n"
        "def build(run, device):\n"
        "    return Own().to(device), lambda step: {'x': torch.ones(run.batch_size, 8, device=device)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    findings = measured(model=UserModel(function="own_model:build"))
    assert line(findings, "parameters")["after step"] == 4 * 3 * 72
    assert set(line(findings, "allocated, unexplained").values()) == {0}
    assert {"parts.0", "parts.1", "parts.2"} <= set(findings.tables["layers"]["layer"])
    assert "residual_stream_bytes" not in findings.facts


def test_a_kept_snapshot_is_readable_here_and_in_the_viewer(tmp_path: Path):
    findings = measured(keep_snapshot=str(tmp_path / "kept"))
    path = Path(findings.facts["snapshot"].value)
    assert path.parent == tmp_path / "kept"
    assert path.read_bytes()[:2] == b"\x80\x04"  # the viewer cannot read protocol 5
    assert {"segments", "device_traces"} <= set(pickle.loads(path.read_bytes()))
    assert read_snapshot(path).events


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"min_share": 2.0}, "min_share"), ({"warmups": 0}, "warmups"), ({"recompute": "all"}, "recompute")],
)
def test_impossible_configs_are_refused(fields: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        from_plain(MemoryConfig, {"model": SHAPE, **fields})


def test_a_field_that_the_config_has_no_use_for_is_refused():
    run = RecordedRunConfig(model=SHAPE, learning_rate=1e-3)
    with pytest.raises(ValueError, match="learning_rate: has no meaning in a MemoryConfig; leave it at"):
        MemoryConfig(run=run)


@pytest.mark.parametrize("warmups", [1, 3, 20])
def test_the_step_that_is_captured_is_recorded(step: Findings, warmups: int):
    captured = measured(capture="step", adamw="trainstep", warmups=warmups)
    assert value(captured, "captured") == "step"
    assert captured.tables["peaks"]["phase"] == step.tables["peaks"]["phase"]
    assert line(captured, "parameters") == line(step, "parameters")
    assert line(captured, "gradients")["after backward"] == line(step, "gradients")["after backward"]
    assert line(captured, "optimizer state")["init"] == 0
    assert value(captured, "allocated_residual_share") == 0


def test_a_step_that_cannot_be_captured_is_recorded_eagerly():
    # On a CPU trainstep's AdamW asks the host whether scaled gradients are finite.
    values = {"precision": "fp16_autocast", "adamw": "trainstep"}
    eager, left_out = measured(**values), measured(capture="auto", **values)
    assert value(left_out, "captured") == "nothing"
    assert "found_inf.item()" in value(left_out, "capture_left_out")
    for name in ("parameters", "gradients", "optimizer state", "activations", "logits and loss"):
        assert line(left_out, name) == line(eager, name)
    with pytest.raises(CellFailed, match="found_inf") as failed:
        measured(capture="step", **values)
    assert failed.value.failure.kind == "unsupported"


def test_if_the_capture_itself_fails_the_step_behind_it_is_recorded(step: Findings, monkeypatch: pytest.MonkeyPatch):
    reasons = iter([None, "it was the capture"])  # of the watched step, and of the captured one
    monkeypatch.setattr(Baked, "not_again", lambda *_args, **_options: next(reasons))
    failed = measured(capture="auto", adamw="trainstep")
    assert "it was the capture" in value(failed, "capture_left_out")
    assert line(failed, "activations")["after forward"] == line(step, "activations")["after forward"]
    assert failed.tables["peaks"]["phase"] == step.tables["peaks"]["phase"]


@pytest.mark.slow
def test_steps_of_ever_new_shapes_are_recorded_as_not_captured(monkeypatch: pytest.MonkeyPatch):
    whole = Assembly.micro_batches

    def cut(assembly: Assembly, step: int) -> list[dict[str, torch.Tensor]]:
        return [{name: rows[:, : 16 - step % 16] for name, rows in batch.items()} for batch in whole(assembly, step)]

    monkeypatch.setattr(Assembly, "micro_batches", cut)
    left_out = measured(capture="auto", adamw="trainstep")
    assert value(left_out, "captured") == "nothing"
    assert "differ in shape" in value(left_out, "capture_left_out")
    with pytest.raises(CellFailed, match="differ in shape"):
        measured(capture="step", adamw="trainstep")
    assert not torch.autograd.profiler._is_profiler_enabled, "the recorder of a cell that failed is off"
