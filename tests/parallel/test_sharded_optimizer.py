"""ShardedOptimizer: owners, messages, agreement with the optimizer that it shards, and state; parity is in test_parity.py."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import run_ranks
from trainstep.config.model import size, size_names
from trainstep.costs.buckets import ALIGNMENT, assign_owners
from trainstep.ops.adamw import AdamW
from trainstep.parallel.ddp import BucketedDDP
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.sharded_optimizer import ShardedOptimizer, merge_state_dicts
from trainstep.training.attention import attention_named
from trainstep.training.transformer import Transformer

SHAPES = [(16, 8), (8,), (8, 4), (8,), (4, 12), (4,), (3, 5)]
ADAMW = partial(torch.optim.AdamW, lr=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def parameters() -> list[nn.Parameter]:
    numbers = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=numbers)) for shape in SHAPES]


def set_gradients(optimizer: torch.optim.Optimizer, step: int, *, lacking: int | None = None) -> None:
    numbers = torch.Generator().manual_seed(step)
    parameters_ = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters_):
        gradient = torch.randn(parameter.shape, generator=numbers)
        parameter.grad = gradient if parameter.requires_grad and index != lacking else None


def train(optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        set_gradients(optimizer, step, lacking=step)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


# Owners


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 8))
def test_owners_have_balanced_sizes(sizes_bytes: list[int], world_size: int):
    owners = assign_owners(sizes_bytes, [0] * world_size)
    totals = [
        sum(size for size, owner in zip(sizes_bytes, owners, strict=True) if owner == rank)
        for rank in range(world_size)
    ]
    assert sum(totals) == sum(sizes_bytes)
    assert max(totals) - min(totals) <= max(sizes_bytes, default=0)
    assert owners == assign_owners(sizes_bytes, [0] * world_size)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in size_names() if name != "8B"])
def test_owners_of_the_built_in_sizes_are_balanced(name: str, world_size: int):
    """The bound depends on the largest parameter. An embedding of 10,000 words is a fifth of `small`."""
    with torch.device("meta"):
        attention = attention_named("plain", 8, torch.device("cpu"))
        sizes = [parameter.nbytes for parameter in Transformer(size(name), attention=attention, context=8).parameters()]
    owners = assign_owners(sizes, [0] * world_size)
    totals = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world_size)
    ]
    mean = sum(sizes) / world_size
    assert max(totals) <= mean + max(sizes) * (1 - 1 / world_size)
    if max(sizes) < mean / 4:
        assert max(totals) / mean < 1.05


def test_ties_are_assigned_in_order():
    assert assign_owners([8, 8, 8, 8], [0, 0]) == [0, 1, 0, 1]
    assert assign_owners([1, 8, 4, 4], [0, 0]) == [0, 0, 1, 1]
    assert assign_owners([4, 4], [100, 0, 0]) == [1, 2]


def owners_and_states(ranks: Ranks) -> tuple[list[int | None], list[int], int]:
    own = parameters()
    own[3].requires_grad_(False)
    optimizer = ShardedOptimizer(own, ADAMW, ranks=ranks)
    set_gradients(optimizer, 0)
    optimizer.step()
    states = [index for index, parameter in enumerate(own) if optimizer.state.get(parameter)]
    held_bytes = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert held_bytes == 2 * optimizer.owned_bytes[ranks.rank]
    return optimizer.owners, states, held_bytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_owners_have_state(world_size: int):
    every_rank = run_ranks(world_size, owners_and_states)
    owners = every_rank[0][0]
    assert owners[3] is None
    for rank, (same_owners, states, _) in enumerate(every_rank):
        assert same_owners == owners
        assert states == [index for index, owner in enumerate(owners) if owner == rank]
    trained = sum(nn.Parameter(torch.empty(shape)).nbytes for index, shape in enumerate(SHAPES) if index != 3)
    assert sum(held_bytes for *_, held_bytes in every_rank) == 2 * trained


# Messages


def messages(ranks: Ranks, pack_below_mib: float) -> tuple[int, int]:
    own = [*parameters(), nn.Parameter(torch.ones(4, dtype=torch.float64)), nn.Parameter(torch.ones(6, 4).t())]
    optimizer = ShardedOptimizer(own, SGD, ranks=ranks, pack_below_mib=pack_below_mib)
    sent = []
    for step in range(3):
        optimizer.traffic.clear()
        for parameter in own:
            parameter.grad = None if step == 1 else torch.ones_like(parameter)
        optimizer.step()
        sent.append((optimizer.traffic.messages["broadcast"], optimizer.traffic.payload_bytes["broadcast"]))
        assert optimizer.traffic.messages.total() == sent[-1][0]
    assert sent == sent[:1] * 3
    return sent[0]


def test_a_step_sends_every_parameter_once():
    """With gradients or without: each in its own message, or those of an owner and dtype packed, at multiples of ALIGNMENT."""
    numel = [torch.Size(shape).numel() for shape in SHAPES] + [24]
    one_by_one = (len(numel) + 1, 4 * sum(numel) + 4 * 8)
    assert run_ranks(2, messages, 0.0) == [one_by_one] * 2
    aligned_bytes = 4 * sum(-(-count // ALIGNMENT) * ALIGNMENT for count in numel) + 4 * 8
    fp64_message = 1
    assert run_ranks(2, messages, 1.0) == [(2 + fp64_message, aligned_bytes)] * 2
    unpacked = 3  # of 512, 192 and 128 bytes; all the smaller ones, and the transposed one, are the second rank's
    assert run_ranks(2, messages, 128 / 2**20) == [(unpacked + 1 + fp64_message, aligned_bytes)] * 2


# Agreement with the optimizer that it shards


def same(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(tensor, expected_tensor) for tensor, expected_tensor in zip(tensors, expected, strict=True))


def train_with_everything(make: Callable[..., Any], groups_of_their_own: bool) -> list[Tensor]:
    """Train with options by group, a group added later, a scheduler, hooks, missing gradients and a closure; all results."""
    own = parameters()
    groups = [{"params": own[:3], "lr": 0.05}, {"params": own[3:5], "weight_decay": 0.3}]
    optimizer = make(groups if groups_of_their_own else own[:5], ADAMW)
    optimizer.add_param_group({"params": own[5:], "lr": 0.2})
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
    train(optimizer, range(4), scheduler)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(parameter**2).sum() for parameter in own]).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return [*own, loss, torch.tensor(calls), torch.tensor(scheduler.get_last_lr())]


def agrees_with_unsharded(ranks: Ranks, groups_of_their_own: bool, pack_below_mib: float) -> bool:
    sharded = partial(ShardedOptimizer, ranks=ranks, pack_below_mib=pack_below_mib)
    unsharded = train_with_everything(lambda groups, optimizer_cls: optimizer_cls(groups), groups_of_their_own)
    return same(train_with_everything(sharded, groups_of_their_own), unsharded)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("groups_of_their_own", [True, False])
def test_groups_schedulers_closures_and_hooks_work_as_unsharded(groups_of_their_own: bool, world_size: int):
    assert all(run_ranks(world_size, agrees_with_unsharded, groups_of_their_own, 1.0))
    assert all(run_ranks(world_size, agrees_with_unsharded, groups_of_their_own, 0.0))


def test_a_single_process_works_as_unsharded():
    assert agrees_with_unsharded(alone(), True, 1.0)


def train_one_parameter(ranks: Ranks) -> tuple[list[float], int]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = ShardedOptimizer([parameter], SGD, ranks=ranks)
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    return parameter.tolist(), len(optimizer.state)


def test_a_rank_may_own_nothing():
    values = torch.tensor([1 - 0.1 - 0.19] * 2).tolist()
    (first, owned), *others = run_ranks(3, train_one_parameter)
    assert (first, owned) == (pytest.approx(values), 1)
    assert others == [(first, 0)] * 2


def error_after_unfreezing(ranks: Ranks) -> str:
    own = parameters()
    own[0].requires_grad_(False)
    optimizer = ShardedOptimizer(own, SGD, ranks=ranks)
    own[0].requires_grad_(True)
    with pytest.raises(ValueError) as error:
        optimizer.step()
    return str(error.value)


def test_unfreezing_is_refused():
    assert "make the optimizer again" in run_ranks(2, error_after_unfreezing)[0]


def train_in_bf16(ranks: Ranks) -> tuple[bool, list[torch.dtype]]:
    """Train with gradients that stay in bf16; whether sharding changes nothing, and the dtypes of gradients."""
    results = []
    for make in (partial(ShardedOptimizer, ranks=ranks, optimizer_cls=AdamW), AdamW):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
        sync = BucketedDDP(model, ranks, reduce_dtype=torch.bfloat16, keeps_gradient_dtype=False)
        optimizer = make(model.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(10 * step + ranks.rank)
            model(torch.randn(4, 6)).square().mean().backward()
            sync.finish_gradient_synchronization()
            dtypes = [parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach() for parameter in model.parameters()])
    return same(*results), dtypes


def test_gradients_may_stay_in_bf16_with_trainsteps_adamw():
    assert run_ranks(2, train_in_bf16) == [(True, [torch.bfloat16] * 4)] * 2


# Saved and loaded state


def saved(ranks: Ranks, optimizer_cls: Callable[..., Any], frozen: bool) -> tuple[Any, Any, Any]:
    """Parameters, this rank's part of the state and the whole state, after three steps."""
    own = parameters()
    own[2].requires_grad_(not frozen)
    optimizer = ShardedOptimizer([{"params": own[:4]}, {"params": own[4:], "lr": 0.01}], optimizer_cls, ranks=ranks)
    train(optimizer, range(3))
    first_only = optimizer.gathered_state_dict()
    assert (first_only is None) == (ranks.rank > 0)
    gathered = optimizer.gathered_state_dict(on_all_ranks=True)
    assert first_only is None or equal(first_only, gathered)
    return copy.deepcopy((own, optimizer.state_dict(), gathered))


