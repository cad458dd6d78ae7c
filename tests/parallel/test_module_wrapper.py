"""A strategy is an nn.Module around the module, so that a training loop written for a module works with it."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel_strategies import STRATEGIES, TORCH_STRATEGIES
from parallel_training import OPTIMIZERS, Case, Model, batches, built, distance, train_alone
from ranks import run_ranks
from trainstep.parallel.ddp import BucketedDDP
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import Ranks, alone

ALL = {**STRATEGIES, "torch_ddp": TORCH_STRATEGIES["torch_ddp"], "torch_fsdp2": TORCH_STRATEGIES["torch_fsdp2"]}
SGD = OPTIMIZERS["sgd"]


def distance_through_the_wrapper(ranks: Ranks, name: str) -> float:
    """Train as train_together, but call, clear and read only the strategy; the distance from one process."""
    case = Case()
    run = ALL[name](built(case, seed=ranks.rank), ranks, SGD)
    model: Any = run.sync
    model.train()
    for ranks_batches in batches(case, ranks.world_size):
        ((tokens, targets),) = ranks_batches[ranks.rank]
        nn.functional.cross_entropy(model(tokens, side=True), targets).backward()
        model.finish_gradient_synchronization()
        run.optimizer.step()
        model.zero_grad()
    state = model.state_dict()
    parameters = [
        getattr(state[key], "full_tensor", lambda key=key: state[key])() for key, _ in built(case).named_parameters()
    ]
    assert list(state) == list(built(case).state_dict())
    return distance(parameters, train_alone(case, "sgd", ranks.world_size, torch.float32))


@pytest.mark.parametrize("name", ALL)
def test_a_wrapper_trains_and_has_the_modules_state(name: str):
    assert run_ranks(2, distance_through_the_wrapper, name) == [0, 0]


def names_and_modes(ranks: Ranks, name: str) -> None:
    model = built(Case(tied=True, frozen=True))
    expected = {
        "parameters": [key for key, _ in model.named_parameters()],
        "buffers": [key for key, _ in model.named_buffers()],
        "children": [key for key, _ in model.named_children()],
        "modules": [key for key, _ in model.named_modules()],
    }
    sync: Any = ALL[name](model, ranks, SGD).sync
    assert isinstance(sync, nn.Module)
    inner = sync.module.module if name == "torch_ddp" else sync.module
    assert inner is model
    names = {kind: [key for key, _ in getattr(sync, f"named_{kind}")()] for kind in expected}
    assert names == expected
    assert all(own is inner for own, inner in zip(sync.parameters(), model.parameters(), strict=True))
    assert sync.get_parameter("first.weight") is model.first.weight
    sync.eval()
    assert [sync.training, model.training, model.first.training] == [False] * 3
    sync.train()
    assert sync.training
    assert model.first.training
    applied: list[nn.Module] = []
    sync.apply(applied.append)
    assert model in applied
    assert sync not in applied


@pytest.mark.parametrize("name", ALL)
def test_names_and_modes_are_the_modules(name: str):
    run_ranks(2, names_and_modes, name)


def loaded(ranks: Ranks, name: str) -> bool:
    saved = built(Case(), seed=5).state_dict()
    run = ALL[name](built(Case(), seed=ranks.rank), ranks, SGD)
    sync: Any = run.sync
    sync.load_state_dict(saved)
    state = sync.state_dict()
    with pytest.raises((ValueError, RuntimeError), match=r"head\.weight"):
        sync.load_state_dict({key: value for key, value in saved.items() if key != "head.weight"})
    return all(torch.equal(state[key], value) for key, value in saved.items())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_wrapper_loads_the_modules_state(name: str):
    assert run_ranks(2, loaded, name) == [True, True]


@pytest.mark.parametrize("wrap", [BucketedDDP, FSDP])
def test_a_wrapper_works_as_a_part_of_another_module(wrap: Callable[..., nn.Module]):
    """Names are those of the wrapped part; loading and switching modes reach it."""
    torch.manual_seed(0)
    unwrapped = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    saved = copy.deepcopy(unwrapped.state_dict())
    outer = nn.ModuleDict({"body": wrap(nn.Linear(3, 3), alone()), "head": nn.Linear(3, 2)})
    assert [key for key, _ in outer.named_parameters()] == [key for key, _ in unwrapped.named_parameters()]
    outer.load_state_dict(saved)
    state = outer.state_dict()
    assert list(state) == list(saved)
    assert all(torch.equal(state[key], value) for key, value in saved.items())
    outer.eval()
    assert not outer["body"].module.training  # type: ignore[union-attr]
    with pytest.raises((RuntimeError, ValueError), match="bias"):
        outer.load_state_dict({key: value for key, value in saved.items() if key != "body.bias"})


def test_calling_the_module_itself_does_not_call_the_wrapper():
    model = built(Case())
    sync = BucketedDDP(model, alone())
    sync.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    model(torch.tensor([1]), side=True)
    assert type(model) is Model
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_the_repr_contains_the_modules():
    model = built(Case())
    assert repr(model).splitlines()[1].strip() in repr(BucketedDDP(model, alone()))


def test_ranks_that_are_no_ranks_are_refused():
    with pytest.raises(ValueError, match="ranks: must be what start_ranks"):
        BucketedDDP(built(Case()), 0)


@pytest.mark.parametrize("cap", [0, -1, math.nan])
def test_a_bad_size_is_refused_by_the_given_name(cap: float):
    with pytest.raises(ValueError, match="bucket_cap_mb: must be positive"):
        BucketedDDP(built(Case()), alone(), bucket_cap_mb=cap)


def test_a_wrapper_inside_the_module_that_it_wraps_is_refused():
    model = built(Case())
    model.sync = BucketedDDP(model, alone())
    for walk in (model.train, model.state_dict, model.double, lambda: model.apply(print)):
        with pytest.raises(
            ValueError, match="BucketedDDP: is an attribute of the module that it wraps; keep it beside"
        ):
            walk()


@pytest.mark.parametrize("duplicate", [copy.copy, pickle.dumps])
def test_a_wrapper_is_neither_copied_nor_pickled(duplicate: Callable[[object], object]):
    with pytest.raises(ValueError, match="BucketedDDP: can be neither copied nor pickled"):
        duplicate(BucketedDDP(built(Case()), alone()))
