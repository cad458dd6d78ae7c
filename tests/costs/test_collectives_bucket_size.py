"""The best bucket size has less overhead than any other size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.costs.collectives import best_bucket_bytes, bucket_overhead_s

MIB = 2**20


def test_overhead_is_as_counted_by_hand():
    assert bucket_overhead_s(100 * MIB, 10 * MIB, 1e-3, MIB) == pytest.approx(10 * 1e-3 + 10)
    assert bucket_overhead_s(100 * MIB, 1000 * MIB, 1e-3, MIB) == pytest.approx(1e-3 + 100)  # one message of all
    assert best_bucket_bytes(400.0, 1.0, 4.0) == 40


@settings(deadline=None)
@given(
    gradients=st.floats(1e3, 1e10),
    latency_s=st.floats(1e-6, 1e-2),
    bytes_per_s=st.floats(1e6, 1e12),
    share=st.floats(1e-3, 1),
)
def test_no_other_size_is_better(gradients: float, latency_s: float, bytes_per_s: float, share: float):
    best = best_bucket_bytes(gradients, latency_s, bytes_per_s)
    least = bucket_overhead_s(gradients, best, latency_s, bytes_per_s)
    assert least <= bucket_overhead_s(gradients, share * gradients, latency_s, bytes_per_s) * (1 + 1e-9)


def test_a_latency_of_zero_is_refused():
    with pytest.raises(ValueError, match="latency_s: must be positive"):
        best_bucket_bytes(1.0, 0.0, 1.0)
