"""Messages by formula are as worked out by hand, and those that every parallel strategy sends on gloo, name by name."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import nn

from parallel_strategies import BF16_STRATEGIES, HYBRID_STRATEGIES, SMALL_MIB, STRATEGIES, Start, layers
from parallel_training import OPTIMIZERS, Case, batches, built, loss_of
from quick import slow_unless
from ranks import run_ranks
from trainstep.config.parallel import OURS
from trainstep.costs.exchange import Exchange, ParameterSize
from trainstep.costs.gradient_sync import Total, step_messages, totals, wire_bytes
from trainstep.costs.strategies import strategy_named
from trainstep.parallel import collectives
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.units import parameter_sizes

SMALL_BYTES = int(SMALL_MIB * 2**20)
OPTIONS: dict[str, dict[str, object]] = {
    "naive": {"strategy": "naive"},
    "flat": {"strategy": "flat"},
    "overlapped": {"strategy": "overlapped"},
    "bucketed": {"strategy": "bucketed", "bucket_bytes": SMALL_BYTES},
    "bucketed_ends": {
        "strategy": "bucketed",
        "bucket_bytes": 2**20,
        "first_bucket_bytes": SMALL_BYTES,
        "last_bucket_bytes": SMALL_BYTES,
    },
    "bucketed_in_place": {"strategy": "bucketed", "bucket_bytes": SMALL_BYTES, "in_place": True},
    "sharded": {"strategy": "sharded", "bucket_bytes": SMALL_BYTES},
    "sharded_each": {"strategy": "sharded", "bucket_bytes": SMALL_BYTES, "pack_below_bytes": 0},
    "sharded_flat": {"strategy": "sharded_flat"},
    "sharded_flat_units": {"strategy": "sharded_flat"},
    "sharded_flat_joined": {"strategy": "sharded_flat", "bucket_bytes": 2**20},
    "fsdp": {"strategy": "fsdp"},
    "fsdp_units": {"strategy": "fsdp"},
    "fsdp_kept": {"strategy": "fsdp", "reshard_after_forward": False},
    "naive bf16": {"strategy": "naive", "reduce_element_bytes": 2},
    "flat bf16": {"strategy": "flat", "reduce_element_bytes": 2},
    "overlapped bf16": {"strategy": "overlapped", "reduce_element_bytes": 2},
    "bucketed bf16": {"strategy": "bucketed", "bucket_bytes": SMALL_BYTES, "reduce_element_bytes": 2},
    "fsdp bf16": {"strategy": "fsdp", "reduce_element_bytes": 2},
    "sharded_flat bf16": {"strategy": "sharded_flat", "reduce_element_bytes": 2},
}
"""The formulas' options for each name of tests/parallel_strategies.py."""
IN_ONE_UNIT = ("sharded_flat", "fsdp")
REAL = {**STRATEGIES, **BF16_STRATEGIES}


def exchanging(*, strategy: str, **options: object) -> Exchange:
    return Exchange(strategy=strategy_named(strategy), **options)


def sizes(case: Case, strategy: str, dtype: torch.dtype = torch.float32) -> list[ParameterSize]:
    model = built(case).to(dtype)
    return parameter_sizes(model, None if strategy in IN_ONE_UNIT else layers(model))


@contextmanager
def spans_counted() -> Iterator[Counter[str]]:
    """Counts the names of spans that messages open inside this context."""
    names: Counter[str] = Counter()

    def counting(name: str) -> AbstractContextManager[None]:
        names[name] += 1
        return nullcontext()

    real, collectives.span = collectives.span, counting
    try:
        yield names
    finally:
        collectives.span = real


def sent(ranks: Ranks, strategy: str, case: Case, dtype: torch.dtype) -> list[tuple[Counter[str], dict[str, Total]]]:
    """Spans and totals of the messages of each of a few steps, as counted where messages start."""
    return sent_by(ranks, REAL[strategy], case, dtype)


