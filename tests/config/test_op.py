"""The config of one op: sizes that suit the op and the device are filled in, and every error names its field."""

import dataclasses
from typing import Any

import pytest

from trainstep.config.grid import Cell, expand
from trainstep.config.op import HAVE, IMPLEMENTATIONS, OPS, PACKAGES, OpConfig, fields_without_effect
from trainstep.config.parsing import build_config, to_plain


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_sizes_on_every_device(op: str, device: str):
    config = OpConfig(op=op, device=device)
    assert all(size > 0 for size in config.sizes.values())
    assert all(getattr(config, name) is None for name in fields_without_effect(op) - {"direction", "sum_dtype"})
    assert build_config("op", to_plain(config)) == config, "a record has the sizes that were filled in"


def test_the_default_sizes_on_a_gpu_are_those_of_published_comparisons():
    sizes = {op: tuple(OpConfig(op=op, device="cuda").sizes.values()) for op in OPS}
    assert sizes == {
        "rms_norm": (8192, 4096),
        "add_rms_norm": (8192, 4096),
        "rotary": (8192, 32, 32, 128),
        "swiglu": (8192, 11008),
        "linear_cross_entropy": (32768, 4096, 151936),
        "adamw": (500_000_000,),
    }


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"op": "rms"}, r"op: 'rms' is not known \(did you mean rms_norm\?\)"),
        ({"implementation": "ligre"}, r"implementation: 'ligre' is not known \(did you mean liger\?\)"),
        ({"direction": "up"}, "direction: 'up' is not known"),
        (
            {"op": "rotary", "width": 8},
            "width: rotary has no such size; its sizes are tokens, heads, key_heads, head_dim",
        ),
        ({"vocabulary": 8}, "vocabulary: rms_norm has no such size; its sizes are tokens, width"),
        ({"tokens": 0}, "tokens: must be a whole number of at least 1, not 0"),
        ({"op": "rotary", "head_dim": 63}, "head_dim: rotary turns pairs of channels, so it must be even, not 63"),
        (
            {"op": "adamw", "direction": "forward"},
            "direction: adamw is an update without a backward pass; leave it at both",
        ),
        ({"sum_dtype": "own"}, "sum_dtype: only linear_cross_entropy sums over chunks, rms_norm does not"),
        ({"l2": "cold"}, "l2: cold is about a GPU's cache"),
        ({"steps": 0}, "steps: must be"),
        ({"warmups": -1}, "warmups: must be"),
        ({"seed": -1}, "seed: must be"),
    ],
)
def test_every_error_names_its_field(fields: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        OpConfig(**fields)


def test_an_implementation_refuses_what_it_does_not_have():
    assert OpConfig(op="swiglu", implementation="quack", device="cuda").refusal == "implementation: quack has no swiglu"
    assert OpConfig(implementation="liger").refusal == "implementation: liger runs on GPUs only"
    assert OpConfig(implementation="liger", device="cuda").refusal is None
    assert all(OpConfig(op=op).refusal is None for op in OPS)
    assert set(PACKAGES) < set(IMPLEMENTATIONS) == set(HAVE)


def test_a_grid_expands_over_ops_and_implementations():
    cells = expand({"workload": ["op"], "op": list(OPS), "implementation": ["trainstep", "eager"]}, {"device": "cpu"})
    assert len(cells) == 2 * len(OPS)
    assert cells[0].label == "rms_norm, trainstep"


def test_the_key_names_every_field():
    config = to_plain(OpConfig())
    keys = {Cell(workload="op", config=config, point={}).key}
    for field in dataclasses.fields(OpConfig):
        keys.add(Cell(workload="op", config={**config, field.name: "other"}, point={}).key)
    assert len(keys) == len(dataclasses.fields(OpConfig)) + 1
