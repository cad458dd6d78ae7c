"""What forward keeps by formula is what a step keeps on a CPU and on fake tensors, byte for byte, and what an H200 kept."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_step import count
from trainstep.config.model import ModelConfig, size
from trainstep.config.run import RunConfig
from trainstep.plan.activations import kept_by_category, kept_bytes
from trainstep.training.build import build_step

RECORDS = Path(__file__).parents[2] / "results/h200"
SHAPES = ((24, 40, 2, 3, 70, 2, 10), (16, 24, 1, 1, 33, 3, 7), (32, 48, 3, 4, 50, 1, 16), (16, 8, 2, 2, 9, 4, 5))
"""d_model, d_ff, layers, heads, vocabulary, batch, context; with a batch of 1 and one head, whose views need no copies."""


def saved_bytes(run: RunConfig) -> int:
    """Bytes of the storages that autograd saves in a forward, without parameters, buffers and batch."""
    assembly = build_step(run)
    [batch] = assembly.micro_batches(0)
    own = [*assembly.module.parameters(), *assembly.module.buffers(), *batch.values()]
    known, saved = {tensor.untyped_storage().data_ptr() for tensor in own}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _loss = assembly.step._forward(batch)
    return sum(storage.nbytes() for storage in saved.values())


def run_of(shape: tuple[int, ...], **options: object) -> RunConfig:
    d_model, d_ff, layers, heads, vocab_size, batch_size, context = shape
    model = ModelConfig(d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab_size=vocab_size)
    return RunConfig(model=model, batch_size=batch_size, context=context, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("precision", "attention"),
    list(product(("fp32", "bf16_autocast", "bf16"), ("plain", "sdpa", "trainstep"))),
)
def test_kept_bytes_are_what_autograd_saves(precision, attention, shape):
    run = run_of(shape, precision=precision, attention=attention)
    assert sum(kept_bytes(run, on_gpu=False).values()) == saved_bytes(run)


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Small runs of every precision, op, attention and recomputation whose kept bytes a CPU can count."""
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = (
        heads * draw(st.sampled_from((16, 32))),
        8 * draw(st.integers(1, 8)),
        layers,
        heads,
        draw(st.integers(2, 60)),
        draw(st.integers(1, 3)),
        draw(st.integers(2, 40)),
    )
    recompute = draw(st.sampled_from(("none", "selective", "narrow", "block")))
    every = 1 if recompute == "none" else draw(st.integers(1, 3))
    return run_of(
        shape,
        precision=draw(st.sampled_from(("fp32", "bf16_autocast", "bf16", "bf16_master"))),
        attention=draw(st.sampled_from(("plain", "trainstep"))),
        ops=draw(st.sampled_from(("plain", "fused"))),
        recompute=recompute,
        recompute_every=every,
        narrow_blocks=draw(st.integers(0, layers)) if recompute == "selective" and every == 1 else 0,
        mode="forward_backward",
    )


@pytest.mark.parametrize("ops", ["plain", "fused"])
@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_kept_bytes_are_those_of_fake_tensors(ops, recompute):
    run = run_of(
        (32, 48, 3, 2, 50, 2, 40), precision="bf16_autocast", attention="trainstep", ops=ops, recompute=recompute,
        mode="forward_backward",
    )  # fmt: skip
    assert sum(kept_bytes(run, on_gpu=False).values()) == count(run).kept


@pytest.mark.slow
@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_kept_bytes_of_random_runs_are_those_of_fake_tensors(run):
    assert sum(kept_bytes(run, on_gpu=False).values()) == count(run).kept


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast"])
@pytest.mark.parametrize("context", [128, 256, 512])
def test_kept_bytes_are_those_of_the_ledger_of_an_h200(precision, context):
    records = map(json.loads, (RECORDS / "memory.jsonl").read_text().splitlines())
    [ledger] = [
        record["tables"]["ledger"]
        for record in records
        if (record["config"]["precision"], record["config"]["context"], record["config"]["mode"])
        == (precision, context, "step")
    ]
    measured = dict(zip(ledger["line"], ledger["after forward"], strict=True))
    run = RunConfig(
        model=size("2.7B"), batch_size=4, context=context, precision=precision, attention="plain", device="cuda"
    )
    kept = kept_by_category(run)
    assert kept["autocast weight copies"] == measured["autocast weight copies"]
    loss_bytes = 4  # the ledger also counts the loss itself; and what the head keeps as its, not as an activation
    lines = ("activations", "autocast weight copies", "logits and loss")
    assert sum(kept.values()) == sum(measured[line] for line in lines) - loss_bytes


@pytest.mark.parametrize(
    ("file", "model", "context", "attention"),
    [("buckets", "xl", 256, "sdpa"), ("ddp_medium", "medium", 256, "sdpa"), ("captured_ranks", "xl", 512, "trainstep")],
)
def test_kept_bytes_of_compiled_blocks_are_those_of_an_h200(file, model, context, attention):
    points = json.loads((RECORDS / f"{file}.jsonl").read_text().splitlines()[0])["tables"]["memory_points"]
    rows = zip(points["rank"], points["point"], points["line"], points["bytes"], strict=True)
    [measured] = [nbytes for *place, nbytes in rows if place == [0, "after forward", "activations"]]
    run = RunConfig(
        model=size(model), batch_size=2, context=context, precision="bf16_autocast", attention=attention, compile="block",
        device="cuda",
    )  # fmt: skip
    batch_and_tables = 2 * 8 * 2 * context + 2 * context * size(model).head_dim // 2 * 4
    assert sum(kept_bytes(run).values()) + batch_and_tables == measured


@pytest.mark.parametrize("compiled", ["none", "block"])
@pytest.mark.parametrize("ops", ["plain", "fused"])
def test_stronger_recomputations_keep_less(compiled, ops):
    run = RunConfig(model=size("small"), ops=ops, compile=compiled, precision="bf16_autocast", device="cuda")
    kept = [sum(kept_bytes(replace(run, recompute=mode)).values()) for mode in ("none", "selective", "narrow", "block")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recompute_budget_gib": 4.0}, "recompute_budget_gib: is met by measuring"),
        ({"attention": "sdpa_math"}, "attention: sdpa_math has no formulas"),
    ],
)
def test_what_has_no_formula_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        kept_bytes(RunConfig(model=size("tiny"), **options))
