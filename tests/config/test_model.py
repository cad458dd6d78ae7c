"""A model's shape: fields that are refused, counts of parameters, and names of users' models."""

import dataclasses
from typing import Any

import pytest

from trainstep.config.model import ModelConfig, UserModel

GOOD: dict[str, Any] = {"d_model": 12, "d_ff": 20, "layers": 2, "heads": 3, "vocab_size": 7}


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ModelConfig(**{**GOOD, **changes})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parameter_counts_agree_with_hand_computed_numbers():
    counts = ModelConfig(**GOOD).parameter_counts()
    assert counts == {"embedding": 84, "attention": 2 * 4 * 144, "mlp": 2 * 3 * 240, "norms": 5 * 12, "head": 84}
    assert ModelConfig(**GOOD).parameters == 84 + 1152 + 1440 + 60 + 84
    assert ModelConfig(**GOOD).head_dim == 4


@pytest.mark.parametrize("field", ["d_model", "d_ff", "layers", "heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_counts_must_be_positive(field: str, value: Any):
    assert refusal(**{field: value}).startswith(f"{field}: must be a whole number of at least ")


@pytest.mark.parametrize("field", ["rope_theta", "norm_eps"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_rates_must_be_positive(field: str, value: float):
    assert refusal(**{field: value}).startswith(f"{field}: must be positive, not ")


def test_heads_must_divide_the_width():
    assert refusal(d_model=768, heads=11) == "heads: 11 does not divide d_model 768; 12 would"
    assert refusal(d_model=10, heads=4).endswith("; 5 would")


@pytest.mark.parametrize(("d_model", "heads"), [(768, 11), (10, 3), (14, 4), (1600, 24), (2, 5)])
def test_the_suggested_number_of_heads_is_accepted(d_model: int, heads: int):
    suggested = int(refusal(d_model=d_model, heads=heads).split("; ")[1].split()[0])
    assert ModelConfig(**{**GOOD, "d_model": d_model, "heads": suggested}).heads == suggested


def test_rope_needs_even_head_widths():
    assert "it must be even" in refusal(d_model=12, heads=4)
    for heads in (1, 3, 7):
        assert refusal(d_model=7, heads=heads).startswith("d_model: RoPE rotates pairs")


def test_a_model_is_frozen_and_takes_keywords_only():
    model = ModelConfig(**GOOD)
    assert model.name == "custom"
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.layers = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig("custom", 12)  # type: ignore[misc]


@pytest.mark.parametrize("function", ["a.b:c", "a:c", "_a.b2:build_it"])
def test_a_users_model_is_named_by_its_function(function: str):
    assert UserModel(function=function).name == function


@pytest.mark.parametrize("function", ["", ":", "a.b", "a.b:", ":c", "a..b:c", "a/b.py:c", "a.b:c.d", "a:b:c", "a b:c"])
def test_a_name_that_cannot_be_imported_is_refused(function: str):
    with pytest.raises(ValueError, match=r"must read package\.module:function"):
        UserModel(function=function)


def test_absurd_widths_are_refused_at_once():
    assert refusal(d_model=10**12, heads=7).endswith("; 8 would")
    assert refusal(d_model=2 * (10**11 + 3), heads=10**6).endswith(" would")
    for field in ("d_model", "d_ff", "layers", "heads", "vocab_size"):
        assert refusal(**{field: 2**40 + 1}).startswith(f"{field}: must be at most 1099511627776")
