"""AttentionConfig: fields it refuses in one sentence, inputs that a peer does not support, the tile rule, and its cells."""

from typing import Any

import pytest

from trainstep.config.attention import IMPLEMENTATIONS, PACKAGES, AttentionConfig, rule_block
from trainstep.config.grid import check_grid_keys, expand
from trainstep.config.parsing import build_config


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"implementation": "trainstp"}, "implementation: 'trainstp' is not known (did you mean trainstep?)"),
        ({"direction": "up"}, "direction: 'up' is not known"),
        ({"seq": 0}, "seq: must be a whole number of at least 1"),
        ({"keys": 0}, "keys: must be a whole number of at least 1"),
        ({"heads": 6, "key_heads": 4}, "key_heads: 4 does not divide heads 6"),
        ({"layout": "BSD"}, "heads: layout BSD has one head, not 16"),
        ({"fp32_precision": "tf4"}, "fp32_precision: 'tf4' is not known (did you mean tf32?)"),
        ({"fp32_precision": "ieee", "dtype": "bf16"}, "fp32_precision: says how fp32 is multiplied, but dtype is bf16"),
        ({"fp32_precision": "tf32x3"}, "fp32_precision: tf32x3 needs NVIDIA matrix units"),
        ({"block_q": 64, "implementation": "plain"}, "block_q: only trainstep's kernels take a tile; plain does not"),
        ({"block_k": "rul"}, "block_k: must be a whole number, rule or none, not 'rul'"),
        ({"num_warps": 0}, "num_warps: must be a whole number of at least 1"),
        ({"l2": "cold"}, "l2: cold is about a GPU's cache"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], sentence: str):
    with pytest.raises(ValueError) as caught:
        AttentionConfig(**fields)
    assert str(caught.value).startswith(sentence)


def test_unset_keys_and_key_heads_equal_those_of_the_queries():
    config = AttentionConfig(heads=8, seq=100)
    assert (config.group_heads, config.key_count) == (8, 100)
    config = AttentionConfig(heads=8, key_heads=2, seq=100, keys=7, causal_alignment="bottom_right")
    assert (config.group_heads, config.key_count, config.bottom_right) == (2, 7, True)
    assert not AttentionConfig(causal_alignment="bottom_right").bottom_right, "a square has one diagonal"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"implementation": "sdpa_cudnn"}, "implementation: sdpa_cudnn runs on GPUs only"),
        ({"implementation": "flex"}, "implementation: flex runs on GPUs only"),
        ({"implementation": "sdpa_flash", "device": "cuda"}, "implementation: sdpa_flash does not take float32"),
        ({"implementation": "flash_attn", "device": "cuda"}, "implementation: flash_attn does not take float32"),
        ({"implementation": "flash_attn_4", "dtype": "bf16"}, "implementation: flash_attn_4 runs on GPUs only"),
        ({"implementation": "flash_attn_4", "device": "cuda"}, "implementation: flash_attn_4 does not take float32"),
        (
            {"implementation": "flash_attn_4", "head_dim": 100, "device": "cuda", "dtype": "bf16"},
            "implementation: flash_attn_4 takes multiples of 8 up to 256 as head_dim, not 100",
        ),
        (
            {"implementation": "flash_attn_4", "head_dim": 264, "device": "cuda", "dtype": "fp16"},
            "implementation: flash_attn_4 takes multiples of 8 up to 256 as head_dim, not 264",
        ),
        (
            {"implementation": "sdpa_math", "keys": 7, "causal_alignment": "bottom_right"},
            "implementation: sdpa_math masks from the top left only",
        ),
        (
            {"implementation": "flash_attn", "keys": 7, "device": "cuda", "dtype": "bf16"},
            "implementation: flash_attn masks from the bottom right only",
        ),
        (
            {"implementation": "flash_attn_4", "keys": 7, "device": "cuda", "dtype": "bf16"},
            "implementation: flash_attn_4 masks from the bottom right only",
        ),
        (
            {"implementation": "plain", "device": "cuda", "fp32_precision": "tf32x3"},
            "implementation: plain does not multiply as tf32x3",
        ),
        (
            {"implementation": "flex", "device": "cuda", "fp32_precision": "fp16x3"},
            "implementation: flex does not multiply as fp16x3",
        ),
        (
            {"implementation": "sdpa_efficient", "device": "cuda", "fp32_precision": "ieee"},
            "implementation: sdpa_efficient multiplies fp32 as tf32x3, never as ieee",
        ),
    ],
)
def test_an_input_that_a_peer_does_not_support_is_no_error(fields: dict[str, Any], sentence: str):
    assert AttentionConfig(**fields).refusal == sentence


def test_supported_inputs_are_not_refused():
    assert AttentionConfig(implementation="sdpa_flash").refusal is None, "torch has one for CPUs"
    for name in IMPLEMENTATIONS:
        assert AttentionConfig(implementation=name, device="cuda", dtype="bf16").refusal is None
    for name in PACKAGES:
        grouped = {"key_heads": 4, "keys": 7, "causal_alignment": "bottom_right", "head_dim": 256}
        assert AttentionConfig(implementation=name, device="cuda", dtype="fp16", **grouped).refusal is None
    for precision in ("ieee", "tf32", "tf32x3", "fp16x3"):
        assert AttentionConfig(device="cuda", fp32_precision=precision).refusal is None
    for precision in ("tf32x3", "fp16x3"):
        efficient = AttentionConfig(implementation="sdpa_efficient", device="cuda", fp32_precision=precision)
        assert efficient.refusal is None, "it is the peer of both, with three products of its own"


@pytest.mark.parametrize(
    ("positions", "block"), [(1, 16), (128, 16), (256, 16), (257, 32), (512, 32), (4096, 32), (65536, 32)]
)
def test_the_tile_rule_chooses_a_block_by_positions(positions: int, block: int):
    assert rule_block(positions) == block


def test_blocks_are_none_a_size_or_the_rule():
    assert AttentionConfig().blocks == (None, None)
    assert AttentionConfig(block_q="rule", block_k=64, seq=128).blocks == (16, 64)
    assert AttentionConfig(block_k="rule", seq=128, keys=4096).blocks == (None, 32)
    assert not AttentionConfig().has_own_tile
    assert AttentionConfig(num_stages=3).has_own_tile


def test_values_of_a_command_line_are_parsed():
    config = build_config("attention", {"key_heads": None, "block_q": "rule", "fp32_precision": None, "seq": 64})
    assert (config.key_heads, config.block_q, config.fp32_precision) == (None, "rule", None)
    with pytest.raises(ValueError, match="seq: must be a whole number, not 'long'"):
        build_config("attention", {"seq": "long"})
    with pytest.raises(ValueError, match="unknown key 'sek'"):
        build_config("attention", {"sek": 1})


def test_a_grid_expands_to_labelled_cells():
    grid: dict[str, list[Any]] = {"workload": ["attention"], "implementation": ["plain", "trainstep"], "seq": [8, 16]}
    cells = expand(grid, {"device": "cpu"})
    assert [cell.label for cell in cells] == ["plain, seq 8", "plain, seq 16", "trainstep, seq 8", "trainstep, seq 16"]
    assert {cell.workload for cell in cells} == {"attention"}
    check_grid_keys(grid, "file [grid]")
    with pytest.raises(ValueError, match=r"unknown key 'sek' \(did you mean seq"):
        check_grid_keys({**grid, "sek": [1]}, "file [grid]")
    with pytest.raises(ValueError, match="unknown key 'seq'"):
        check_grid_keys({"seq": [8]}, "file [grid]")
