"""Sharded checkpoints are written by some ranks and read by others; a damaged or foreign one is refused by name."""

import os
import pickle
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoint_damage import damaged_copy, damages
from ranks import run_ranks
from trainstep.parallel.checkpoint import files as checkpoint_files
from trainstep.parallel.checkpoint import save_load as checkpoint
from trainstep.parallel.checkpoint.save_load import load_checkpoint, save_checkpoint
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import Ranks, alone


def started(
    ranks: Ranks, seed: int = 0, shard_ranks: int | None = None
) -> tuple[nn.Module, FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))
    sync = FSDP(model, ranks, shard_ranks=shard_ranks)
    return model, sync, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, sync: FSDP, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(
        12, 6, generator=torch.Generator().manual_seed(number)
    )  # the same on every rank, so the number of ranks changes nothing
    model(x).square().mean().backward()
    sync.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


def save(ranks: Ranks, folder: Path, shard_ranks: int | None = None) -> dict[str, Tensor]:
    """Save after two steps; the state after two more."""
    model, sync, optimizer = started(ranks, shard_ranks=shard_ranks)
    for number in range(2):
        step(model, sync, optimizer, number)
    save_checkpoint(folder, sync, optimizer)
    optimizer.param_groups[0]["lr"] = 1e-2
    for number in range(2, 4):
        step(model, sync, optimizer, number)
    return sync.full_state_dict()


def load(ranks: Ranks, folder: Path, shard_ranks: int | None = None) -> dict[str, Tensor]:
    model, sync, optimizer = started(ranks, seed=9, shard_ranks=shard_ranks)
    optimizer.param_groups[0]["lr"] = 5.0
    load_checkpoint(folder, sync, optimizer)
    for number in range(2, 4):
        step(model, sync, optimizer, number)
    return sync.full_state_dict()


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 3), (3, 2), (4, 1), (1, 2)])
def test_training_resumes_on_another_number_of_ranks(tmp_path: Path, saving: int, loading: int):
    folder = tmp_path / "checkpoint"
    expected = run_ranks(saving, save, folder)[0]
    for state in run_ranks(loading, load, folder):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-7), name


def saved_and_loaded_in_groups(ranks: Ranks, folder: Path) -> list[dict[str, Tensor]]:
    """The expected state; and the states after loading in groups of 2, of 1 and of 4 what groups of 2 and of 4 saved."""
    expected = save(ranks, folder / "groups of 2", shard_ranks=2)
    states = [load(ranks, folder / "groups of 2", shard_ranks=size) for size in (2, 1, 4)]
    save(ranks, folder / "one group")
    return [expected, *states, load(ranks, folder / "one group", shard_ranks=2)]


def test_a_checkpoint_loads_in_other_groups(tmp_path: Path):
    of_ranks = run_ranks(4, saved_and_loaded_in_groups, tmp_path)
    expected = of_ranks[0][0]
    written = {path.name[:4] for path in (tmp_path / "groups of 2").glob("*.distcp") if path.stat().st_size}
    assert written == {"__0_", "__1_"}  # by the first group alone
    of_three = run_ranks(3, load, tmp_path / "groups of 2")
    for state in [state for states in of_ranks for state in states] + of_three:
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shard_ranks"), [(6, 3), (6, 2), (2, 1)])
def test_other_nodes_of_other_ranks_continue(ranks: int, shard_ranks: int, tmp_path: Path):
    """Two nodes of two ranks have trained, with a group on each; two of three, three of two, and two of one go on."""
    expected = run_ranks(4, save, tmp_path / "c", 2)[0]
    for state in run_ranks(ranks, load, tmp_path / "c", shard_ranks):
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-7), name


def test_the_module_may_be_loaded_alone(tmp_path: Path):
    model, sync, _ = started(alone())
    save_checkpoint(tmp_path / "c", sync)
    other_model, other_sync, optimizer = started(alone(), seed=3)
    load_checkpoint(tmp_path / "c", other_sync)
    assert all(
        torch.equal(saved, loaded) for saved, loaded in zip(model.parameters(), other_model.parameters(), strict=True)
    )
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
    with pytest.raises(ValueError, match=r"module\.3\.weight has 33 elements, but in the module 44"):
        load_checkpoint(tmp_path, longer)
    more = FSDP(nn.ModuleDict({"other": nn.Linear(2, 2)}), alone())
    with pytest.raises(ValueError, match=r"has no module\.other\.weight"):
        load_checkpoint(tmp_path, more)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path):
    _, sync, _ = started(alone())
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no \.metadata"):
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
    write_manifest(tmp_path / "c")
    with pytest.raises(ValueError, match="is not the metadata of a checkpoint"):
        load_checkpoint(tmp_path / "c", sync)
    assert not (tmp_path / "ran").exists()


def write_manifest(folder: Path) -> None:
    """Make the manifest fit the files, as somebody who changes them on purpose would."""
    (folder / "manifest.sha256").unlink(missing_ok=True)
    parts = {path.name: checkpoint_files.checksum(path) for path in folder.glob("__*.distcp")}
    checkpoint_files.finish(folder, parts)


