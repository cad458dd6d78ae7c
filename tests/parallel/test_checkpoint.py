"""Sharded checkpoints: written by some ranks, read by others, and refused with a sentence where they cannot be."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from trainstep.parallel.checkpoint import load_checkpoint, save_checkpoint
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import Ranks, alone


def started(ranks: Ranks, seed: int = 0) -> tuple[nn.Module, FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))
    sync = FSDP(model, ranks)
    return model, sync, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, sync: FSDP, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(
        12, 6, generator=torch.Generator().manual_seed(number)
    )  # every rank the same: their number changes nothing
    model(x).square().mean().backward()
    sync.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


def save(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """Saves after two steps; returns where two more lead."""
    model, sync, optimizer = started(ranks)
    for number in range(2):
        step(model, sync, optimizer, number)
    save_checkpoint(folder, sync, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-2
    for number in range(2, 4):
        step(model, sync, optimizer, number)
    return sync.full_state_dict()


def load(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    model, sync, optimizer = started(ranks, seed=9)
    optimizer.param_groups[0]["lr"] = 5.0
    load_checkpoint(folder, sync, optimizer)
    for number in range(2, 4):
        step(model, sync, optimizer, number)
    return sync.full_state_dict()


@pytest.mark.parametrize(("here", "there"), [(2, 2), (2, 3), (3, 2), (4, 1), (1, 2)])
def test_goes_on_at_another_number_of_ranks(tmp_path: Path, here: int, there: int):
    folder = tmp_path / "checkpoint"
    expected = run_ranks(here, save, folder)[0]
    for found in run_ranks(there, load, folder):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name


def test_the_module_may_be_loaded_alone(tmp_path: Path):
    model, sync, _ = started(alone())
    save_checkpoint(tmp_path / "c", sync)
    other, other_sync, optimizer = started(alone(), seed=3)
    load_checkpoint(tmp_path / "c", other_sync)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="holds no optimizer; load the module alone"):
        load_checkpoint(tmp_path / "c", other_sync, optimizer)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path):
    _, sync, _ = started(alone())
    save_checkpoint(tmp_path, sync)
    with pytest.raises(FileExistsError, match="holds a checkpoint; name another folder"):
        save_checkpoint(tmp_path, sync)


def test_a_checkpoint_of_another_module_is_refused_by_name(tmp_path: Path):
    _, sync, _ = started(alone())
    save_checkpoint(tmp_path, sync)
    longer = FSDP(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 4)), alone())
    with pytest.raises(ValueError, match=r"module\.3\.weight has 33 elements, and the module's 44"):
        load_checkpoint(tmp_path, longer)
    more = FSDP(nn.ModuleDict({"other": nn.Linear(2, 2)}), alone())
    with pytest.raises(ValueError, match=r"has no module\.other\.weight"):
        load_checkpoint(tmp_path, more)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path):
    _, sync, _ = started(alone())
    with pytest.raises(ValueError, match=r"is no checkpoint: it has no \.metadata"):
        load_checkpoint(tmp_path, sync)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", ["hostile", "torn", "other"])
def test_metadata_of_a_stranger_runs_nothing(tmp_path: Path, content: str):
    _, sync, _ = started(alone())
    save_checkpoint(tmp_path / "c", sync)
    metadata = tmp_path / "c" / ".metadata"
    stranger = {
        "hostile": pickle.dumps(Hostile(tmp_path / "ran")),
        "torn": metadata.read_bytes()[:-20],
        "other": pickle.dumps({"a": 1}),
    }
    metadata.write_bytes(stranger[content])
    with pytest.raises(ValueError, match="is no metadata of a checkpoint"):
        load_checkpoint(tmp_path / "c", sync)
    assert not (tmp_path / "ran").exists()
