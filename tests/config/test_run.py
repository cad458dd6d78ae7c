"""RunConfig: bad fields are refused by name, and an option that a device lacks is refused with one that it has."""

import dataclasses
from typing import Any

import pytest

from trainstep.config.model import UserModel, size
from trainstep.config.run import RunConfig

TINY = size("tiny")


def refusal(**fields: Any) -> str:
    with pytest.raises(ValueError) as caught:
        RunConfig(**{"model": TINY, **fields})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_has_its_defaults():
    run = RunConfig(model=TINY)
    assert (run.mode, run.precision, run.attention, run.compile, run.adamw) == ("step", "fp32", "sdpa", "none", "fused")
    assert (run.device, run.warmups, run.steps, run.sync, run.data) == ("cpu", 5, 10, "step", "random")
    assert run.trains
    assert not RunConfig(model=TINY, mode="forward_backward").trains


def test_tokens_of_a_step_are_batch_times_context_times_accumulation():
    assert RunConfig(model=TINY, batch_size=3, context=5, accumulation=7).tokens == 105


@pytest.mark.parametrize("field", ["batch_size", "context", "accumulation", "steps"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_counts_must_be_positive_integers(field: str, value: Any):
    assert refusal(**{field: value}).startswith(f"{field}: must be a whole number of at least 1, not {value!r}")


@pytest.mark.parametrize("field", ["warmups", "seed"])
def test_warmups_and_seed_may_be_zero(field: str):
    assert getattr(RunConfig(model=TINY, **{field: 0}), field) == 0
    assert refusal(**{field: -1}).startswith(f"{field}: must be a whole number of at least 0, not -1")


@pytest.mark.parametrize(
    ("field", "wrong", "meant"),
    [
        ("mode", "forwards", "forward"),
        ("precision", "bf16-autocast", "bf16_autocast"),
        ("attention", "spda", "sdpa"),
        ("compile", "blocks", "block"),
        ("adamw", "fuse", "fused"),
        ("device", "cdua", "cuda"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(field: str, wrong: str, meant: str):
    text = refusal(**{field: wrong})
    assert text.startswith(f"{field}: {wrong!r} is not known (did you mean {meant}?); known: ")


@pytest.mark.parametrize("field", ["learning_rate", "clip_grad_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rates_must_be_positive(field: str, value: float):
    assert refusal(**{field: value}).startswith(f"{field}: must be positive")


def test_windows_must_divide_the_steps():
    assert RunConfig(model=TINY, steps=10, sync=5).sync == 5
    assert refusal(steps=10, sync=3) == "sync: windows of 3 steps do not divide steps 10"
    for sync in (1, 0, -2, True, 2.0, None):
        assert refusal(sync=sync).startswith("sync: must be a whole number of at least 2")
    text = refusal(sync="phases")
    assert text == "sync: 'phases' is not known (did you mean phase?); known: step, phase, or a number of steps"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nvtx": True}, "nvtx: ranges need a GPU"),
        ({"precision": "tf32"}, "precision: tf32 is a mode of NVIDIA matrix units; on a CPU take fp32"),
        ({"attention": "sdpa_cudnn"}, "attention: sdpa_cudnn runs on CUDA only; on a CPU take sdpa"),
        ({"attention": "sdpa_efficient"}, "attention: sdpa_efficient runs on CUDA only"),
        ({"attention": "flex"}, "attention: flex has no backward on a CPU"),
    ],
)
def test_options_that_a_cpu_lacks_are_refused_with_an_alternative(fields: dict[str, Any], words: str):
    assert refusal(**fields).startswith(words)
    RunConfig(**{"model": TINY, "device": "cuda", "precision": "bf16", **fields})


def test_flex_forward_runs_on_a_cpu():
    assert RunConfig(model=TINY, attention="flex", mode="forward_no_grad").attention == "flex"


@pytest.mark.parametrize("attention", ["sdpa_flash", "sdpa_cudnn", "flash_attn_4"])
def test_backends_of_16_bits_refuse_fp32_on_cuda(attention: str):
    for precision in ("fp32", "tf32"):
        text = refusal(device="cuda", attention=attention, precision=precision)
        assert text.startswith(f"attention: {attention} takes 16-bit inputs")
    for precision in ("bf16", "bf16_autocast", "fp16_autocast"):
        RunConfig(model=size("small"), device="cuda", attention=attention, precision=precision)
    RunConfig(model=TINY, attention="sdpa_flash")


def test_flash_attn_4_needs_a_gpu_and_widths_that_it_has():
    assert refusal(attention="flash_attn_4").startswith("attention: flash_attn_4 runs on CUDA only")
    narrow = dataclasses.replace(TINY, d_model=2 * 20, heads=2)
    fields = {"attention": "flash_attn_4", "device": "cuda", "precision": "bf16"}
    assert "right for heads 64, 96 and 128 wide, not 20" in refusal(model=narrow, **fields)
    assert "not 80" in refusal(model=size("2.7B"), **fields), "its dq was wrong there"
    RunConfig(model=size("small"), **fields)
    RunConfig(model=narrow, device="cuda", precision="bf16")


@pytest.mark.parametrize(
    ("values", "instead"),
    [
        ({"compile": "model"}, "take another attention, or compile block or none"),
        ({"compile": "block", "recompute": "block"}, "would compile nothing; take another attention, or compile none"),
    ],
    ids=str,
)
def test_flash_attn_4_is_refused_where_nothing_would_be_compiled(values: dict[str, Any], instead: str):
    fields = {"model": size("small"), "device": "cuda", "precision": "bf16", **values}
    text = refusal(**fields, attention="flash_attn_4")
    assert text.startswith("compile: flash_attn_4 is not an operator of torch's")
    assert text.endswith(instead)
    RunConfig(**fields, attention="trainstep")


def test_text_needs_a_vocabulary_of_bytes():
    small = dataclasses.replace(TINY, vocab_size=255)
    assert refusal(model=small, data="stdlib").startswith("vocab_size: text is read as bytes and needs at least 256")
    RunConfig(model=small)
    RunConfig(model=TINY, data="stdlib")


def test_a_users_model_takes_no_data_option():
    assert refusal(model=UserModel(function="a:b"), data="stdlib").startswith("data: a model of your own brings")


@pytest.mark.parametrize("field", ["batch_size", "context", "accumulation", "steps", "warmups", "sync"])
@pytest.mark.parametrize("value", [2**40 + 1, 10**400])
def test_counts_over_2_to_the_40_are_refused(field: str, value: int):
    assert refusal(**{field: value}).startswith(f"{field}: must be at most 1099511627776, not 1")


def test_seeds_are_limited_to_those_of_torch():
    assert RunConfig(model=TINY, seed=2**63 - 1).seed == 2**63 - 1
    assert refusal(seed=2**63).startswith("seed: must be at most 9223372036854775807")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recompute": "selectiv"}, "did you mean selective"),
        ({"recompute_every": 2}, "recompute_every: has no effect without recompute"),
        ({"recompute": "block", "recompute_every": 0}, "recompute_every: must be a whole number of at least 1"),
        ({"loss_sum_dtype": "own"}, "loss_sum_dtype: only the fused loss sums by chunks; take ops fused"),
        ({"narrow_blocks": 1}, "narrow_blocks: only recompute selective has narrow blocks"),
        ({"narrow_blocks": 1, "recompute": "narrow"}, "take that, or leave narrow_blocks out"),
        ({"narrow_blocks": 1, "recompute": "selective", "recompute_every": 2}, "recompute_every leaves out blocks"),
        ({"narrow_blocks": 99, "recompute": "selective"}, "narrow_blocks: the model has 2 blocks, not 99"),
        ({"narrow_blocks": -1, "recompute": "selective"}, "narrow_blocks: must be a whole number of at least 0"),
        (
            {"recompute": "selective", "attention": "flex", "device": "cuda", "precision": "bf16"},
            "attention: flex compiles itself",
        ),
        (
            {"recompute": "narrow", "attention": "flash_attn_4", "device": "cuda", "precision": "bf16"},
            "attention: flash_attn_4 is not an operator of torch's",
        ),
        ({"recompute_budget_gib": 0.0}, "recompute_budget_gib: must be positive or none"),
        ({"recompute_budget_gib": 1.0, "recompute": "block"}, "recompute: is chosen by recompute_budget_gib"),
        ({"recompute_budget_gib": 1.0, "recompute_every": 2}, "recompute_every: is chosen by recompute_budget_gib"),
        ({"recompute_budget_gib": 1.0, "narrow_blocks": 1}, "narrow_blocks: is chosen by recompute_budget_gib"),
        ({"recompute_budget_gib": 1.0, "compile": "model"}, "take compile block or none"),
        ({"recompute_budget_gib": 1.0, "mode": "forward"}, "mode forward has no backward"),
        ({"recompute_budget_gib": 1.0, "update": "in_backward", "adamw": "trainstep"}, "take update after_backward"),
        (
            {"recompute_budget_gib": 1.0, "update": "in_backward"},
            "recompute_budget_gib: its measured backward must not",
        ),
    ],
    ids=str,
)
def test_recomputation_that_cannot_be_is_refused(fields: dict[str, Any], says: str):
    assert says in refusal(**fields)


def test_a_compiled_block_may_be_recomputed():
    assert RunConfig(model=TINY, recompute="block", compile="block").recomputes
    assert RunConfig(model=TINY, recompute_budget_gib=8.0).recomputes
    assert not RunConfig(model=TINY).recomputes
