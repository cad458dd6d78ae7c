"""FSDP with parameters left whole, and units by class: as one process, on every rank alike, through clipping and checkpoints."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from held_bytes import Holdings, storage_bytes
from parallel_training import CLASSES, OPTIMIZERS, WIDTH, Case, batches, built, distance, loss_of, train_alone
from ranks import run_ranks
from trainstep.parallel.checkpoint import load_checkpoint, save_checkpoint
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import Ranks, alone

CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
    "unused everywhere": Case(unused="everywhere"),
    "unused somewhere": Case(unused="somewhere"),
    "accumulation": Case(accumulation=3),
    "clipped": Case(clip=0.05),
}


def wrapped(ranks: Ranks, case: Case, seed: int = 0, **options: Any) -> tuple[Any, FSDP, torch.optim.Optimizer]:
    """A module and a parameter of another module are whole: side and second unused or used, first's bias frozen or not."""
    model = built(case, seed)
    ignored = [model.side, model.first.bias, model.embedding]
    sync = FSDP(model, ranks, units=[model.first, model.second], ignored=ignored, **options)
    return model, sync, OPTIMIZERS["adamw"](sync.parameters())


def train(model: nn.Module, sync: FSDP, optimizer: torch.optim.Optimizer, case: Case, steps: range = range(5)) -> None:
    ranks = sync.ranks
    for number, ranks_batches in enumerate(batches(case, ranks.world_size)):
        if number not in steps:
            continue
        *earlier, last = ranks_batches[ranks.rank]
        with sync.no_sync():
            for batch in earlier:
                loss_of(model, batch, case, ranks.rank).backward()
        loss_of(model, last, case, ranks.rank).backward()
        sync.finish_gradient_synchronization()
        if case.clip is not None:
            sync.clip_grad_norm_(case.clip)
        optimizer.step()
        optimizer.zero_grad()


def trained(ranks: Ranks, case: Case) -> tuple[list[Tensor], list[Tensor], float, bool]:
    """All parameters whole; those that are whole here all along; the distance from one process, and whether the 2x rule holds."""
    model, sync, optimizer = wrapped(ranks, case, seed=ranks.rank)
    train(model, sync, optimizer, case)
    state = sync.full_state_dict()
    found = [state[name] for name, _ in model.named_parameters()]
    own = [parameter.detach() for parameter in (*model.side.parameters(), model.first.bias, model.embedding.weight)]
    exact, one = (train_alone(case, "adamw", ranks.world_size, dtype) for dtype in (torch.float64, torch.float32))
    largest = max(float(parameter.abs().max()) for parameter in exact)
    allowed = 2 * distance(one, exact) + torch.finfo(torch.float32).eps * largest
    return found, own, distance(found, one), distance(found, exact) <= allowed


@pytest.mark.parametrize("case", CASES)
def test_as_one_process_and_equal_on_all_ranks(case: str):
    """To the bit where nothing is added up in another order, else within what one process in fp32 is from fp64."""
    (found, own, far, is_close), (other, others_own, *_) = run_ranks(2, trained, CASES[case])
    assert distance(found, other) == distance(own, others_own) == 0
    if CASES[case].accumulation == 1 and CASES[case].clip is None:
        assert far == 0
    assert is_close


