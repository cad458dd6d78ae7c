"""Where ranks wrap different modules or options, every rank names the difference and the ranks, and none hangs or aborts."""

import textwrap
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from parallel_strategies import BF16_STRATEGIES, STRATEGIES, TORCH_STRATEGIES, Start
from ranks import run_ranks
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.same_setup import check_same_setup, named_tensors
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.parallel.sharded_optimizer import ShardedOptimizer

EVERY_START = {**STRATEGIES, **BF16_STRATEGIES, **TORCH_STRATEGIES}
SGD = partial(torch.optim.SGD, lr=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Module()
    built.first = nn.Linear(4, 8)
    built.second = nn.Linear(8, 4)
    built.register_buffer("offset", torch.zeros(4))
    return built


def another_shape(built: nn.Module) -> None:
    built.second.weight = nn.Parameter(torch.zeros(8, 8))


def another_shape_of_as_many(built: nn.Module) -> None:
    built.second.weight = nn.Parameter(torch.zeros(8, 4))


def another_dtype(built: nn.Module) -> None:
    built.second.half()


def another_order(built: nn.Module) -> None:
    first = built.first
    del built.first
    built.first = first


def frozen(built: nn.Module) -> None:
    built.first.bias.requires_grad_(False)


def another_layer(built: nn.Module) -> None:
    built.third = nn.Linear(4, 4)


def no_bias(built: nn.Module) -> None:
    built.second.bias = None


def another_layout(built: nn.Module) -> None:
    built.second.weight = nn.Parameter(built.first.weight.data.t())


def another_buffer(built: nn.Module) -> None:
    built.offset = torch.zeros(5)


END = "; every rank must wrap the same module with the same options"
SENTENCES: dict[Callable[[nn.Module], None], str] = {
    another_shape: "second.weight: has shape (8, 8) on rank 1 and (4, 8) on ranks 0, 2",
    another_shape_of_as_many: "second.weight: has shape (8, 4) on rank 1 and (4, 8) on ranks 0, 2",
    another_dtype: "second.weight: has dtype float16 on rank 1 and float32 on ranks 0, 2; "
    "second.bias: has dtype float16 on rank 1 and float32 on ranks 0, 2",
    another_order: "first.weight: is number 2 on rank 1 and 0 on ranks 0, 2; "
    "first.bias: is number 3 on rank 1 and 1 on ranks 0, 2; second.weight: is number 0 on rank 1 and 2 on ranks 0, 2; and 1 more",
    frozen: "first.bias: is frozen on rank 1 and trained on ranks 0, 2",
    another_layer: "third.weight: is there on rank 1 and missing on ranks 0, 2; "
    "third.bias: is there on rank 1 and missing on ranks 0, 2",
    no_bias: "second.bias: is missing on rank 1 and there on ranks 0, 2",
    another_layout: "second.weight: has strides (1, 4) on rank 1 and is contiguous on ranks 0, 2",
    another_buffer: "offset: has shape (5,) on rank 1 and (4,) on ranks 0, 2",
}


def raised(work: Callable[[], object]) -> str:
    """The ValueError's sentence; empty if there is none."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def wrap_changed(ranks: Ranks, start: str, changes: list[Callable[[nn.Module], None]]) -> list[str]:
    """This rank's sentence for each change to the model of rank 1. The ranks continue together after each."""
    sentences = []
    for change in changes:
        changed = model()
        if ranks.rank == 1:
            change(changed)
        sentences.append(raised(lambda changed=changed: EVERY_START[start](changed, ranks, SGD)))  # type: ignore[misc]
    return sentences


@pytest.mark.parametrize(
    "start", ["naive", "flat", "overlapped", "bucketed", "sharded_flat", "fsdp", "torch_ddp", "torch_fsdp2"]
)
def test_every_wrapper_names_the_tensor_and_the_ranks(start: str):
    sentences = run_ranks(3, wrap_changed, start, list(SENTENCES))
    assert sentences == [[sentence + END for sentence in SENTENCES.values()]] * 3


def wrap_by_different_strategies(ranks: Ranks, pairs: list[tuple[str, str]]) -> list[str]:
    """This rank's sentence for each pair, where rank 1 wraps by the second strategy and the others by the first."""
    return [raised(lambda start=pair[ranks.rank == 1]: EVERY_START[start](model(), ranks, SGD)) for pair in pairs]  # type: ignore[misc]


def test_every_pair_of_strategies_is_a_difference():
    starts = ["naive", "flat", "overlapped", "bucketed", "sharded_flat", "fsdp", "torch_ddp", "torch_fsdp2"]
    names = [
        "NaiveDDP",
        "FlatDDP",
        "OverlappedDDP",
        "BucketedDDP",
        "FlatShardedOptimizer",
        "FSDP",
        "TorchDDP",
        "TorchFSDP2",
    ]
    pairs = [(first, second) for first in range(len(starts)) for second in range(len(starts)) if first != second]
    sentences = run_ranks(3, wrap_by_different_strategies, [(starts[first], starts[second]) for first, second in pairs])
    assert (
        sentences
        == [
            [f"strategy: is {names[second]} on rank 1 and {names[first]} on ranks 0, 2{END}" for first, second in pairs]
        ]
        * 3
    )


def shard(parameters: list[nn.Parameter], ranks: Ranks, **options: object) -> ShardedOptimizer:
    return ShardedOptimizer(parameters, torch.optim.AdamW, ranks=ranks, **options)  # type: ignore[arg-type]


def wrap_with_different_options(ranks: Ranks) -> list[str]:
    odd = ranks.rank == 1
    built = model()
    bfloat16 = torch.bfloat16 if odd else None
    units = [built.first] if odd else None
    wraps: list[Callable[[], object]] = [
        lambda: BucketedDDP(model(), ranks, bucket_mib=1.0 if odd else None),
        lambda: BucketedDDP(model(), ranks, last_bucket_mib=3.0 if odd else 2.0),
        lambda: NaiveDDP(model(), ranks, reduce_dtype=bfloat16),
        lambda: FlatDDP(model(), ranks, keeps_gradient_dtype=odd),
        lambda: FSDP(model(), ranks, ahead=2 if odd else 1),
        lambda: FSDP(built, ranks, units=units),
        lambda: ShardedGradients(model(), ranks, bucket_mib=5.0 if odd else 6.0),
        lambda: FlatShardedOptimizer(model(), torch.optim.Adam if odd else torch.optim.AdamW, ranks=ranks),
        lambda: FlatShardedOptimizer(model(), torch.optim.AdamW, ranks=ranks, lr=0.5 if odd else 0.25),
        lambda: shard(list(model().parameters()), ranks, pack_below_mib=0 if odd else 1),
        lambda: shard(list(model().parameters()), ranks, betas=(0.5, 0.5) if odd else (0.5, 0.75)),
        lambda: shard(list(model().parameters())[odd:], ranks),
        lambda: shard([nn.Parameter(torch.zeros(3 if odd else 2))], ranks),
        lambda: shard([nn.Parameter(torch.zeros(2))], ranks, **({"lr": 1, "eps": 2} if odd else {"eps": 2, "lr": 1})),
        lambda: check_same_setup("any", [], Collectives(ranks), options={"many": [*range(99), odd]}),
    ]
    return [raised(wrap) for wrap in wraps]


def test_options_that_differ_are_named():
    long = textwrap.shorten(str(list(range(99))), 100)
    first, second, third = run_ranks(3, wrap_with_different_options)
    assert first == second == third
    assert [sentence.removesuffix(END) for sentence in second] == [
        "bucket_mib: is 1.0 on rank 1 and null on ranks 0, 2",
        "last_bucket_mib: is 3.0 on rank 1 and 2.0 on ranks 0, 2",
        'reduce_dtype: is "bfloat16" on rank 1 and null on ranks 0, 2',
        "keeps_gradient_dtype: is true on rank 1 and false on ranks 0, 2",
        "ahead: is 2 on rank 1 and 1 on ranks 0, 2",
        'units: is ["first"] on rank 1 and null on ranks 0, 2',
        "bucket_mib: is 5.0 on rank 1 and 6.0 on ranks 0, 2",
        'optimizer_cls: is "Adam" on rank 1 and "AdamW" on ranks 0, 2',
        "lr: is 0.5 on rank 1 and 0.25 on ranks 0, 2",
        "pack_below_mib: is 0 on rank 1 and 1 on ranks 0, 2",
        "betas: is [0.5, 0.5] on rank 1 and [0.5, 0.75] on ranks 0, 2",
        "params[3]: is missing on rank 1 and there on ranks 0, 2; params[0]: has shape (8,) on rank 1 and (8, 4) on ranks 0, 2; "
        "params[1]: has shape (4, 8) on rank 1 and (8,) on ranks 0, 2; and 1 more",
        "params[0]: has shape (3,) on rank 1 and (2,) on ranks 0, 2",
        "",
        f"many: is {long} on rank 1 and {long} on ranks 0, 2",
    ]


def later_additions(ranks: Ranks) -> list[str]:
    built = model()
    built.first.bias.requires_grad_(False)
    built.second.bias.requires_grad_(False)
    optimizer = shard([built.first.weight], ranks)
    sync = ShardedGradients(built, ranks)
    added = (built.first if ranks.rank == 1 else built.second).bias.requires_grad_(True)
    return [raised(lambda: optimizer.add_param_group({"params": [added]})), raised(lambda: sync.adopt([added]))]


def test_parameters_that_are_added_later_are_compared_too():
    shapes, names = run_ranks(3, later_additions)[0]
    assert shapes.startswith("params[0]: has shape (8,) on rank 1 and (4,) on ranks 0, 2")
    assert names.startswith("second.bias: is missing on rank 1 and there on ranks 0, 2")


def compare(ranks: Ranks, differs: list[int]) -> tuple[str, dict[str, int]]:
    collectives = Collectives(ranks)
    tensor = torch.zeros(2 if ranks.rank in differs else 3)
    sentence = raised(lambda: check_same_setup("any", [("x", tensor)], collectives))
    return sentence.removesuffix(END), dict(collectives.traffic.payload_bytes)


def test_equal_ranks_send_one_hash_each():
    assert run_ranks(3, compare, []) == [("", {"all_gather": 3 * 32})] * 3


def test_the_rank_that_differs_from_most_is_named_first():
    assert run_ranks(3, compare, [2])[0][0] == "x: has shape (2,) on rank 2 and (3,) on ranks 0, 1"
    assert run_ranks(3, compare, [0, 1])[0][0] == "x: has shape (3,) on rank 2 and (2,) on ranks 0, 1"
    assert run_ranks(2, compare, [0])[0][0] == "x: has shape (3,) on rank 1 and (2,) on rank 0"


@pytest.mark.multigpu
def test_gpus_compare_too():
    assert run_ranks(2, compare, [], backend="nccl") == [("", {"all_gather": 2 * 32})] * 2
    assert run_ranks(2, compare, [0], backend="nccl")[1][0] == "x: has shape (3,) on rank 1 and (2,) on rank 0"


def test_a_process_on_its_own_compares_nothing():
    def never() -> list[tuple[str, Tensor]]:
        raise AssertionError

    collectives = Collectives(alone())
    check_same_setup("any", (pair for _ in [0] for pair in never()), collectives)
    assert not collectives.traffic.messages


def wrap_equally(ranks: Ranks) -> list[str]:
    names = sorted(EVERY_START)
    return [raised(partial(start_on, ranks, EVERY_START[name])) for name in names]


def start_on(ranks: Ranks, start: Start) -> None:
    built = model()
    assert len(list(named_tensors(built))) == 5
    start(built, ranks, SGD)


def test_equal_modules_are_wrapped():
    assert run_ranks(2, wrap_equally) == [[""] * len(EVERY_START)] * 2