def rewrite_as_an_earlier_version(folder: Path) -> None:
    """Rewrite a checkpoint without a manifest, and with metadata that names none."""
    (folder / "manifest.sha256").unlink()
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", None))


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def save_once(ranks: Ranks, folder: Path) -> None:
    model, sync, optimizer = started(ranks)
    step(model, sync, optimizer, 0)
    save_checkpoint(folder, sync, optimizer)


def outcome_of_load(ranks: Ranks, folder: Path) -> str:
    """Load; `loaded`, or the sentence of the error, after which nothing may have changed."""
    _, sync, optimizer = started(ranks, seed=9)
    optimizer.param_groups[0]["lr"] = 5.0
    before = sync.full_state_dict()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_checkpoint(folder, sync, optimizer)
    except ValueError as error:
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 5.0
        after = sync.full_state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return str(error)
    return "loaded"


def test_damage_anywhere_is_refused_by_name_on_every_rank_and_changes_nothing(tmp_path: Path):
    run_ranks(2, save_once, tmp_path / "whole")
    assert run_ranks(2, outcome_of_load, tmp_path / "whole") == ["loaded", "loaded"]
    assert len(list((tmp_path / "whole").iterdir())) == 5
    for name, damage in damages(tmp_path / "whole", bits=25):
        folder = damaged_copy(tmp_path / "whole", tmp_path / "damaged", damage)
        for outcome in run_ranks(2, outcome_of_load, folder):
            assert outcome.startswith(str(folder)), name
            if "swapped" not in name:
                assert outcome.startswith(f"{folder}/{name.partition(':')[0]}: "), name