def aligned(numel: int) -> int:
    """Elements that a tensor takes in a flat buffer, where each begins at a multiple of 8."""
    return -(-numel // 8) * 8


def messages_of_a_step(ranks: Ranks) -> dict[str, tuple[int, int]]:
    case = Case()
    model, sync, _ = wrapped(ranks, case)
    sync.traffic.clear()
    loss_of(model, next(batches(case, ranks.world_size))[ranks.rank][0], case, ranks.rank).backward()
    sync.finish_gradient_synchronization()
    sync.clip_grad_norm_(1.0)
    return {name: (sync.traffic.messages[name], sync.traffic.payload_bytes[name]) for name in sync.traffic.messages}


def test_messages_and_bytes():
    """Written out: what is ignored is neither gathered nor scattered, and goes in one message with a flag for each."""
    root, first, second = CLASSES * WIDTH, 3 * WIDTH * WIDTH, 3 * WIDTH * WIDTH  # head; weights of the units
    ignored = [WIDTH * WIDTH, WIDTH, 3 * WIDTH, CLASSES * WIDTH]  # side, its bias, first's bias, embedding
    in_units = sum(-(-aligned(numel) // 16) * 16 for numel in (root, first, second))  # in two parts of multiples of 8
    for found in run_ranks(2, messages_of_a_step):
        assert found["reduce_scatter"] == (3, 4 * in_units)
        bucket = 4 * (sum(map(aligned, ignored)) + len(ignored))
        usage, norm = 7, 4
        assert found["all_reduce"] == (3, bucket + usage + norm)
        gathers, gathered_bytes = found["all_gather"]
        # forward all three; in backward the root and the last are still there, and the other comes again
        assert (gathers, gathered_bytes) == (4, 4 * (in_units + first))


def norms(ranks: Ranks, norm_type: float) -> tuple[float, list[float]]:
    """Before clipping; of whole gradients behind it, on this rank."""
    case = Case()
    model, sync, _ = wrapped(ranks, case)
    loss_of(model, next(batches(case, 1))[0][0], case, ranks.rank).backward()
    sync.finish_gradient_synchronization()
    before = float(sync.clip_grad_norm_(0.01, norm_type))
    return before, [float(p.grad.norm(norm_type)) for p in model.side.parameters()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_counts_them_once(norm_type: float):
    model = built(Case())
    loss_of(model, next(batches(Case(), 1))[0][0], Case(), 0).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
    for before, whole in run_ranks(3, norms, norm_type):
        assert before == pytest.approx(expected, rel=1e-5)
        assert whole == pytest.approx([float(p.grad.norm(norm_type)) for p in model.side.parameters()], rel=1e-5)


def held(ranks: Ranks) -> list[tuple[int, int]]:
    case = Case()
    micro_batches = next(batches(case, ranks.world_size))[ranks.rank]
    model = built(case)
    holdings = Holdings(model)
    sync = FSDP(model, ranks, units=[model.first], ignored=[model.side])
    found = []
    for work in (lambda: loss_of(model, micro_batches[0], case, 0).backward(), sync.finish_gradient_synchronization):
        work()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        told = list(sync.held_tensors())
        found.append((holdings.settled_bytes(), sum(storage_bytes([*model.parameters(), *gradients, *told]).values())))
    return found


def test_it_tells_what_it_holds_of_them():
    for found in run_ranks(2, held):
        assert all(there == told for there, told in found)


def save(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """Saves after two steps; returns where the others lead."""
    model, sync, optimizer = wrapped(ranks, Case())
    train(model, sync, optimizer, Case(), range(2))
    save_checkpoint(folder, sync, optimizer)
    return sync.full_state_dict()


def load(ranks: Ranks, folder: Path, ignores: bool) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters as they were loaded, and the optimizer's state of those that are whole, by ranks that ignore them or not."""
    case = Case()
    model = built(case, seed=9)
    ignored = [model.side, model.first.bias, model.embedding] if ignores else []
    sync = FSDP(model, ranks, units=[model.first, model.second], ignored=ignored)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    load_checkpoint(folder, sync, optimizer)
    states = [optimizer.state[p] for p in (model.side.weight, model.embedding.weight)] if ignores else []
    return sync.full_state_dict(), states


@pytest.mark.parametrize(("here", "there", "ignores"), [(2, 3, True), (3, 2, True), (2, 2, False)])
def test_checkpoints_hold_them_whole(tmp_path: Path, here: int, there: int, ignores: bool):
    """Also for ranks that shard what the ranks which saved did not."""
    expected = run_ranks(here, save, tmp_path / "c")[0]
    results = run_ranks(there, load, tmp_path / "c", ignores)
    for found, states in results:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        for state, first in zip(states, results[0][1], strict=True):
            assert float(state["step"]) == 2
            assert float(state["exp_avg"].abs().sum()) > 0
            assert all(torch.equal(state[key], first[key]) for key in state)


def turned_round(ranks: Ranks, folder: Path) -> bool:
    """A whole parameter that lies transposed in memory, saved and loaded."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model[0].weight = nn.Parameter(torch.arange(24.0).view(4, 6).t())
    sync = FSDP(model, ranks, ignored=[model[0]])
    expected = model[0].weight.detach().clone()
    save_checkpoint(folder, sync)
    with torch.no_grad():
        model[0].weight.zero_()
    load_checkpoint(folder, sync)
    return torch.equal(model[0].weight, expected)


def test_checkpoints_of_whole_parameters_that_are_not_contiguous(tmp_path: Path):
    assert run_ranks(2, turned_round, tmp_path / "c") == [True, True]


def test_full_state_dicts_load_and_are_copies_on_a_device():
    saved = built(Case(), seed=3).state_dict()
    model, sync, _ = wrapped(alone(), Case())
    sync.load_full_state_dict(saved)
    state = sync.full_state_dict(device="cpu")
    assert all(torch.equal(state[name], value) for name, value in saved.items())
    assert state["side.weight"].data_ptr() != model.side.weight.data_ptr()
    assert {value.device.type for value in sync.full_state_dict(device="meta").values()} == {"meta"}
    with pytest.raises(ValueError, match=r"state: side\.weight is \(1,\), and the module's \(8, 8\)"):
        sync.load_full_state_dict({**saved, "side.weight": torch.zeros(1)})


def test_what_is_not_part_of_the_module_cannot_be_ignored():
    for other, name in ((nn.Linear(1, 1), "Linear"), (nn.Parameter(torch.ones(1)), "Parameter")):
        with pytest.raises(ValueError, match=f"ignored: a {name} is not part of the module"):
            FSDP(built(Case()), alone(), ignored=[other])


class Block(nn.Module):
    """May hold another of its class."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = inner or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class Named(nn.Module):
    """Blocks that stand in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Block(Block()), Block(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)))


def test_units_by_class():
    """The outermost of the class."""
    assert [unit.name for unit in FSDP(Named(), alone(), units=Block).units] == ["root", "one", "two"]
    assert [unit.name for unit in FSDP(Named(), alone(), units=[Block, nn.Linear]).units] == ["one", "two", "head"]
    with pytest.raises(ValueError, match="units: no Conv1d is part of the module"):
        FSDP(Named(), alone(), units=nn.Conv1d)


def test_a_module_that_became_a_single_unit_is_warned_of():
    with pytest.warns(UserWarning, match=r"FSDP: the whole Named is one unit, .* units=\[\.\.\.\], or their class"):
        FSDP(Named(), alone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(Named(), alone(), units=Block)
        FSDP(nn.Sequential(Block(), Block()), alone())
        FSDP(nn.Linear(2, 2), alone())
