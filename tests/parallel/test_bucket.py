"""Which gradients share a message."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainstep.parallel.bucket import plan_buckets


def of(*numels: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=dtype) for numel in numels]


def test_from_the_end_each_within_its_limit():
    assert plan_buckets(of(1, 2, 3, 4), bucket_bytes=20) == [[3], [2, 1], [0]]


def test_a_larger_tensor_has_its_own():
    assert plan_buckets(of(1, 100, 1), bucket_bytes=8) == [[2], [1], [0]]


def test_the_first_and_the_last_may_be_smaller():
    plan = plan_buckets(of(1, 1, 1, 1, 1, 1), bucket_bytes=100, first_bucket_bytes=4, last_bucket_bytes=8)
    assert plan == [[5], [4, 3, 2], [1, 0]]


def test_the_limit_counts_bytes_as_they_are_sent():
    assert plan_buckets(of(1, 1, 1, 1), bucket_bytes=8) == [[3, 2], [1, 0]]
    assert plan_buckets(of(1, 1, 1, 1), bucket_bytes=8, dtype=torch.bfloat16) == [[3, 2, 1, 0]]


def test_a_bucket_has_one_dtype():
    tensors = [*of(1), *of(1, dtype=torch.bfloat16), *of(1)]
    assert plan_buckets(tensors, bucket_bytes=100) == [[2, 0], [1]]
    assert plan_buckets(tensors, bucket_bytes=100, dtype=torch.float32) == [[2, 1, 0]]


@given(
    numels=st.lists(st.integers(1, 9), max_size=12),
    limit=st.integers(1, 60),
    first=st.none() | st.integers(1, 60),
    last=st.none() | st.integers(1, 60),
)
def test_each_tensor_in_one_bucket_in_reverse(numels: list[int], limit: int, first: int | None, last: int | None):
    plan = plan_buckets(of(*numels), bucket_bytes=limit, first_bucket_bytes=first, last_bucket_bytes=last)
    assert [index for bucket in plan for index in bucket] == list(range(len(numels) - 1, -1, -1))
    assert all(plan)


def test_the_usual_size_makes_sixteen_messages_or_fewer_of_25_mib():
    few, many = [torch.empty(2**20, device="meta")] * 40, [torch.empty(2**20, device="meta")] * 160
    assert [len(bucket) for bucket in plan_buckets(few, bucket_bytes=None)] == [6, 6, 6, 6, 6, 6, 4]
    assert [len(bucket) for bucket in plan_buckets(many, bucket_bytes=None)] == [10] * 16