def load_once(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    _, sync, _ = started(ranks, seed=9)
    load_checkpoint(folder, sync)
    return sync.full_state_dict()


def test_damage_to_a_checkpoint_of_an_earlier_version_changes_no_tensor(tmp_path: Path):
    run_ranks(2, save_once, tmp_path / "whole")
    rewrite_as_an_earlier_version(tmp_path / "whole")
    expected = load_once(alone(), tmp_path / "whole")
    for name, damage in damages(tmp_path / "whole", bits=12):
        folder = damaged_copy(tmp_path / "whole", tmp_path / "damaged", damage)
        outcome, _ = outcomes = run_ranks(2, outcome_of_load, folder)
        if outcome != "loaded":
            assert outcome.startswith(str(folder)), name
            continue
        assert outcomes == ["loaded", "loaded"], name
        state = load_once(alone(), folder)  # the bit was between two tensors, or made other hyperparameters
        assert all(torch.equal(value, state[key]) for key, value in expected.items()), name


def test_a_checkpoint_of_an_earlier_version_is_read_with_a_warning(tmp_path: Path):
    model, sync, optimizer = started(alone())
    save_checkpoint(tmp_path, sync, optimizer)
    rewrite_as_an_earlier_version(tmp_path)
    other_model, other_sync, other_optimizer = started(alone(), seed=3)
    with pytest.warns(UserWarning, match="has no manifest, as earlier versions wrote it"):
        load_checkpoint(tmp_path, other_sync, other_optimizer)
    assert all(
        torch.equal(saved, loaded) for saved, loaded in zip(model.parameters(), other_model.parameters(), strict=True)
    )
    with pytest.raises(FileExistsError, match="holds a checkpoint"):
        save_checkpoint(tmp_path, sync)


def test_a_save_that_is_interrupted_anywhere_leaves_no_checkpoint_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, sync, optimizer = started(alone())
    save_checkpoint(tmp_path / "earlier", sync, optimizer)
    to_disk, written = os.fsync, 0

    def interrupted_when(number: int) -> None:
        nonlocal written
        written = 0

        def fsync(descriptor: int) -> None:
            nonlocal written
            written += 1
            if written == number:
                raise KeyboardInterrupt
            to_disk(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    interrupted_when(-1)
    save_checkpoint(tmp_path / "counted", sync, optimizer)
    moments = written
    assert moments >= 7  # the folder, hyperparameters, a part, the metadata, the manifest, and the folder twice
    for moment in range(1, moments + 1):
        folder = tmp_path / str(moment)
        interrupted_when(moment)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(folder, sync, optimizer)
        interrupted_when(-1)
        if moment < moments:  # the last one comes after the rename
            assert "its save was interrupted" in outcome_of_load(alone(), folder)
            save_checkpoint(folder, sync, optimizer)
        assert outcome_of_load(alone(), folder) == "loaded"
        assert outcome_of_load(alone(), tmp_path / "earlier") == "loaded"
        assert sorted(path.name for path in folder.iterdir()) == sorted(os.listdir(tmp_path / "earlier"))


def save_on_a_full_disk(ranks: Ranks, folder: Path) -> str:
    _, sync, optimizer = started(ranks)
    write_data = checkpoint._Writer.write_data

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if ranks.rank == 1:
        checkpoint._Writer.write_data = full  # type: ignore[method-assign,assignment]
    try:
        save_checkpoint(folder, sync, optimizer)
    except OSError as error:
        return str(error)
    finally:
        checkpoint._Writer.write_data = write_data  # type: ignore[method-assign]
    return "saved"


def test_every_rank_says_which_rank_could_not_write(tmp_path: Path):
    messages = run_ranks(2, save_on_a_full_disk, tmp_path / "c")
    assert (
        messages
        == [
            f"{tmp_path}/c: rank 1 could not write: [Errno 28] No space left on device; the folder holds no checkpoint now"
        ]
        * 2
    )
    assert all("its save was interrupted" in outcome for outcome in run_ranks(2, outcome_of_load, tmp_path / "c"))
    run_ranks(2, save_once, tmp_path / "c")
    assert run_ranks(2, outcome_of_load, tmp_path / "c") == ["loaded", "loaded"]


def refused_save(ranks: Ranks, folder: Path) -> str:
    _, sync, _ = started(ranks)
    with pytest.raises(FileExistsError) as error:
        save_checkpoint(folder, sync)
    return str(error.value)


def test_files_of_a_checkpoints_names_are_not_overwritten(tmp_path: Path):
    (tmp_path / "optimizer.json").write_text("mine")
    assert all("holds optimizer.json, which" in message for message in run_ranks(2, refused_save, tmp_path))
    assert (tmp_path / "optimizer.json").read_text() == "mine"
    assert all(
        "is a file; name a folder" in message for message in run_ranks(2, refused_save, tmp_path / "optimizer.json")
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "must be a list with an object for each parameter group"),
        ("null", "must be a list with an object for each parameter group"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has 0 parameter groups, but the optimizer has 1"),
        ('[{"params": []}]', "group 0 has 'params', which is not an option of the optimizer"),
        ('[{"momentum": 0.9}]', "group 0 has 'momentum', which is not an option"),
        ('[{"lr": "0.1"}]', "group 0 has '0.1' for lr, where the optimizer has 5.0"),
        ('[{"lr": true}]', "group 0 has True for lr"),
        ('[{"betas": [0.9]}]', r"group 0 has \[0.9\] for betas"),
        ('[{"lr": 0.1}]', "group 0 lacks betas"),
    ],
    ids=lambda value: value[:20],
)
def test_hyperparameters_that_do_not_fit_are_refused(tmp_path: Path, content: str, words: str):
    save_once(alone(), tmp_path)
    (tmp_path / "optimizer.json").write_text(content)
    write_manifest(tmp_path)
    outcome = outcome_of_load(alone(), tmp_path)
    assert outcome.startswith(f"{tmp_path}/optimizer.json: ")
    assert re.search(words, outcome)


def test_hyperparameters_that_are_tensors_or_a_schedulers_are_loaded(tmp_path: Path):
    model, sync, _ = started(alone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), betas=(0.5, 0.75))
    optimizer.param_groups[0]["initial_lr"] = 1.0
    save_checkpoint(tmp_path, sync, optimizer)
    loaded = torch.optim.AdamW(model.parameters(), lr=torch.tensor(5.0))
    lr = loaded.param_groups[0]["lr"]
    load_checkpoint(tmp_path, sync, loaded)
    assert loaded.param_groups[0]["lr"] is lr
    assert lr == 0.25
    assert loaded.param_groups[0]["betas"] == (0.5, 0.75)
    assert loaded.param_groups[0]["initial_lr"] == 1.0


def test_metadata_that_names_another_file_is_refused(tmp_path: Path):
    save_once(alone(), tmp_path / "c")
    shutil.copy(tmp_path / "c" / "__0_0.distcp", tmp_path / "outside.distcp")

    def name_a_file_outside(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = replace(place, relative_path="../outside.distcp")

    change_metadata(tmp_path / "c", name_a_file_outside)
    write_manifest(tmp_path / "c")
    assert "is in '../outside.distcp', which is not a part of this checkpoint" in outcome_of_load(
        alone(), tmp_path / "c"
    )


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_the_manifest(tmp_path: Path):
    save_once(alone(), tmp_path)
    checked = subprocess.run(
        ["sha256sum", "--check", "manifest.sha256"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert checked.stdout == ".metadata: OK\n__0_0.distcp: OK\noptimizer.json: OK\n"


def test_a_parameter_without_elements_is_saved_and_loaded(tmp_path: Path):
    module = nn.Linear(3, 2)
    module.empty = nn.Parameter(torch.empty(0, 4))
    sync = FSDP(module, alone())
    save_checkpoint(tmp_path, sync)
    load_checkpoint(tmp_path, sync)


def test_a_part_that_rank_0_does_not_see_is_refused(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"__1_0\.distcp is not in it, as rank 0 sees it; every rank must name the same"
    ):
        checkpoint_files.finish(tmp_path, {"__1_0.distcp": "0" * 64})
    assert not list(tmp_path.iterdir())
