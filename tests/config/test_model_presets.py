"""The named model sizes have their published shapes, and an unknown name is refused."""

import pytest

from trainstep.config.model import size, size_names

SHAPES = {  # d_model, d_ff, layers, heads, vocabulary
    "small": (768, 3072, 12, 12, 10_000),
    "medium": (1024, 4096, 24, 16, 10_000),
    "large": (1280, 5120, 36, 20, 10_000),
    "xl": (1600, 6400, 48, 25, 10_000),
    "2.7B": (2560, 10240, 32, 32, 10_000),
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_size_has_its_shape(name: str):
    model = size(name)
    assert (model.d_model, model.d_ff, model.layers, model.heads, model.vocab_size) == SHAPES[name]
    assert (model.name, model.rope_theta, model.norm_eps) == (name, 10_000.0, 1e-5)


@pytest.mark.parametrize(
    ("name", "parameters"), [("small", 128_625_408), ("large", 969_411_840), ("2.7B", 3_406_809_600)]
)
def test_sizes_have_the_published_parameter_counts(name: str, parameters: int):
    assert size(name).parameters == parameters


def test_sizes_are_listed_from_the_smallest():
    counts = [size(name).parameters for name in size_names()]
    assert counts == sorted(counts)
    assert set(SHAPES) < set(size_names())


@pytest.mark.parametrize(("wrong", "nearest"), [("smal", "small"), ("2.7b", "2.7B"), ("xxl", "xl")])
def test_an_unknown_size_is_refused_with_the_known_ones(wrong: str, nearest: str):
    with pytest.raises(ValueError) as caught:
        size(wrong)
    message = str(caught.value)
    assert message.startswith(f"model: unknown size '{wrong}' (did you mean {nearest}?)")
    assert all(name in message for name in size_names())
    assert "package.module:function" in message


def test_an_unlike_name_gets_no_suggestion():
    with pytest.raises(ValueError, match="unknown size 'qqqqqq'; known: "):
        size("qqqqqq")