def sent_by(ranks: Ranks, start: Start, case: Case, dtype: torch.dtype) -> list[tuple[Counter[str], dict[str, Total]]]:
    model = built(case).to(dtype)
    run = start(model, ranks, OPTIMIZERS["adamw"])
    counted = list(
        {id(counter): counter for counter in (run.sync, run.optimizer) if hasattr(counter, "traffic")}.values()
    )
    steps = []
    for ranks_batches in batches(case, ranks.world_size):
        for counter in counted:
            counter.traffic.clear()
        micro_batches = ranks_batches[ranks.rank]
        with spans_counted() as spans:
            for number, batch in enumerate(micro_batches):
                with run.sync.no_sync() if number < len(micro_batches) - 1 else nullcontext():
                    loss_of(run.sync.module, batch, case, ranks.rank).backward()
            run.sync.finish_gradient_synchronization()
            if case.clip is not None:
                run.sync.clip_grad_norm_(case.clip)
            run.optimizer.step()
            run.optimizer.zero_grad()
        messages = sum((counter.traffic.messages for counter in counted), Counter())
        payload_bytes = sum((counter.traffic.payload_bytes for counter in counted), Counter())
        steps.append(
            (spans, {name: Total(messages=messages[name], payload_bytes=payload_bytes[name]) for name in messages})
        )
    return steps


CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
    "unused somewhere": Case(unused="somewhere"),
    "accumulated and clipped": Case(accumulation=3, clip=1.0),
}
QUICK = ("unused somewhere", "accumulated and clipped")
"""Cases that send all that the others send; the others are slow tests."""


@pytest.mark.parametrize(
    ("strategy", "case"),
    slow_unless(lambda strategy, case: case in QUICK, itertools.product(OPTIONS, CASES)),
)
def test_a_step_sends_what_the_formula_says(strategy: str, case: str):
    training = CASES[case]
    clips = training.clip is not None
    exchange = exchanging(ranks=3, micro_batches=training.accumulation, clips=clips, **OPTIONS[strategy])
    expected = step_messages(exchange, sizes(training, strategy))
    for steps in run_ranks(3, sent, strategy, training, torch.float32):
        for spans, counted in steps:
            assert spans == Counter(message.span for message in expected)
            assert counted == totals(expected)


@pytest.mark.parametrize("strategy", OPTIONS)
def test_a_step_with_bf16_weights_sends_what_the_formula_says(strategy: str):
    case = Case(frozen=True, tied=True)
    exchange = exchanging(ranks=2, **OPTIONS[strategy])
    expected = totals(step_messages(exchange, sizes(case, strategy, torch.bfloat16)))
    for steps in run_ranks(2, sent, strategy, case, torch.bfloat16):
        assert all(counted == expected for _, counted in steps)


GROUPED_CASES = [Case(clip=1.0), Case(unused="somewhere", accumulation=2, tied=True)]
GROUPED = [
    (strategy, size, number)
    for strategy in HYBRID_STRATEGIES
    for size in (1, 2, 4)
    for number in range(len(GROUPED_CASES))
    if size < 4 or strategy == "fsdp_units"
]
"""Strategy, ranks in a group of four, and number of the case."""
QUICK_GROUPED = [
    *[("bucketed", 2, 0), ("sharded_flat_units", 2, 0), ("fsdp_units", 2, 0)],
    *[("fsdp_units", 2, 1), ("sharded_flat bf16", 1, 0)],
]


def sent_in_groups(ranks: Ranks, runs: list[tuple[str, int, int]]) -> list[list[tuple[Counter[str], dict[str, Total]]]]:
    return [
        sent_by(ranks, HYBRID_STRATEGIES[strategy](size), GROUPED_CASES[number], torch.float32)
        for strategy, size, number in runs
    ]


