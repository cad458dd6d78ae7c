"""What a script may do with a module that is followed: copy it, save it, compile it, script it, as without hooks."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from cell_maker import run_python
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, saved])
def test_copies_of_a_followed_module_have_the_scripts_hooks_alone_and_can_be_scripted(
    tmp_path: Path, copied: Callable[[torch.nn.Module], torch.nn.Module]
):
    state_of = torch.nn.Module.__getstate__
    with watched(tmp_path):
        model = trained()
        handle = model.register_forward_hook(print, always_call=True)
        assert list(copied(model)._forward_hooks.values()) == [print]
        assert len(copied(model)._forward_hooks_always_called) == 1
        handle.remove()
        x = torch.randn(2, 8)
        assert torch.equal(torch.jit.script(copied(model))(x), model(x))
    assert torch.nn.Module.__getstate__ is state_of


def test_a_saved_module_is_loaded_with_weights_only(tmp_path: Path):
    with watched(tmp_path):
        torch.save(trained(), tmp_path / "model.pt")
    with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear, torch.nn.GELU]):
        assert torch.load(tmp_path / "model.pt", weights_only=True)(torch.ones(1, 8)).shape == (1, 8)


class CopiesItself(torch.nn.Linear):
    """Decides itself what of it is pickled."""

    def __getstate__(self) -> dict[str, object]:
        return dict(vars(self))


def test_a_module_that_decides_what_is_copied_gets_hooks_that_do_nothing(tmp_path: Path):
    with watched(tmp_path) as watch:
        trained()
        model = CopiesItself(8, 8)
        watch._hooks.follow([model])
        other, forwards = saved(model), watch._hooks.forwards
        assert torch.equal(
            other(torch.ones(1, 8)), torch.nn.functional.linear(torch.ones(1, 8), model.weight, model.bias)
        )
        assert watch._hooks.forwards == forwards


def test_a_module_that_was_compiled_in_place_again_keeps_what_it_was_given(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model.compile(backend="eager")
    x, first = torch.ones(1, 8), model._compiled_call_impl
    with watched(tmp_path) as watch:
        watch._hooks.follow([model])
        assert model._compiled_call_impl is not first
        assert torch.equal(saved(model)(x), model(x))
        model.compile(backend="aot_eager")
        second = model._compiled_call_impl.__wrapped__
    assert model._compiled_call_impl is second
    with watched(tmp_path) as watch:
        watch._hooks.follow([model])
    assert model._compiled_call_impl is second


def test_a_saved_module_is_read_where_there_is_no_trainstep(tmp_path: Path):
    with watched(tmp_path):
        torch.save(trained(), tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['trainstep'] = None; import torch; "
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 8)).shape)"
    )
    ran = run_python(tmp_path, "-c", code)
    assert (ran.stdout.strip(), ran.returncode) == ("torch.Size([1, 8])", 0), ran.stderr


def test_a_followed_module_compiles_without_graph_breaks(tmp_path: Path):
    torch._dynamo.reset()
    with watched(tmp_path):
        model = trained()
        x = torch.randn(2, 8)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def in_place(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [in_place, lambda model: torch.compile(model, backend="eager")])
def test_a_followed_module_that_is_compiled_later_is_followed(
    tmp_path: Path, compiled: Callable[[torch.nn.Module], torch.nn.Module]
):
    """A step before the compilation, as a check of shapes, must not make all later passes other code."""
    torch._dynamo.reset()
    function = torch.compile
    with watched(tmp_path) as watch:
        plain = trained()
        before = len(watch._hooks.followed)
        for _ in range(3):  # as each epoch may do
            model = compiled(plain)
            forwards = watch._hooks.forwards
            for _ in range(2):
                model(torch.randn(4, 8))
            assert watch._hooks.forwards == forwards + 2
        assert len(watch._hooks.followed) <= before + 1
    assert torch.compile is function


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
