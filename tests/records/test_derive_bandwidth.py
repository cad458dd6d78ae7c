"""Bandwidths agree with numbers computed by hand; the fit finds the latency and bandwidth that made its data."""

import dataclasses
from typing import Any

import pytest

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.records.derive import bandwidth, fit_latency
from trainstep.records.record import Fact, Failure, Record
from trainstep.records.summary import doubts

KIB, MIB = 2**10, 2**20


def collective(
    times_s: list[float], *, backend: str = "nccl", gpu: str | None = "NVIDIA H200", **changes: Any
) -> Record:
    """An all-reduce of 90 GB among four ranks: the busiest rank sends 135 GB."""
    facts = {"payload_bytes": Fact(value=90 * 10**9, unit="bytes"), "ring_bytes": Fact(value=135 * 10**9, unit="bytes")}
    return a_record(
        workload="collective",
        config={"backend": backend, "operation": "all_reduce", "ranks": 4},
        environment=dataclasses.replace(ENVIRONMENT, gpu=gpu),
        samples={"time": seconds(times_s)},
        **{"facts": facts, **changes},
    )


def test_bandwidths_and_share_of_the_link_agree_with_hand_computed_numbers():
    rates = bandwidth(collective([0.5, 0.4, 9.0]))
    assert rates is not None
    assert rates.algorithm_bytes_per_s == 180e9
    assert rates.bus_bytes_per_s == 270e9
    assert rates.link_share == pytest.approx(0.6)  # of 450 GB/s one way
    assert rates.link_source == "NVIDIA H200 data sheet, dense"


@pytest.mark.parametrize(
    ("backend", "gpu"), [("gloo", "NVIDIA H200"), ("nccl", "NVIDIA H100 PCIe"), ("nccl", "unheard of")]
)
def test_an_unknown_link_has_no_share(backend: str, gpu: str):
    rates = bandwidth(collective([0.5], backend=backend, gpu=gpu))
    assert rates is not None
    assert rates.link_share is None


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {"payload_bytes": Fact(value=4, unit="bytes"), "ring_bytes": Fact(value=0, unit="bytes")}},
        {"failure": Failure(kind="crash", phase="build", message="gone")},
    ],
)
def test_one_rank_and_failures_have_no_bandwidth(changes: dict[str, Any]):
    assert bandwidth(collective([0.5], **changes)) is None


@pytest.mark.parametrize("alpha_s", [0.0, 20e-6, 3e-3])
@pytest.mark.parametrize("beta", [1e9, 4.2e11])
def test_the_fit_finds_the_latency_and_bandwidth_of_its_data(alpha_s: float, beta: float):
    sizes = [KIB, 64 * KIB, MIB, 16 * MIB, 1024 * MIB]
    fit = fit_latency(sizes, [alpha_s + size / beta for size in sizes])
    assert fit is not None
    assert fit.alpha_s == pytest.approx(alpha_s, rel=1e-6, abs=1e-12)
    assert fit.beta_bytes_per_s == pytest.approx(beta, rel=1e-6)
    assert fit.r_squared == pytest.approx(1)
    assert fit.worst < 1e-6
    assert fit.sizes == 5


def test_the_fit_states_its_largest_error():
    sizes = [KIB, 64 * KIB, MIB, 16 * MIB]
    times = [1e-5 + size / 1e9 for size in sizes]
    fit = fit_latency(sizes, [times[0], times[1] * 1.2, *times[2:]])
    assert fit is not None
    assert 0.05 < fit.worst < 0.2
    assert 0.9 < fit.r_squared < 1


@pytest.mark.parametrize(
    ("sizes", "times"), [([1, 2], [1.0, 2.0]), ([1, 1, 2], [1.0, 1.0, 2.0]), ([1, 2, 4], [3.0, 2.0, 1.0])]
)
def test_no_fit_of_two_sizes_or_where_time_does_not_grow(sizes: list[int], times: list[float]):
    assert fit_latency(sizes, times) is None


@pytest.mark.parametrize(("ranks", "device", "expected"), [(2, "cpu", False), (3, "cpu", True), (3, "cuda", False)])
def test_more_ranks_than_cores_are_a_doubt(ranks: int, device: str, expected: bool):
    record = a_record(config={"ranks": ranks, "device": device}, samples={"step": seconds([1] * 9)})
    assert ("more ranks than cores" in doubts(record)) == expected


@pytest.mark.parametrize(("others", "expected"), [(0, False), (2, True)])
def test_other_processes_on_the_gpu_are_a_doubt(others: int, expected: bool):
    record = a_record(
        facts={"gpu_other_processes": Fact(value=others, unit="count")}, samples={"step": seconds([1] * 9)}
    )
    assert ("other processes on the GPU" in doubts(record)) == expected
