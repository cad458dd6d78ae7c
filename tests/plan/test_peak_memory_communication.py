"""The options of a config reach the formulas of costs/."""

import pytest

from trainstep.config.model import ModelConfig
from trainstep.config.parallel import PEERS, ParallelConfig
from trainstep.config.parsing import from_plain
from trainstep.costs.gradient_sync import totals
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.peak_memory import exchange_of, expected_messages

MODEL = ModelConfig(d_model=64, d_ff=128, layers=3, heads=2, vocab_size=256)
SIZES = transformer_parameters(MODEL, "fp32")


def operations(**options: object) -> dict[str, tuple[int, int]]:
    messages = expected_messages(from_plain(ParallelConfig, {"model": MODEL, "ranks": 2, **options}), SIZES)
    assert messages is not None
    return {name: (total.messages, total.payload_bytes) for name, total in totals(messages).items()}


@pytest.mark.parametrize("sync", PEERS)
def test_torchs_strategies_have_no_formula(sync: str):
    assert exchange_of(from_plain(ParallelConfig, {"model": MODEL, "sync": sync})) is None
    assert expected_messages(from_plain(ParallelConfig, {"model": MODEL, "sync": sync}), SIZES) is None


def test_bucket_sizes_and_the_reduce_dtype_change_messages():
    in_fp32 = operations(sync="bucketed")["all_reduce"]
    assert in_fp32 == (1, 4 * (MODEL.parameters + len(SIZES)))
    assert operations(sync="bucketed", reduce_dtype="bf16")["all_reduce"] == (1, in_fp32[1] // 2)
    assert operations(sync="bucketed", bucket_mib=0.1)["all_reduce"][0] > 1
    assert operations(sync="bucketed", first_bucket_mib=0.01)["all_reduce"] == (2, in_fp32[1])
    assert operations(sync="bucketed", last_bucket_mib=0.01)["all_reduce"] == (2, in_fp32[1])


def test_fsdp_gathers_again_for_backward_and_for_each_micro_batch():
    """The root and the last of three blocks are gathered once per pass, the other two blocks twice."""
    assert operations(sync="fsdp")["all_gather"][0] == 6
    assert operations(sync="fsdp", accumulation=2)["all_gather"][0] == 12
    assert operations(sync="fsdp", reshard_after_forward=False, accumulation=2)["all_gather"][0] == 4


def test_clipping_and_loss_scaling_send_a_small_message():
    default = operations(sync="sharded_flat")["all_reduce"]
    clipped = operations(sync="sharded_flat", clip_grad_norm=1.0)["all_reduce"]
    scaled = operations(sync="sharded_flat", precision="fp16_autocast")["all_reduce"]
    assert clipped == scaled == (default[0] + 1, default[1] + 4)
    assert operations(sync="naive", clip_grad_norm=1.0) == operations(sync="naive")
