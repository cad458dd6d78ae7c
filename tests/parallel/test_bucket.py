"""The plan of buckets, that is of the gradients that share a message."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.parallel.bucket import plan_buckets


def tensors_of(*numels: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=dtype) for numel in numels]


def test_buckets_fill_from_the_last_tensor_up_to_the_limit():
    assert plan_buckets(tensors_of(1, 2, 3, 4), bucket_bytes=20) == [[3], [2, 1], [0]]


def test_a_tensor_above_the_limit_has_its_own_bucket():
    assert plan_buckets(tensors_of(1, 100, 1), bucket_bytes=8) == [[2], [1], [0]]


def test_the_first_and_the_last_bucket_may_be_smaller():
    plan = plan_buckets(tensors_of(1, 1, 1, 1, 1, 1), bucket_bytes=100, first_bucket_bytes=4, last_bucket_bytes=8)
    assert plan == [[5], [4, 3, 2], [1, 0]]


def test_the_limit_counts_bytes_as_they_are_sent():
    assert plan_buckets(tensors_of(1, 1, 1, 1), bucket_bytes=8) == [[3, 2], [1, 0]]
    assert plan_buckets(tensors_of(1, 1, 1, 1), bucket_bytes=8, dtype=torch.bfloat16) == [[3, 2, 1, 0]]


def test_a_bucket_has_one_dtype():
    tensors = [*tensors_of(1), *tensors_of(1, dtype=torch.bfloat16), *tensors_of(1)]
    assert plan_buckets(tensors, bucket_bytes=100) == [[2, 0], [1]]
    assert plan_buckets(tensors, bucket_bytes=100, dtype=torch.float32) == [[2, 1, 0]]


@settings(deadline=None)
@given(
    numels=st.lists(st.integers(1, 9), max_size=12),
    limit=st.integers(1, 60),
    first=st.none() | st.integers(1, 60),
    last=st.none() | st.integers(1, 60),
)
def test_each_tensor_is_in_one_bucket_in_reverse_order(
    numels: list[int], limit: int, first: int | None, last: int | None
):
    plan = plan_buckets(tensors_of(*numels), bucket_bytes=limit, first_bucket_bytes=first, last_bucket_bytes=last)
    assert [index for bucket in plan for index in bucket] == list(range(len(numels) - 1, -1, -1))
    assert all(plan)


@pytest.mark.parametrize(
    ("tensors", "in_a_bucket"),
    [(20, 6), (160, 40), (800, 160), (3200, 320), (20_000, 1250)],
    ids=["25 MiB", "a quarter", "root of 3,200 MiB x 128 MiB", "of 12,800 MiB", "a sixteenth"],
)
def test_the_default_size_is_a_root_between_a_sixteenth_and_a_quarter(tensors: int, in_a_bucket: int):
    """The tensors here have 4 MiB each."""
    plan = plan_buckets([torch.empty(2**20, device="meta")] * tensors, bucket_bytes=None)
    assert {len(bucket) for bucket in plan[:-1]} == {in_a_bucket}
    assert sum(map(len, plan)) == tensors
