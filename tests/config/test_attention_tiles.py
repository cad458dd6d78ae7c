"""AttentionTilesConfig: sizes and tiles it reads, and values it refuses in a sentence that names the field."""

from typing import Any

import pytest

from trainstep.config.attention import AttentionTilesConfig
from trainstep.config.grid import expand
from trainstep.config.parsing import build_config


def test_sizes_and_tiles_are_read():
    config = AttentionTilesConfig(shape="4X16x4096", candidates="128x64x8x3,64x64x4x3x24")
    assert config.sizes == (4, 16, 4096)
    assert config.own_tiles == ((128, 64, 8, 3), (64, 64, 4, 3, 24))
    assert AttentionTilesConfig().own_tiles == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kernel": "backward"}, "kernel: 'backward' is not known"),
        ({"arithmetic": "half"}, "arithmetic: 'half' is not known"),
        ({"mask": "none"}, "mask: "),
        ({"head_dim": 4}, "head_dim: must be a whole number of at least 8"),
        ({"head_dim": 512}, "head_dim: must be at most 256"),
        ({"shape": "4x16"}, "shape: '4x16' is not batch x heads x positions, as 4x16x4096"),
        ({"shape": "0x16x4096"}, "shape: "),
        ({"shape": "axbxc"}, "shape: "),
        ({"candidates": "best"}, "candidates: 'best' is neither 'generated' nor tiles"),
        ({"candidates": "64x64x4"}, "candidates: "),
        ({"candidates": "64x64x4x2,"}, "candidates: "),
        ({"candidates": ",".join(["64x64x4x2"] * 101)}, "candidates: 101 tiles are more than the limit of 100"),
        ({"rounds": 0}, "rounds: must be a whole number of at least 1"),
        ({"workers": -1}, "workers: "),
        ({"budget_s": 0.0}, "budget_s: must be a positive number of seconds"),
        ({"budget_s": float("nan")}, "budget_s: "),
        ({"device": "tpu"}, "device: "),
        ({"seed": -1}, "seed: "),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        AttentionTilesConfig(**fields)


def test_flat_values_and_grids_are_read():
    assert build_config("attention_tiles", {"budget_s": 5}).budget_s == 5.0
    with pytest.raises(ValueError, match="did you mean shape"):
        build_config("attention_tiles", {"shpae": "1x1x64"})
    cells = expand({"workload": ["attention_tiles"], "kernel": ["forward", "key_gradients"], "head_dim": [64]}, {})
    assert [(cell.workload, cell.label) for cell in cells] == [
        ("attention_tiles", "forward"),
        ("attention_tiles", "key_gradients"),
    ]
