"""bf16 weights with fp32 masters train on several ranks as in one process, whole or sharded, and load anywhere."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_strategies import SMALL_MIB, STRATEGIES, Run, Start, layers, replicated, sharded_flat
from parallel_training import MASTERS, STEPS, Case, built, distance, started, take_steps, train_alone
from quick import slow_unless
from ranks import run_ranks
from trainstep.parallel.ddp import BucketedDDP
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.sharded_optimizer import ShardedOptimizer, merge_state_dicts
from trainstep.training.optimizer import MASTER, MasterWeights

BF16 = torch.bfloat16
WHOLE: dict[str, Start] = {name: start for name, start in STRATEGIES.items() if not name.startswith("fsdp")}
"""The strategies that keep whole parameters: a shard of fsdp is a master itself."""
IN_FP32: dict[str, Start] = {
    "bucketed fp32": replicated(
        lambda model, ranks: BucketedDDP(
            model, ranks, bucket_mib=SMALL_MIB, reduce_dtype=torch.float32, keeps_gradient_dtype=False
        )
    ),
    "sharded_flat fp32": sharded_flat(layers, reduce_dtype=torch.float32),
}
"""Strategies that average bf16 gradients in fp32."""
SHARDED = ("sharded", "sharded_each", "sharded_flat", "sharded_flat_units")
CASES = {
    "plain": Case(),
    "tied, frozen": Case(tied=True, frozen=True),
    "unused somewhere": Case(unused="somewhere"),
    "unused everywhere": Case(unused="everywhere"),
    "accumulation": Case(accumulation=3),
}


def whole_masters(run: Run) -> list[Tensor]:
    """The masters of all parameters, in the optimizer's order; every rank must call it."""
    optimizer = run.optimizer
    if isinstance(optimizer, ShardedOptimizer):
        state = optimizer.gathered_state_dict(on_all_ranks=True)["state"]
    elif isinstance(optimizer, FlatShardedOptimizer):
        state = optimizer.gathered_state_dict()["state"]
    else:
        state = optimizer.state_dict()["state"]
    return [values[MASTER].clone() for _, values in sorted(state.items())]


def trained(
    ranks: Ranks, strategy: str, case: Case, optimizer: str = "masters"
) -> tuple[list[Tensor], list[Tensor], set[torch.dtype]]:
    """Parameters, masters, and the dtypes of the state that this rank keeps."""
    run = started(ranks, {**WHOLE, **IN_FP32}[strategy], case, optimizer, BF16)
    take_steps(ranks, run, case, range(STEPS))
    kept = {value.dtype for state in run.optimizer.state.values() for value in state.values()}
    return run.parameters(), whole_masters(run), kept


def masters_alone(case: Case, world_size: int) -> list[Tensor]:
    """One process with masters, whose state is lost with its optimizer: the parameters are compared instead."""
    return train_alone(case, "masters", world_size, BF16)


@pytest.mark.parametrize(
    ("strategy", "case"),
    slow_unless(
        lambda strategy, case: case in ("plain", "unused somewhere") or strategy in SHARDED,
        itertools.product(WHOLE, CASES),
    ),
)
def test_two_ranks_train_as_one_process_to_the_bit(strategy: str, case: str):
    expected = masters_alone(CASES[case], 2)
    for parameters, masters, kept in run_ranks(2, trained, strategy, CASES[case]):
        assert distance(parameters, expected) == 0
        assert kept == {torch.float32}
        stepped = [p for p in parameters if any(m.shape == p.shape and torch.equal(m.to(BF16), p) for m in masters)]
        assert len(stepped) >= len(masters)
        assert any(not torch.equal(master.to(BF16).float(), master) for master in masters)


