"""FSDP with ignored parameters, which stay whole: parity with one process, messages, norms, memory, checkpoints and units."""

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
from trainstep.parallel.checkpoint.save_load import load_checkpoint, save_checkpoint
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
    """Wrap a model in FSDP that ignores a module (side), a parameter of another module (first's bias), and the embedding."""
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
    """Train; all parameters, this rank's ignored ones, the distance from one process, and whether the 2x rule holds."""
    model, sync, optimizer = wrapped(ranks, case, seed=ranks.rank)
    train(model, sync, optimizer, case)
    state = sync.full_state_dict()
    parameters = [state[name] for name, _ in model.named_parameters()]
    ignored = [parameter.detach() for parameter in (*model.side.parameters(), model.first.bias, model.embedding.weight)]
    exact, single = (train_alone(case, "adamw", ranks.world_size, dtype) for dtype in (torch.float64, torch.float32))
    largest = max(float(parameter.abs().max()) for parameter in exact)
    allowed = 2 * distance(single, exact) + torch.finfo(torch.float32).eps * largest
    return parameters, ignored, distance(parameters, single), distance(parameters, exact) <= allowed


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process_and_equal_on_all_ranks(case: str):
    """Equal to the bit where sums have the same order, else as close to fp64 as one process in fp32."""
    (parameters, ignored, far, is_close), (others_parameters, others_ignored, *_) = run_ranks(2, trained, CASES[case])
    assert distance(parameters, others_parameters) == distance(ignored, others_ignored) == 0
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


