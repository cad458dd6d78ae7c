"""Wrapping a module: the module stays unchanged, refusals name the tensor, buckets, and the end of synchronisation."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel_strategies import STRATEGIES
from parallel_training import Case, built
from ranks import run_ranks
from trainstep import parallel
from trainstep.parallel.ddp import BucketedDDP, FlatDDP, OverlappedDDP
from trainstep.parallel.gradient_sync import GradientSync, ReplicatedGradients
from trainstep.parallel.ranks import Ranks, alone, ranks_around
from trainstep.parallel.sharded_optimizer import ShardedOptimizer

WRAPPERS = [STRATEGIES[name] for name in ("naive", "flat", "overlapped", "bucketed")]


SGD = partial(torch.optim.SGD, lr=0.1)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_ddp_is_the_bucketed_strategy_with_its_defaults():
    assert parallel.DDP is BucketedDDP


def test_the_module_is_unchanged_by_wrapping():
    model = two_layers()
    names = list(model.state_dict())
    forward = model.forward
    BucketedDDP(model, alone())
    assert list(model.state_dict()) == names
    assert model.forward == forward


def add(model: nn.Module) -> None:
    model.register_module("more", nn.Linear(2, 2))


def replace(model: nn.Module) -> None:
    model.get_submodule("1").register_parameter("bias", nn.Parameter(torch.zeros(2)))


def replace_module(model: nn.Module) -> None:
    model.register_module("1", nn.Linear(4, 2))


def change_sides(model: nn.Module) -> None:
    """Change parameters so that there are as many as before, in other places."""
    del model.get_submodule("1")._parameters["bias"]
    model.get_submodule("0").register_parameter("extra", nn.Parameter(torch.zeros(2)))


def unfreeze(model: nn.Module) -> None:
    model.get_parameter("0.bias").requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add, "more.weight: was added"),
        (replace, "1.bias: was added"),
        (replace_module, "1.weight: was added"),
        (change_sides, "0.extra: was added"),
        (unfreeze, "0.bias: was unfrozen"),
    ],
)
@pytest.mark.parametrize("start", WRAPPERS)
def test_parameters_that_came_later_are_refused_by_name(
    start: Callable[..., object], change: Callable[[nn.Module], None], name: str
):
    model = two_layers()
    model.get_parameter("0.bias").requires_grad_(False)
    sync = start(model, alone(), SGD).sync  # type: ignore[attr-defined]
    model(torch.ones(1, 4)).sum().backward()
    sync.finish_gradient_synchronization()
    change(model)
    with pytest.raises(ValueError, match=name):
        sync.finish_gradient_synchronization()


@pytest.mark.parametrize("wrap", [OverlappedDDP, BucketedDDP])
def test_a_second_backward_before_the_end_is_refused(wrap: Callable[..., ReplicatedGradients]):
    model = two_layers()
    sync = wrap(model, alone())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"was sent to the other ranks already.*no_sync"):
        model(torch.ones(1, 4)).sum().backward()
    assert sync.traffic.messages.total() == 0


@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed", "sharded_flat", "fsdp"])
def test_sparse_gradients_are_refused_by_name(name: str):
    model = nn.Embedding(4, 2, sparse=True)
    sync = STRATEGIES[name](model, alone(), SGD).sync
    with pytest.raises(ValueError, match="weight: its gradient is sparse"):
        backward_and_finish(model, sync, torch.tensor([1]))


@pytest.mark.parametrize("name", ["flat", "overlapped", "bucketed", "sharded_flat", "fsdp"])
def test_a_sparse_gradient_of_an_earlier_micro_batch_is_refused_by_name(name: str):
    """The last micro-batch does not use the parameter."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    sync = STRATEGIES[name](model, alone(), SGD).sync
    with sync.no_sync():
        model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"0\.weight: its gradient is sparse"):  # noqa: PT012  (in backward or after it)
        model[1](torch.ones(1, 2)).sum().backward()
        sync.finish_gradient_synchronization()


def backward_and_finish(model: nn.Module, sync: GradientSync, inputs: torch.Tensor) -> None:
    model(inputs).sum().backward()
    sync.finish_gradient_synchronization()


def test_another_device_is_refused():
    with pytest.raises(ValueError, match=r"0\.weight: is on meta, and this rank's device is cpu"):
        BucketedDDP(two_layers().to("meta"), alone())


def test_without_a_process_group_it_says_how_to_start_one():
    with pytest.raises(ValueError, match="torchrun"):
        FlatDDP(two_layers())


@pytest.mark.parametrize("field", ["bucket_mib", "first_bucket_mib", "last_bucket_mib"])
@pytest.mark.parametrize("size", [0, -math.inf, math.nan])
def test_bucket_sizes_are_positive(field: str, size: float):
    with pytest.raises(ValueError, match=f"{field}: must be positive"):
        BucketedDDP(two_layers(), alone(), **{field: size})