def resumed(
    ranks: Ranks, optimizer_cls: Callable[..., Any], own: list[nn.Parameter], states: list[Any]
) -> list[Tensor]:
    parameters_ = [copy.deepcopy(parameter) for parameter in own]
    optimizer = ShardedOptimizer([{"params": parameters_[:4]}, {"params": parameters_[4:]}], optimizer_cls, ranks=ranks)
    state = states[ranks.rank] if len(states) > 1 else states[0]
    optimizer.load_state_dict(copy.deepcopy(state))  # tensors from the pipe are in memory that ranks share
    assert optimizer.param_groups[1]["lr"] == 0.01
    assert sum(parameter.nbytes for parameter in optimizer.state) == optimizer.owned_bytes[ranks.rank]
    train(optimizer, range(3, 6))
    return [parameter.detach() for parameter in parameters_]


def uninterrupted(optimizer_cls: Callable[..., Any], frozen: bool, steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    own = parameters()
    own[2].requires_grad_(not frozen)
    optimizer = optimizer_cls([{"params": own[:4]}, {"params": own[4:], "lr": 0.01}])
    train(optimizer, range(steps))
    return [parameter.detach() for parameter in own], optimizer.state_dict()


def equal(value: Any, expected: Any) -> bool:
    if isinstance(value, Tensor):
        return torch.equal(value, expected) and value.dtype == expected.dtype
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(equal(value[key], expected[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(equal, value, expected))
    return bool(value == expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "optimizer_cls", [ADAMW, SGD, partial(torch.optim.AdamW, lr=0.1, fused=True), partial(AdamW, lr=0.1)]
)
def test_resumed_training_equals_uninterrupted_training(optimizer_cls: Callable[..., Any], frozen: bool):
    """Two ranks save; two load parts, three and one load the gathered or merged state, and so does torch's own optimizer."""
    every_rank = run_ranks(2, saved, optimizer_cls, frozen)
    own, _, gathered = every_rank[0]
    parts = [part for _, part, _ in every_rank]
    straight, _ = uninterrupted(optimizer_cls, frozen, 6)
    _, unsharded_state = uninterrupted(optimizer_cls, frozen, 3)
    merged = merge_state_dicts(parts[::-1])
    assert equal(gathered, unsharded_state)
    assert equal(merged, unsharded_state)
    for world_size, states in [
        (2, parts),
        (2, [gathered]),
        (3, [gathered]),
        (3, [merged]),
        (1, [merged]),
        (3, [unsharded_state]),
    ]:
        for resumed_parameters in run_ranks(world_size, resumed, optimizer_cls, own, states):
            assert same(resumed_parameters, straight)
    optimizer = optimizer_cls([{"params": own[:4]}, {"params": own[4:]}])
    optimizer.load_state_dict(gathered)
    train(optimizer, range(3, 6))
    assert same(own, straight)


def loading(ranks: Ranks, state: Any) -> str:
    with pytest.raises(ValueError) as error:
        ShardedOptimizer(parameters(), ADAMW, ranks=ranks).load_state_dict(state)
    return str(error.value)


def test_parts_that_do_not_fit_are_refused():
    parts = [part for _, part, _ in run_ranks(2, saved, ADAMW, False)]
    assert "part of rank 0 of 2, and does not fit rank 2 of 3" in run_ranks(3, loading, parts[0])[2]
    assert "does not fit rank 0 of 2; put all parts together" in run_ranks(2, loading, parts[1])[0]
    of_another_save = copy.deepcopy(parts[1])
    of_another_save["shard"]["owners"] = of_another_save["shard"]["owners"][::-1]
    for bad, message in [
        ([], "at least one"),
        ([parts[0]], "one part of each rank from 0 to 1, not of"),
        ([parts[0], parts[0]], "one part of each rank from 0 to 1, not of"),
        ([parts[0], of_another_save], "they were not written together"),
        ([parts[0], merge_state_dicts(parts)], "state dicts of a ShardedOptimizer's ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge_state_dicts(bad)


class Odd(torch.optim.SGD):
    """An optimizer with state that is neither tensors nor numbers."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["shape"] = parameter.shape
                self.state[parameter]["kept"] = {"names": ["a", None], 3: (1.5, torch.ones(2))}
                self.state[parameter]["device"] = parameter.device


def odd_state(ranks: Ranks) -> str:
    optimizer = ShardedOptimizer(parameters(), Odd, ranks=ranks, lr=0.1)
    set_gradients(optimizer, 0)
    optimizer.step()
    with pytest.raises(ValueError) as error:
        optimizer.gathered_state_dict()
    for state in optimizer.state.values():
        del state["device"]
    state = optimizer.gathered_state_dict(on_all_ranks=True)
    assert state is not None
    assert all(equal(kept["kept"], {"names": ["a", None], 3: (1.5, torch.ones(2))}) for kept in state["state"].values())
    assert list(state["state"]) == list(range(len(SHAPES)))
    return str(error.value)


def test_state_of_other_kinds_is_gathered_or_refused():
    assert run_ranks(2, odd_state)[0].startswith("state: a device cannot be gathered")