def test_messages_and_bytes_are_those_written_out():
    """Ignored parameters are neither gathered nor scattered; their gradients go in one message, with a flag for each."""
    root, first, second = CLASSES * WIDTH, 3 * WIDTH * WIDTH, 3 * WIDTH * WIDTH  # head; weights of the units
    ignored = [WIDTH * WIDTH, WIDTH, 3 * WIDTH, CLASSES * WIDTH]  # side, its bias, first's bias, embedding
    in_units = sum(-(-aligned(numel) // 16) * 16 for numel in (root, first, second))  # in two parts of multiples of 8
    for sent in run_ranks(2, messages_of_a_step):
        assert sent["reduce_scatter"] == (3, 4 * in_units)
        bucket = 4 * (sum(map(aligned, ignored)) + len(ignored))
        usage, norm = 7, 4
        assert sent["all_reduce"] == (3, bucket + usage + norm)
        gathers, gathered_bytes = sent["all_gather"]
        # forward gathers all three units; in backward root and the last are still there, and the other is gathered again
        assert (gathers, gathered_bytes) == (4, 4 * (in_units + first))


def norms(ranks: Ranks, norm_type: float) -> tuple[float, list[float]]:
    """Clip; the norm before, and the norms of the ignored gradients after it, on this rank."""
    case = Case()
    model, sync, _ = wrapped(ranks, case)
    loss_of(model, next(batches(case, 1))[0][0], case, ranks.rank).backward()
    sync.finish_gradient_synchronization()
    before = float(sync.clip_grad_norm_(0.01, norm_type))
    return before, [float(p.grad.norm(norm_type)) for p in model.side.parameters()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_counts_ignored_gradients_once(norm_type: float):
    model = built(Case())
    loss_of(model, next(batches(Case(), 1))[0][0], Case(), 0).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
    for before, ignored in run_ranks(3, norms, norm_type):
        assert before == pytest.approx(expected, rel=1e-5)
        assert ignored == pytest.approx([float(p.grad.norm(norm_type)) for p in model.side.parameters()], rel=1e-5)


def held_and_reported_bytes(ranks: Ranks) -> list[tuple[int, int]]:
    case = Case()
    micro_batches = next(batches(case, ranks.world_size))[ranks.rank]
    model = built(case)
    holdings = Holdings(model)
    sync = FSDP(model, ranks, units=[model.first], ignored=[model.side])
    sizes = []
    for work in (lambda: loss_of(model, micro_batches[0], case, 0).backward(), sync.finish_gradient_synchronization):
        work()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        reported = list(sync.held_tensors())
        sizes.append(
            (holdings.settled_bytes(), sum(storage_bytes([*model.parameters(), *gradients, *reported]).values()))
        )
    return sizes


def test_fsdp_reports_the_memory_of_ignored_parameters():
    for sizes in run_ranks(2, held_and_reported_bytes):
        assert all(held == reported for held, reported in sizes)


def save(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """Save after two steps; the state."""
    model, sync, optimizer = wrapped(ranks, Case())
    train(model, sync, optimizer, Case(), range(2))
    save_checkpoint(folder, sync, optimizer)
    return sync.full_state_dict()


def load(ranks: Ranks, folder: Path, ignores: bool) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Load, ignoring parameters or not; the parameters, and the optimizer's state of the ignored ones."""
    case = Case()
    model = built(case, seed=9)
    ignored = [model.side, model.first.bias, model.embedding] if ignores else []
    sync = FSDP(model, ranks, units=[model.first, model.second], ignored=ignored)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    load_checkpoint(folder, sync, optimizer)
    states = [optimizer.state[p] for p in (model.side.weight, model.embedding.weight)] if ignores else []
    return sync.full_state_dict(), states


@pytest.mark.parametrize(("saving", "loading", "ignores"), [(2, 3, True), (3, 2, True), (2, 2, False)])
def test_checkpoints_have_ignored_parameters_whole(tmp_path: Path, saving: int, loading: int, ignores: bool):
    """Ranks that shard these parameters can load them too."""
    expected = run_ranks(saving, save, tmp_path / "c")[0]
    results = run_ranks(loading, load, tmp_path / "c", ignores)
    for parameters, states in results:
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())
        for state, first in zip(states, results[0][1], strict=True):
            assert float(state["step"]) == 2
            assert float(state["exp_avg"].abs().sum()) > 0
            assert all(torch.equal(state[key], first[key]) for key in state)


def saved_and_loaded_transposed(ranks: Ranks, folder: Path) -> bool:
    """Save and load an ignored parameter that is transposed in memory; whether it is as before."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model[0].weight = nn.Parameter(torch.arange(24.0).view(4, 6).t())
    sync = FSDP(model, ranks, ignored=[model[0]])
    expected = model[0].weight.detach().clone()
    save_checkpoint(folder, sync)
    with torch.no_grad():
        model[0].weight.zero_()
    load_checkpoint(folder, sync)
    return torch.equal(model[0].weight, expected)


def test_checkpoints_load_ignored_parameters_that_are_not_contiguous(tmp_path: Path):
    assert run_ranks(2, saved_and_loaded_transposed, tmp_path / "c") == [True, True]


def test_full_state_dicts_load_and_are_copies_on_a_device():
    saved = built(Case(), seed=3).state_dict()
    model, sync, _ = wrapped(alone(), Case())
    sync.load_full_state_dict(saved)
    state = sync.full_state_dict(device="cpu")
    assert all(torch.equal(state[name], value) for name, value in saved.items())
    assert state["side.weight"].data_ptr() != model.side.weight.data_ptr()
    assert {value.device.type for value in sync.full_state_dict(device="meta").values()} == {"meta"}
    with pytest.raises(ValueError, match=r"state: side\.weight has shape \(1,\), but in the module \(8, 8\)"):
        sync.load_full_state_dict({**saved, "side.weight": torch.zeros(1)})


def test_ignoring_what_is_not_part_of_the_module_is_refused():
    for stranger, name in ((nn.Linear(1, 1), "Linear"), (nn.Parameter(torch.ones(1)), "Parameter")):
        with pytest.raises(ValueError, match=f"ignored: a {name} is not part of the module"):
            FSDP(built(Case()), alone(), ignored=[stranger])


class Block(nn.Module):
    """A block that may contain another block."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = inner or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class Named(nn.Module):
    """A module with blocks that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Block(Block()), Block(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)))


def test_units_by_class_are_the_outermost_modules_of_it():
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