def test_an_infinite_size_gives_one_bucket():
    for options in ({"bucket_mib": math.inf}, {"bucket_cap_mb": math.inf}):
        (bucket,) = BucketedDDP(two_layers(), alone(), **options).buckets
        assert len(bucket.parameters) == 4
    blocks = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    optimizer = ShardedOptimizer.flat(blocks, torch.optim.AdamW, ranks=alone(), bucket_mib=math.inf)
    assert [len(pieces) for pieces in optimizer.gradient_sync.unit_pieces] == [12]


def test_torchs_name_for_a_buckets_size_means_the_same_mib():
    layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]  # a MiB each
    sizes = {}
    for name in ("bucket_mib", "bucket_cap_mb"):
        sync = BucketedDDP(nn.Sequential(*layers), alone(), **{name: 2})
        sizes[name] = [len(bucket.parameters) for bucket in sync.buckets]
        sync.detach()
    assert sizes == {"bucket_mib": [2, 2], "bucket_cap_mb": [2, 2]}
    with pytest.raises(ValueError, match="bucket_cap_mb: is torch's name for bucket_mib; give only one of the two"):
        BucketedDDP(two_layers(), alone(), bucket_mib=2, bucket_cap_mb=2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_module_is_wrapped_once_at_a_time(name: str):
    model = built(Case())
    run = STRATEGIES[name](model, alone(), SGD)
    with pytest.raises(ValueError, match=r"embedding\.weight: its gradient is synchronised already; detach\(\)"):
        BucketedDDP(model, alone())
    run.sync.detach()
    BucketedDDP(model, alone())


@pytest.mark.parametrize("name", STRATEGIES)
def test_wrapped_objects_that_a_program_drops_are_freed(name: str):
    model = built(Case())
    run = STRATEGIES[name](model, alone(), SGD)
    model(torch.tensor([1]), side=True).sum().backward()
    run.sync.finish_gradient_synchronization()
    run.optimizer.step()
    references = [weakref.ref(model), weakref.ref(run.sync), weakref.ref(run.optimizer)]
    del model, run
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_gradients_of_a_dropped_wrapper_are_refused():
    model = two_layers()
    BucketedDDP(model, alone())
    gc.collect()
    with pytest.raises(
        RuntimeError, match=r"the wrapper that synchronises its gradient is gone; keep it .* or detach\(\)"
    ):
        model(torch.ones(1, 4)).sum().backward()


def test_a_wrapper_is_not_copied():
    with pytest.raises(ValueError, match="BucketedDDP: can be neither copied nor pickled"):
        copy.deepcopy(BucketedDDP(two_layers(), alone()))


class Odd(nn.Module):
    """Tensors of unusual strides and dtypes; on rank 0 all elements are 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.full((2, 3), float(rank)).t())
        self.register_buffer("repeated", torch.full((1, 4), rank).expand(1000, 4))
        self.register_buffer("every_other", torch.full((2, 8), float(rank))[:, ::2])
        self.register_buffer("number", torch.tensor(rank))
        self.register_buffer("empty", torch.zeros(0, 3))
        for dtype in (torch.bool, torch.int8, torch.int16, torch.uint16, torch.bfloat16, torch.float8_e4m3fn):
            self.register_buffer(str(dtype).replace("torch.", "in_"), torch.full((3,), float(rank)).to(dtype))
        self.register_buffer("in_complex", torch.full((3,), 1j * rank))


def odd_state(ranks: Ranks) -> list[bool]:
    model = Odd(ranks.rank)
    OverlappedDDP(model, ranks).detach()
    return [bool((value.to(torch.complex64).abs() == 0).all()) for value in model.state_dict().values()]


def test_tensors_of_any_dtype_and_strides_start_as_on_rank_0():
    for are_zero in run_ranks(2, odd_state):
        assert all(are_zero)


def gradients_after_detach(ranks: Ranks) -> list[float]:
    model = two_layers()
    sync = BucketedDDP(model, ranks)
    sync.detach()
    model(torch.full((1, 4), float(ranks.rank))).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    return [float(gradient.abs().sum())]


def test_detached_gradients_are_each_ranks_own():
    first, second = run_ranks(2, gradients_after_detach)
    assert first == [0.0]
    assert second != [0.0]


def views(ranks: Ranks) -> list[object]:
    """The address and the error of a gradient, over steps after which gradients are dropped, zeroed and dropped."""
    model = two_layers()
    sync = BucketedDDP(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[object] = []
    for set_to_none in (True, False, True):
        model(torch.ones(1, 4)).sum().backward()
        sync.finish_gradient_synchronization()
        gradient = model[0].weight.grad
        assert gradient is not None
        steps.append((gradient.data_ptr(), float(gradient[0, 0] - model[1].weight.detach().sum(0)[0])))
        optimizer.zero_grad(set_to_none=set_to_none)
    return steps


def test_gradients_are_views_of_their_bucket():
    for steps in run_ranks(2, views):
        assert len({pointer for pointer, _ in steps}) == 1
        assert all(abs(error) < 1e-6 for _, error in steps)


def bf16_views(ranks: Ranks) -> tuple[str, str, bool, float]:
    model = two_layers()
    sync = BucketedDDP(model, ranks, reduce_dtype=torch.bfloat16, keeps_gradient_dtype=False)
    for _ in range(2):
        model(torch.full((1, 4), 1.0 + ranks.rank)).sum().backward()
        sync.finish_gradient_synchronization()
        norm = float(sync.clip_grad_norm_(1e-3))
        gradients = [parameter.grad for parameter in model.parameters()]
        clipped = torch.stack([gradient.float().norm() for gradient in gradients if gradient is not None]).norm()
        kinds = {str(gradient.dtype) for gradient in gradients if gradient is not None}
        for parameter in model.parameters():
            parameter.grad = None
    return *kinds, str(model[0].weight.dtype), norm > 0.1, float(clipped)


def test_bf16_buckets_are_the_gradients_and_are_clipped_in_place():
    for kind, weights, was_larger, clipped in run_ranks(2, bf16_views):
        assert (kind, weights, was_larger) == ("torch.bfloat16", "torch.float32", True)
        assert clipped == pytest.approx(1e-3, rel=0.02)


class OneOrTwo(nn.Module):
    """A module whose second layer may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        output = self.first(x)
        return self.second(output) if uses_second else output


def flags_of_steps(ranks: Ranks, name: str) -> list[list[bool]]:
    """Whether each parameter has a gradient at the end of each step. Both ranks use the second layer, then none, one, none, ..."""
    model = OneOrTwo()
    run = STRATEGIES[name](model, ranks, SGD)
    flags = []
    for users in ((0, 1), (), (1,), (), (0, 1), (0,), ()):
        model(torch.ones(1, 2), ranks.rank in users).sum().backward()
        run.sync.finish_gradient_synchronization()
        parameters = getattr(run.sync, "pieces", run.sync.trained_parameters)
        flags.append([parameter is not None and parameter.grad is not None for parameter in parameters])
        run.optimizer.zero_grad()
    return flags


@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed", "sharded_flat", "fsdp"])
def test_used_parameters_are_exchanged_again_in_each_step(name: str):
    """Flags of a step that used every parameter may be kept for the next step; other flags must not be."""
    every_rank = run_ranks(2, flags_of_steps, name)
    if name not in ("sharded_flat", "fsdp"):  # whose ranks each have pieces
        assert every_rank[0] == every_rank[1]
    anywhere = [
        [on_rank_0 or on_rank_1 for on_rank_0, on_rank_1 in zip(*steps, strict=True)]
        for steps in zip(*every_rank, strict=True)
    ]
    used = [[True] * 4, [True, True, False, False]]
    assert anywhere == [used[0], used[1], used[0], used[1], used[0], used[0], used[1]]


def devices_of_omitted_ranks(_ranks: Ranks) -> list[str]:
    """The device that a wrapper chooses for a module on the CPU, on a GPU and on meta, with gloo and then with NCCL."""
    modules = [SimpleNamespace(device=torch.device(device)) for device in ("cpu", "cuda:1", "meta")]
    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        on_gloo = [str(ranks_around([module]).device) for module in modules]  # type: ignore[list-item]
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            return on_gloo + [str(ranks_around([module]).device) for module in modules]  # type: ignore[list-item]


def test_without_ranks_the_device_is_the_modules():
    """NCCL has no CPU, so a module on the CPU gets the GPU as its device, and is refused by name for it."""
    assert run_ranks(2, devices_of_omitted_ranks) == [["cpu", "cuda:1", "cpu", "cuda:0", "cuda:1", "cuda:0"]] * 2


def wrapped_without_ranks(_ranks: Ranks) -> list[str]:
    model = two_layers()
    devices = [str(BucketedDDP(model).ranks.device)]
    devices.append(str(ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).ranks.device))
    flat = ShardedOptimizer.flat(two_layers(), torch.optim.SGD, lr=0.1)
    return [*devices, str(flat.gradient_sync.ranks.device)]


def test_ranks_may_be_omitted():
    assert run_ranks(2, wrapped_without_ranks) == [["cpu"] * 3] * 2