@pytest.mark.parametrize("runs", [QUICK_GROUPED, pytest.param(GROUPED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_step_in_groups_sends_what_the_formula_says(runs: list[tuple[str, int, int]]):
    for of_rank in run_ranks(4, sent_in_groups, runs):
        for (strategy, size, number), steps in zip(runs, of_rank, strict=True):
            case = GROUPED_CASES[number]
            options = {"clips": case.clip is not None, "micro_batches": case.accumulation, **OPTIONS[strategy]}
            exchange = exchanging(ranks=4, shard_ranks=size, **options)
            expected = step_messages(exchange, sizes(case, strategy))
            for spans, counted in steps:
                assert spans == Counter(message.span for message in expected), (strategy, size, number)
                assert counted == totals(expected), (strategy, size, number)


def test_every_strategy_of_trainstep_has_its_formula():
    assert OPTIONS.keys() == REAL.keys()
    assert {"none", *(options["strategy"] for options in OPTIONS.values())} == set(OURS)


SMALL = [
    ParameterSize(name="embedding", numel=100, element_bytes=4),
    ParameterSize(name="blocks.0.weight", numel=90, element_bytes=4, unit="blocks.0"),
    ParameterSize(name="blocks.0.scale", numel=3, element_bytes=4, unit="blocks.0", trained=False),
    ParameterSize(name="blocks.1.weight", numel=90, element_bytes=4, unit="blocks.1"),
    ParameterSize(name="norm", numel=10, element_bytes=4),
]


def by_operation(strategy: str, **options: object) -> dict[str, tuple[int, int]]:
    by_name = totals(step_messages(exchanging(strategy=strategy, ranks=4, **options), SMALL))
    return {operation: (total.messages, total.payload_bytes) for operation, total in by_name.items()}


def test_messages_are_as_counted_by_hand():
    """There are 290 trained elements; padded to multiples of 8, they are 104 + 96 + 96 + 16 = 312, with a flag for each of 4."""
    assert by_operation("none") == {}
    assert by_operation("naive") == {"all_reduce": (5, 4 * 290 + 4)}
    assert by_operation("overlapped", reduce_element_bytes=2) == {"all_reduce": (5, 2 * 290 + 4)}
    assert by_operation("flat") == {"all_reduce": (1, 4 * (312 + 4))}
    assert by_operation("bucketed", bucket_bytes=800) == {"all_reduce": (2, 4 * (312 + 4))}
    # ranks own 100, 90, 90 and 10 elements, so nothing is packed
    assert by_operation("sharded") == {"all_reduce": (1, 4 * 316), "broadcast": (4, 4 * 290)}
    # units padded to 4 shards of 8 elements: 104 + 16 -> 128, 96 -> 96, 96 -> 96, and the frozen 3 -> 32
    assert by_operation("sharded_flat") == {
        "reduce_scatter": (3, 4 * (128 + 96 + 96)),
        "all_gather": (3, 4 * (128 + 96 + 96)),
        "all_reduce": (1, 4),
    }
    # the root and the last block are gathered once, both parts of blocks.0 twice
    assert by_operation("fsdp", clips=True) == {
        "reduce_scatter": (3, 4 * (128 + 96 + 96)),
        "all_gather": (6, 4 * (128 + 96 + 2 * (96 + 32))),
        "all_reduce": (2, 4 + 4),
    }
    assert by_operation("fsdp", reshard_after_forward=False)["all_gather"] == (4, 4 * (128 + 96 + 96 + 32))
    assert by_operation("none", scales_loss=True) == {"all_reduce": (1, 4)}


def test_messages_in_groups_are_as_counted_by_hand():
    """Units padded to 2 shards of 8 elements: 104 + 16 -> 128, 96 and 96, the frozen 3 -> 16; half of them goes across groups."""
    assert by_operation("fsdp", shard_ranks=2, clips=True) == {
        "reduce_scatter in groups": (3, 4 * (128 + 96 + 96)),
        "all_reduce across groups": (3, 4 * (64 + 48 + 48)),
        "all_gather in groups": (6, 4 * (128 + 96 + 2 * (96 + 16))),
        "all_reduce": (1, 4),
        "all_reduce in groups": (1, 4),
    }
    # 312 padded elements and 4 flags, to 2 parts of 8
    assert by_operation("bucketed", shard_ranks=2) == {
        "reduce_scatter in groups": (1, 4 * 320),
        "all_reduce across groups": (1, 4 * 160),
        "all_gather in groups": (1, 4 * 320),
    }
    assert by_operation("fsdp", shard_ranks=4) == by_operation("fsdp")
    alone = by_operation("sharded_flat", shard_ranks=1, clips=True)
    assert alone == {"all_reduce across groups": (3, 4 * (120 + 96 + 96)), "all_reduce": (1, 4)}


def test_a_rank_sends_an_nth_across_groups():
    """S bytes of gradients cost 2 S/8 (G-1)/G around a ring of G nodes, and all ranks in one ring 2 S (N-1)/N."""
    sizes = [ParameterSize(name="weight", numel=2**20, element_bytes=4)]
    messages = step_messages(exchanging(strategy="fsdp", ranks=32, shard_ranks=8), sizes)
    across = [message for message in messages if message.operation == "all_reduce across groups"]
    assert wire_bytes(across, 32, 8) == 2 * 4 * 2**20 // 8 * 3 // 4
    inside = [message for message in messages if message.operation.endswith("in groups")]
    assert wire_bytes(inside, 32, 8) == 2 * 4 * 2**20 * 7 // 8


def test_ranks_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(
        ValueError, match="shard_ranks: 6 ranks cannot be divided into groups of 4; take a divisor of 6"
    ):
        exchanging(strategy="fsdp", ranks=6, shard_ranks=4)


def test_small_parameters_of_an_owner_share_a_message():
    """Two ranks own 100 + 10 and 90 + 90 elements; padded, 104 + 16 and 96 + 96."""
    messages = step_messages(exchanging(strategy="sharded", ranks=2), SMALL)
    assert [(message.label, message.payload_bytes) for message in messages if message.operation == "broadcast"] == [
        ("parameters of rank 0", 4 * (104 + 16)),
        ("parameters of rank 1", 4 * (96 + 96)),
    ]
    messages = step_messages(exchanging(strategy="sharded", ranks=2, pack_below_bytes=360), SMALL)
    assert [message.payload_bytes for message in messages if message.operation == "broadcast"] == [400, 40, 360, 360]


@pytest.mark.parametrize("strategy", OURS)
def test_a_single_rank_sends_nothing(strategy: str):
    assert step_messages(exchanging(strategy=strategy, ranks=1, clips=True, scales_loss=True), SMALL) == ()


def test_wire_bytes_are_those_of_rings():
    """Each rank sends 2 S (N-1)/N for an all-reduce of S bytes, half of that for a reduce-scatter or all-gather, S to broadcast."""
    flat = step_messages(exchanging(strategy="flat", ranks=4), SMALL)
    assert wire_bytes(flat, 4) == 2 * 4 * 316 * 3 // 4
    sharded_flat = step_messages(exchanging(strategy="sharded_flat", ranks=4), SMALL)
    assert wire_bytes(sharded_flat, 4) == 2 * 4 * 320 * 3 // 4 + 6
    sharded = step_messages(exchanging(strategy="sharded", ranks=4), SMALL)
    assert wire_bytes(sharded, 4) == wire_bytes(flat, 4) + 4 * 290


def test_torchs_strategies_have_no_formula():
    with pytest.raises(
        ValueError, match="strategy: messages of torch_ddp are not known; take ours of its kind, bucketed"
    ):
        exchanging(strategy="torch_ddp", ranks=2)


def test_units_are_those_of_the_module():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False))
    parameters = parameter_sizes(model)
    assert [(parameter.name, parameter.numel, parameter.unit) for parameter in parameters] == [
        ("0.weight", 6, "0"),
        ("0.bias", 3, "0"),
        ("1.weight", 12, "1"),
    ]
