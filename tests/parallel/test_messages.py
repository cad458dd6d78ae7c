"""Messages and bytes of a step, written out term by term from the model's shapes."""

from collections import Counter

import pytest
import torch

from parallel_strategies import BF16_STRATEGIES, STRATEGIES
from parallel_training import CLASSES, OPTIMIZERS, WIDTH, Case, batches, built, loss_of
from ranks import run_ranks
from trainstep.parallel.ranks import Ranks

NUMEL = [
    CLASSES * WIDTH,  # embedding
    3 * WIDTH * WIDTH,  # first
    3 * WIDTH,  # its bias
    WIDTH * WIDTH,  # side
    WIDTH,  # its bias
    WIDTH * 3 * WIDTH,  # second
    CLASSES * WIDTH,  # head
]
ELEMENTS, PARAMETERS = sum(NUMEL), len(NUMEL)
BUFFER = WIDTH
USAGE = PARAMETERS  # a byte each

ALL = {**STRATEGIES, **BF16_STRATEGIES}


def traffic(ranks: Ranks, strategy: str, case: Case) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """(messages, bytes) by operation, of the start and of a step; every step must send the same."""
    model = built(case)
    run = ALL[strategy](model, ranks, OPTIMIZERS["sgd"])
    sent = run.sync.traffic
    steps = [{name: (sent.messages[name], sent.payload_bytes[name]) for name in sent.messages}]
    for ranks_batches in batches(case, ranks.world_size):
        sent.clear()
        loss_of(model, ranks_batches[ranks.rank][0], case, ranks.rank).backward()
        run.sync.finish_gradient_synchronization()
        run.sync.clip_grad_norm_(1.0)
        steps.append({name: (sent.messages[name], sent.payload_bytes[name]) for name in sent.messages})
    assert all(step == steps[1] for step in steps[1:])
    return steps[0], steps[1]


def aligned(numel: int) -> int:
    """Elements a tensor takes in a flat buffer, where each begins at a multiple of 8."""
    return -(-numel // 8) * 8


def flat_bytes(sizes: list[int], element_bytes: int) -> int:
    """Bytes of a message of these tensors and a flag for each."""
    return element_bytes * (sum(map(aligned, sizes)) + len(sizes))


START = {
    "all_gather": (1, 3 * 32),  # each rank's hash of what it wraps
    "broadcast": (PARAMETERS + 1, 4 * (ELEMENTS + BUFFER)),
}
EXPECTED = {
    "naive": (PARAMETERS + 1, 4 * ELEMENTS + USAGE),
    "overlapped": (PARAMETERS + 1, 4 * ELEMENTS + USAGE),
    "flat": (1, flat_bytes(NUMEL, 4)),
    "naive bf16": (PARAMETERS + 1, 2 * ELEMENTS + USAGE),
    "overlapped bf16": (PARAMETERS + 1, 2 * ELEMENTS + USAGE),
    "flat bf16": (1, flat_bytes(NUMEL, 2)),
}


@pytest.mark.parametrize("case", [Case(), Case(unused="somewhere"), Case(unused="everywhere")])
@pytest.mark.parametrize("strategy", EXPECTED)
def test_a_step_sends_what_the_formula_says(strategy: str, case: Case):
    for start, step in run_ranks(3, traffic, strategy, case):
        assert start == START
        assert step == {"all_reduce": EXPECTED[strategy]}


def bucket_messages(ranks: Ranks) -> tuple[list[list[tuple[int, ...]]], tuple[int, int]]:
    model = built(Case())
    run = STRATEGIES["bucketed"](model, ranks, OPTIMIZERS["sgd"])
    run.sync.traffic.clear()
    loss_of(model, next(iter(batches(Case(), 2)))[ranks.rank][0], Case(), ranks.rank).backward()
    run.sync.finish_gradient_synchronization()
    shapes = [[tuple(parameter.shape) for parameter in bucket.parameters] for bucket in run.sync.buckets]
    return shapes, (run.sync.traffic.messages["all_reduce"], run.sync.traffic.payload_bytes["all_reduce"])


def test_a_bucket_is_a_message():
    shapes, (messages, payload_bytes) = run_ranks(2, bucket_messages)[0]
    assert shapes[0] == [(CLASSES, WIDTH)]
    assert shapes[-1] == [(CLASSES, WIDTH)]
    assert Counter(shape for bucket in shapes for shape in bucket).total() == PARAMETERS
    sizes = [[torch.Size(shape).numel() for shape in bucket] for bucket in shapes]
    assert all(len(bucket) == 1 or 4 * sum(bucket) <= 300 for bucket in sizes)
    assert messages == len(sizes)
    assert payload_bytes == sum(flat_bytes(bucket, 4) for bucket in sizes)


def messages_under_no_sync(ranks: Ranks, strategy: str) -> int:
    model = built(Case())
    run = STRATEGIES[strategy](model, ranks, OPTIMIZERS["sgd"])
    run.sync.traffic.clear()
    with run.sync.no_sync():
        loss_of(model, next(iter(batches(Case(), 2)))[ranks.rank][0], Case(), ranks.rank).backward()
    return sum(run.sync.traffic.messages[operation] for operation in ("all_reduce", "reduce_scatter", "broadcast"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sync_sends_no_gradients(strategy: str):
    assert run_ranks(2, messages_under_no_sync, strategy) == [0, 0]