@pytest.mark.parametrize("optimizer", MASTERS)
@pytest.mark.parametrize("strategy", ["naive", *SHARDED])
def test_every_rank_has_the_same_masters_as_in_another_strategy(strategy: str, optimizer: str):
    """Masters of two ranks are those of the simplest strategy to the bit, with torch's AdamW as with ours."""
    (_, expected, _), _ = run_ranks(2, trained, "naive", CASES["plain"], optimizer)
    for _, masters, _ in run_ranks(2, trained, strategy, CASES["plain"], optimizer):
        assert all(torch.equal(*pair) for pair in zip(masters, expected, strict=True))


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", [*slow_unless(SHARDED.__contains__, WHOLE), *IN_FP32])
def test_more_ranks_are_as_good_as_one_process(strategy: str, world_size: int):
    """The 2x rule: their distance from fp64 is at most twice that of one process with bf16 weights and masters."""
    case = Case(accumulation=2)
    exact = train_alone(case, "masters", world_size, torch.float64)
    single = masters_alone(case, world_size)
    largest = max(float(parameter.abs().max()) for parameter in exact)
    every_rank = run_ranks(world_size, trained, strategy, case)
    parameters, masters, _ = every_rank[0]
    assert distance(parameters, exact) <= 2 * distance(single, exact) + torch.finfo(BF16).eps * largest
    for other, other_masters, _ in every_rank[1:]:
        assert distance(other, parameters) == 0
        assert distance(other_masters, masters) == 0


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_rank_keeps_only_masters_of_what_it_updates(strategy: str):
    """Two ranks' masters together are one for each element, and neither has more than two thirds."""
    numels = run_ranks(2, kept_masters, strategy)
    whole = sum(parameter.numel() for parameter in built(Case()).parameters())
    assert sum(numels) == whole
    assert max(numels) < 2 / 3 * whole


def kept_masters(ranks: Ranks, strategy: str) -> int:
    run = started(ranks, WHOLE[strategy], Case(), "masters", BF16)
    return sum(state[MASTER].numel() for state in run.optimizer.state.values())


# Saving and loading.


def resumed(ranks: Ranks, strategy: str, source: str, order: str) -> bool:
    """Whether training goes on to the bit from a state loaded into another module and optimizer."""
    case = Case()
    run, loaded, to_end = (started(ranks, WHOLE[strategy], case, "masters", BF16) for _ in range(3))
    take_steps(ranks, to_end, case, range(STEPS))
    take_steps(ranks, run, case, range(3))
    weights = [parameter.clone() for parameter in run.parameters()]
    state = run.optimizer.state_dict() if source == "part" else whole_state(run)
    take_steps(ranks, loaded, case, range(1))  # it has weights of its own by now

    def load_module() -> None:
        if hasattr(loaded.sync, "wait_for_parameters"):
            loaded.sync.wait_for_parameters()
        with torch.no_grad():
            for parameter, value in zip(loaded.sync.module.parameters(), weights, strict=True):
                parameter.copy_(value)

    loads = {
        "optimizer alone": [lambda: loaded.optimizer.load_state_dict(state)],
        "module first": [load_module, lambda: loaded.optimizer.load_state_dict(state)],
        "module last": [lambda: loaded.optimizer.load_state_dict(state), load_module],
    }[order]
    for load in loads:
        load()
    if distance(loaded.parameters(), weights):
        return False
    take_steps(ranks, loaded, case, range(3, STEPS))
    pairs = zip(whole_masters(loaded), whole_masters(to_end), strict=True)
    return distance(loaded.parameters(), to_end.parameters()) == 0 and all(torch.equal(*pair) for pair in pairs)


def whole_state(run: Run) -> dict[str, Any]:
    optimizer = run.optimizer
    if isinstance(optimizer, ShardedOptimizer):
        whole = optimizer.gathered_state_dict(on_all_ranks=True)
        assert whole is not None
        return whole
    return optimizer.gathered_state_dict() if isinstance(optimizer, FlatShardedOptimizer) else optimizer.state_dict()


@pytest.mark.parametrize("order", ["optimizer alone", "module first", "module last"])
@pytest.mark.parametrize("source", ["part", "whole"])
@pytest.mark.parametrize("strategy", slow_unless(("bucketed", "sharded", "sharded_flat_units").__contains__, WHOLE))
def test_training_goes_on_from_a_saved_state(strategy: str, source: str, order: str):
    assert run_ranks(2, resumed, strategy, source, order) == [True, True]


