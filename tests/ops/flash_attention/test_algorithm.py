"""The tiled algorithm is as accurate as the reference with small and large tiles; its gradients agree with finite differences."""

from functools import partial

import pytest
import torch

from attention_cases import Case, check, random_case
from trainstep.ops.flash_attention import algorithm
from trainstep.ops.flash_attention.algorithm import Mask, flash_attention_tiled


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Make tiles so small that short sequences have full, cut and hidden ones."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(algorithm, name, partial(getattr(algorithm, name), block_q=16, block_k=32))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("small_tiles")
def test_random_shapes(seed: int):
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    check(flash_attention_tiled, random_case(seed, longest=200, dtypes=dtypes, most_pairs=2e5))


def test_default_tiles():
    check(flash_attention_tiled, Case(heads=2, key_heads=1, queries=300, keys=270, head_dim=80))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.usefixtures("small_tiles")
def test_gradcheck(alignment: str):
    q, k, v, _ = Case(heads=2, key_heads=1, queries=37, keys=21, head_dim=8, dtype=torch.float64).tensors()

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return flash_attention_tiled(*qkv, causal=True, causal_alignment=alignment)[0]

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in (q, k, v)], fast_mode=True)


@pytest.mark.usefixtures("small_tiles")
def test_hidden_tiles_are_not_visited():
    """Keys that no query of a tile sees are not read, so NaN in them does not reach the output."""
    q, k, v, _ = Case(queries=64, keys=128, head_dim=8).tensors()
    k[:, :, 64:], v[:, :, 64:] = float("nan"), float("nan")
    o, lse = flash_attention_tiled(q, k, v, causal=True)
    assert o.isfinite().all()
    assert lse.isfinite().all()


def test_a_mask_gives_the_keys_that_a_tile_sees():
    mask = Mask(causal=True, offset=-8)
    assert mask.keys_seen(0, 8, 100) == (0, 0)
    assert mask.keys_seen(8, 24, 100) == (1, 16)
    assert Mask(causal=False, offset=0).keys_seen(0, 8, 100) == (100, 100)
