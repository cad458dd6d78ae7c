"""The reference in chunks gives what it gives as a whole, for every mask, and the checks see an error where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention import checks as attention_checks
from trainstep.measure.attention import peers
from trainstep.measure.attention.checks import (
    Tensors,
    check_values,
    chosen_key_heads,
    query_chunks,
    random_tensors,
    reference_values,
)
from trainstep.measure.attention.peers import attend_named
from trainstep.ops import flash_attention, reference

SMALL = {"batch": 2, "heads": 6, "key_heads": 3, "seq": 50, "head_dim": 8}
CPU = torch.device("cpu")


def a_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{**SMALL, **fields})


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("keys", [20, 50, 80])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_chunks_cover_every_query_that_sees_a_key(mask: str, keys: int, alignment: str, rows: int):
    config = a_config(mask=mask, keys=keys, causal_alignment=alignment)
    offset = keys - 50 if alignment == "bottom_right" else 0
    expected = [min(max(query + 1 + offset, 0), keys) if mask == "causal" else keys for query in range(50)]
    key_counts = [0] * 50
    for first, end, most_keys, masked in query_chunks(config, rows):
        assert end - first <= rows
        for query in range(first, end):
            assert key_counts[query] == 0, "a query is in one chunk only"
            key_counts[query] = most_keys - (end - 1 - query) if masked else most_keys
    assert key_counts == expected


@pytest.mark.parametrize("chunk_pairs", [1, 3000, 10**9])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("keys", [20, 50, 80])
def test_chunks_give_what_the_whole_reference_gives(
    keys: int, alignment: str, chunk_pairs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention_checks, "_CHUNK_PAIRS", {"cpu": chunk_pairs})
    config = a_config(keys=keys, causal_alignment=alignment, layout="BSHD")
    tensors = random_tensors(config, CPU)
    values = reference_values(config, tensors, list(range(6)), torch.float64)
    leaves = [x.detach().transpose(1, 2).double().requires_grad_() for x in tensors.leaves]
    o = reference.attention(*leaves, causal=True, causal_alignment=alignment)
    gradients = torch.autograd.grad(o, leaves, tensors.do.transpose(1, 2).double())
    lse = reference.attention_lse(*(x.detach() for x in leaves[:2]), causal=True, causal_alignment=alignment)
    expected = {"output": o.detach(), "lse": lse[..., None], **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    for name, value in expected.items():
        torch.testing.assert_close(
            values[name], value.reshape(values[name].shape), msg=lambda text, n=name: f"{n}: {text}"
        )


def test_heads_are_chosen_by_what_they_cost(monkeypatch: pytest.MonkeyPatch):
    pairs_per_head = 50 * 50 * 2  # two query heads read a key head
    for budget, count in ((0, 1), (pairs_per_head, 1), (3 * pairs_per_head, 3), (100 * pairs_per_head, 6)):
        monkeypatch.setattr(attention_checks, "_PAIRS", {"cpu": budget})
        chosen = chosen_key_heads(a_config())
        assert len(set(chosen)) == count
        assert set(chosen) <= set(range(6))


def values_of(attend: Any, **fields: Any) -> dict[str, Any]:
    config = a_config(**fields)
    facts = check_values(config, random_tensors(config, CPU), attend)
    return {name: fact.value for name, fact in facts.items()}


def test_an_error_is_seen():
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 1.01 * reference.attention(q, k, v, causal=True)

    facts = values_of(wrong, implementation="plain")
    for name in ("output", "dq", "dk", "dv"):
        assert facts[f"error_{name}"] == pytest.approx(0.01, rel=0.01)
    assert facts["error_same_dtype"] < 1e-5
    assert facts["has_nan"] == 0


def test_nan_and_nondeterminism_are_seen():
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, causal=True) / 0.0

    facts = values_of(broken, implementation="plain")
    assert facts["has_nan"] == 1
    assert "error_output" not in facts, "no number, rather than one that JSON cannot hold"

    def nondeterministic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, causal=True) + 1e-3 * torch.rand(())

    assert values_of(nondeterministic, implementation="plain")["deterministic"] == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_16_bit_dtype_is_compared_with_plain_attention_in_it(dtype: str):
    config = a_config(implementation="trainstep", dtype=dtype)
    tensors: Tensors = random_tensors(config, CPU)
    facts = check_values(config, tensors, attend_named(config))
    assert facts["error_checked"].value.endswith("against float32")
    assert 1e-4 < facts["error_same_dtype"].value < 2e-2
    assert facts["error_output"].value <= 2 * facts["error_same_dtype"].value


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "BSD"])
def test_the_log_sum_exp_is_checked_with_the_cells_own_tiles(layout: str, monkeypatch: pytest.MonkeyPatch):
    used_tiles = []

    def watched(*tensors: Tensor, tiles: object, **settings: Any) -> Any:
        used_tiles.append(tiles)
        return flash_attention(*tensors, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_checks, "flash_attention", watched)
    monkeypatch.setattr(peers, "own_tiles", lambda config: "its own")
    heads = {"heads": 1, "key_heads": 1} if layout == "BSD" else {}
    default, own = a_config(layout=layout, **heads), a_config(layout=layout, block_q=16, block_k=16, **heads)
    for config in (default, own):
        tensors = random_tensors(config, CPU)
        facts = check_values(config, tensors, attend_named(default))
        assert facts["error_lse"].value < 1e-5
    assert used_tiles == [None, "its own"]