def saved(ranks: Ranks, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    run = started(ranks, WHOLE[strategy], Case(), "masters", BF16)
    take_steps(ranks, run, Case(), range(2))
    return run.optimizer.state_dict(), whole_state(run)


def masters_loaded(ranks: Ranks, strategy: str, state: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    run = started(ranks, WHOLE[strategy], Case(), "masters", BF16)
    run.optimizer.load_state_dict(state)
    return whole_masters(run), run.parameters()


@pytest.mark.parametrize("strategy", ["sharded", "sharded_flat_units"])
def test_a_whole_state_loads_into_one_process_and_into_other_numbers_of_ranks(strategy: str):
    (part, whole), (other_part, _) = run_ranks(2, saved, strategy)
    if strategy == "sharded":
        merged = merge_state_dicts([part, other_part])
        assert all(torch.equal(merged["state"][key][MASTER], whole["state"][key][MASTER]) for key in whole["state"])
    model = built(Case()).to(BF16)
    alone = MasterWeights(model.parameters(), lr=0.1)
    alone.load_state_dict(whole)
    expected = [alone.state[parameter][MASTER] for parameter in model.parameters()]
    assert alone.param_groups[0]["lr"] == 1e-2
    for masters, parameters in run_ranks(3, masters_loaded, strategy, whole):
        assert all(torch.equal(*pair) for pair in zip(masters, expected, strict=True))
        assert distance(parameters, [parameter.detach() for parameter in model.parameters()]) == 0


def changed_between(ranks: Ranks, strategy: str) -> list[float]:
    """The largest distance of masters from 3 after all parameters were set to 3 and a step was taken."""
    run = started(ranks, WHOLE[strategy], Case(), "masters", BF16)
    take_steps(ranks, run, Case(), range(1))
    run.parameters()
    with torch.no_grad():
        for parameter in run.sync.module.parameters():
            parameter.fill_(3.0)
    take_steps(ranks, run, Case(), range(1, 2))
    return [float((master - 3).abs().max()) for master in whole_masters(run)]


@pytest.mark.parametrize("strategy", ["bucketed", *SHARDED])
def test_values_written_to_parameters_become_the_masters(strategy: str):
    for distances in run_ranks(2, changed_between, strategy):
        assert max(distances) < 3 * 1e-2 + 3 * 1e-2 * 1e-2  # two steps of the learning rate, and its weight decay


class NotesComparisons(TorchDispatchMode):
    """Notes whether masters were compared with their parameters, as they are where parameters were changed."""

    compared = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.compared |= "aten.where" in str(function)
        return function(*arguments, **(options or {}))


def compares(ranks: Ranks, strategy: str, changes: bool) -> bool:
    run = started(ranks, WHOLE[strategy], Case(), "masters", BF16)
    take_steps(ranks, run, Case(), range(2))
    if changes:
        run.parameters()
        with torch.no_grad():
            next(iter(run.sync.module.parameters())).mul_(2)
    with NotesComparisons() as notes:
        take_steps(ranks, run, Case(), range(2, 4))
    return notes.compared


@pytest.mark.parametrize("strategy", WHOLE)
def test_masters_are_compared_only_after_a_change(strategy: str):
    """What strategies write to parameters is no change, or every step would pass over all masters once more."""
    assert not any(run_ranks(2, compares, strategy, False))
    assert any(run_ranks(2, compares, strategy, True))


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", [*WHOLE, *IN_FP32])
def test_training_on_gpus_is_as_good_as_in_one_process(strategy: str):
    exact = train_alone(Case(), "masters", 2, torch.float64)
    single = masters_alone(Case(), 2)
    largest = max(float(parameter.abs().max()) for parameter in exact)
    (parameters, masters, _), (of_rank_1, masters_of_rank_1, _) = run_ranks(
        2, trained, strategy, Case(), backend="nccl"
    )
    on_cpu = [parameter.cpu() for parameter in parameters]
    assert distance(on_cpu, exact) <= 2 * distance(single, exact) + torch.finfo(BF16).eps * largest
    assert distance([parameter.cpu() for parameter in of_rank_1], on_cpu) == 0
    assert distance([master.cpu() for master in masters_of_rank_1], [master.cpu() for master in masters]) == 0
