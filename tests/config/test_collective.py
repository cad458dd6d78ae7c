"""CollectiveConfig: sizes that all ranks can divide, and refusals in one sentence."""

from typing import Any

import pytest

from trainstep.config.collective import CollectiveConfig


@pytest.mark.parametrize(
    ("config", "elements", "payload_bytes"),
    [
        ({"mib": 1.0, "ranks": 2}, 2**18, 2**20),
        ({"mib": 1.0, "ranks": 2, "dtype": "bf16"}, 2**19, 2**20),
        ({"mib": 1.0, "ranks": 3}, 262_146, 1_048_584),  # rounded up to a multiple of three
        ({"mib": 1e-9, "ranks": 4}, 4, 16),
        ({"mib": 1 / 1024, "ranks": 2}, 256, 1024),
    ],
)
def test_sizes_are_rounded_up_to_a_multiple_of_the_ranks(config: dict[str, Any], elements: int, payload_bytes: int):
    collective = CollectiveConfig(**config)
    assert (collective.elements, collective.payload_bytes) == (elements, payload_bytes)
    assert collective.elements % collective.ranks == 0


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"operation": "all_to_all"}, "operation: 'all_to_all' is not known"),
        ({"backend": "nccl"}, "backend: nccl sends between GPUs; on a CPU take gloo"),
        ({"ranks": 0}, "ranks: must be a whole number of at least 1"),
        ({"mib": 0.0}, "mib: must be over 0"),
        ({"mib": float("inf")}, "mib: must be over 0"),
        ({"steps": 0}, "steps: must be"),
        ({"dtype": "fp64"}, "dtype: 'fp64' is not known"),
    ],
)
def test_a_bad_field_is_refused_by_name(config: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        CollectiveConfig(**config)
