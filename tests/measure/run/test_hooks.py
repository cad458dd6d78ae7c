"""What a script may do with a module that is followed: copy it, save it, compile it, script it, as without hooks."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from run_records import records_of, watched


def trained(steps: int = 3, before: Callable[[int], None] = lambda step: None) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        before(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model._forward_hooks, "the module is followed"
    return model


def saved(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("every", [0, 1], ids=["ordinary steps", "an inspected step"])
def test_copies_of_a_followed_module_compute_the_same_and_are_not_followed(
    tmp_path: Path, copied: Callable[[torch.nn.Module], torch.nn.Module], every: int
):
    with watched(tmp_path, every=every) as watch:
        model = trained()
        other = copied(model)
        forwards = watch._hooks.forwards
        x = torch.randn(2, 8)
        assert torch.equal(other(x), model(x))
        assert watch._hooks.forwards == forwards + 1, "the copy's call is not counted"


def test_a_saved_module_is_read_where_there_is_no_trainstep(tmp_path: Path):
    with watched(tmp_path):
        torch.save(trained(), tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['trainstep'] = None; import torch; "
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 8)).shape)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("torch.Size([1, 8])", 0), ran.stderr


def test_a_followed_module_compiles_without_graph_breaks(tmp_path: Path):
    torch._dynamo.reset()
    with watched(tmp_path):
        model = trained()
        x = torch.randn(2, 8)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_followed_module_can_be_scripted_and_is_followed_afterwards(tmp_path: Path):
    with watched(tmp_path) as watch:
        model = trained()
        x = torch.randn(2, 8)
        assert torch.equal(torch.jit.script(model)(x), model(x))
        forwards = watch._hooks.forwards
        model(x)
        assert watch._hooks.forwards == forwards + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_that_holds_a_scripted_module_is_followed(tmp_path: Path):
    scripted = torch.jit.script(torch.nn.Linear(8, 8))
    with watched(tmp_path) as watch:
        trained()
    assert not watch.trouble
    assert scripted(torch.ones(1, 8)).shape == (1, 8)


def test_steps_in_a_row_can_be_inspected(tmp_path: Path):
    """torch's range around an update ended in the memory of a profiler that was gone: two of three such processes crashed."""
    with watched(tmp_path, every=1) as watch:
        trained(40)
    inspected = [record.fact("inspected_step") for record in records_of(watch)]
    assert [step for step in inspected if step] == [*range(2, 41)]


def test_a_range_of_the_script_may_begin_in_one_inspected_step_and_end_in_another(tmp_path: Path):
    """Three of three such processes crashed. What began before and ends within, and what is nested, is left alone."""
    opened: list[record_function] = []

    def at(step: int) -> None:
        while len(opened) > 1:  # the outer one lasts until the end
            opened.pop().__exit__(None, None, None)
        opened.append(record_function(f"epoch {step}").__enter__())

    with watched(tmp_path, every=2) as watch, record_function("a whole training"):
        trained(60, before=at)
    while opened:
        opened.pop().__exit__(None, None, None)
    assert not watch.trouble
    assert sum(record.fact("inspected_step") is not None for record in records_of(watch)) == 30
