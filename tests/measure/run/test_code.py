"""`trainstep.watch` in code, its callbacks and its trackers."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstep
from cell_maker import run_python
from trainstep.config.script import Part
from trainstep.measure.run.live import LiveLine, live_words
from trainstep.measure.run.recording import StepTimes
from trainstep.records.record import Record
from trainstep.records.store import Store


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


@pytest.fixture
def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def records(path: Path) -> list[Record]:
    return Store(path).read()


def test_a_block_is_recorded_from_its_first_step(parts: Any, tmp_path: Path):
    model, optimizer = parts
    out = tmp_path / "r.jsonl"
    with trainstep.watch(model, optimizer, name="mine", out=out, page=False, quiet=True, inspect_every=0) as watched:
        train(model, optimizer)
    assert watched.steps == 6
    (record,) = records(out)
    assert record.config["script"] == "mine"
    assert record.fact("forward_passes") == 6
    assert record.fact("ending") == "finished"


def test_only_the_given_optimizer_ends_steps(parts: Any, tmp_path: Path):
    model, optimizer = parts
    other = torch.nn.Linear(8, 8)
    with trainstep.watch(model, optimizer, out=tmp_path / "r.jsonl", page=False, quiet=True) as watched:
        train(other, torch.optim.SGD(other.parameters(), lr=0.1), 3)
        train(model, optimizer, 4)
    assert watched.steps == 4


def test_an_error_in_the_block_is_recorded_and_raised(parts: Any, tmp_path: Path):
    model, optimizer = parts
    out = tmp_path / "r.jsonl"

    def fail() -> None:
        with trainstep.watch(out=out, page=False, quiet=True):
            train(model, optimizer)
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        fail()
    assert records(out)[-1].fact("ending") == "ZeroDivisionError: division by zero"


class Wordless(Exception):
    """An error whose own words cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit("no data here"), "exit: no data here"),
        (SystemExit(3), "exit code 3"),
        (SystemExit(), "finished"),
        (ValueError("\n\nsecond line"), "ValueError: second line"),
        (Wordless(), "Wordless"),
    ],
)
def test_a_block_ends_in_the_words_of_a_script(error: BaseException, words: str, parts: Any, tmp_path: Path):
    model, optimizer = parts
    out = tmp_path / "r.jsonl"

    def block() -> None:
        with trainstep.watch(out=out, page=False, quiet=True, inspect_every=0):
            train(model, optimizer)
            raise error

    with pytest.raises(type(error)):
        block()
    assert records(out)[-1].fact("ending") == words


def test_a_page_and_an_answer_follow(parts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    model, optimizer = parts
    with trainstep.watch(model, optimizer, out=tmp_path / "r.jsonl", inspect_every=0):
        train(model, optimizer)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Your step takes" in err
    assert "generator" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inspect_every": -1}, "inspect_every"),
        ({"out": "."}, "cannot be written"),
    ],
)
def test_wrong_options_are_refused_before_training(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words), trainstep.watch(quiet=True, **options):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((3,), {}, "model: must be a torch.nn.Module or several, not of type int"),
        (("model",), {}, "model: must be a torch.nn.Module or several, not of type str"),
        (([torch.nn.Identity(), None],), {}, "model: must be a torch.nn.Module or several, not of type NoneType"),
        ((None, torch.nn.Identity()), {}, "optimizer: must be an optimizer or several, not of type Identity"),
        ((), {"page": 3}, "page: must be a path, True or False, not 3 of type int"),
        ((), {"page": None}, "page: must be a path, True or False, not None of type NoneType"),
        ((), {"out": 3}, "out: must be a path, not 3 of type int"),
        ((), {"name": 3}, "name: must be text, not 3 of type int"),
        (
            (),
            {"inspect_every": "often"},
            "inspect_every: must be a whole number of steps, or None, not 'often' of type str",
        ),
        ((), {"inspect_every": True}, "inspect_every: must be a whole number of steps, or None, not True of type bool"),
        ((), {"tensorboard": 3}, "tensorboard: must be the path of a folder, not 3 of type int"),
        ((), {"trackio": 3}, "trackio: must be the name of a project, not 3 of type int"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    arguments: tuple[Any, ...], options: dict[str, Any], sentence: str, tmp_path: Path
):
    options = {"quiet": True, "out": tmp_path / "r.jsonl", **options}
    with pytest.raises(TypeError) as refused, trainstep.watch(*arguments, **options):
        pytest.fail("the block ran")
    assert str(refused.value) == sentence


def test_several_modules_and_an_optimizer_that_is_not_of_torch_are_taken(tmp_path: Path):
    modules = (torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = types.SimpleNamespace(step=lambda: None)
    with trainstep.watch(modules, optimizer, out=tmp_path / "r.jsonl", page=False, quiet=True) as watched:
        for _ in range(4):
            sum(module(torch.randn(4, 8)).sum() for module in modules).backward()
            watched.step()
    assert watched.steps == 4


def test_a_block_inside_a_watch_is_refused(tmp_path: Path):
    with (
        trainstep.watch(out=tmp_path / "r.jsonl", quiet=True, page=False),
        pytest.raises(RuntimeError, match="watched already"),
        trainstep.watch(out=tmp_path / "other.jsonl", quiet=True, page=False),
    ):
        pytest.fail("the block ran")


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Put an empty class in place of a library's base class, so that the callback is tested without the library."""
    made = types.ModuleType(module)
    setattr(made, name, type(name, (), {}))
    before = importlib.import_module

    def import_module(wanted: str, *rest: Any) -> Any:
        return made if wanted == module else before(wanted, *rest)

    monkeypatch.setattr("trainstep.measure.run.callbacks.importlib.import_module", import_module)


def test_the_callback_of_hugging_face_watches_from_begin_to_end(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(monkeypatch, "transformers.trainer_callback", "TrainerCallback")
    out = tmp_path / "r.jsonl"
    callback = trainstep.hugging_face_callback(out=out, page=False, quiet=True)
    callback.on_train_begin(None, None, None, model=parts[0])
    train(*parts)
    callback.on_train_end(None, None, None)
    train(*parts)
    assert records(out)[-1].fact("steps_seen") == 6
    callback.on_train_begin(None, None, None)
    train(*parts, 3)
    callback.on_train_end(None, None, None)
    assert records(out)[-1].fact("steps_seen") == 3, "a second training is a second run"


def test_the_callback_of_lightning_records_an_error(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
        stand_in(monkeypatch, module, "Callback")
    out = tmp_path / "r.jsonl"
    callback = trainstep.lightning_callback(out=out, page=False, quiet=True)
    callback.on_train_start(None, None)
    train(*parts)
    callback.on_exception(None, None, RuntimeError("boom"))
    callback.on_train_end(None, None)
    assert [record.fact("ending") for record in records(out)][-1] == "RuntimeError: boom"


def test_a_callback_refuses_an_unknown_option(monkeypatch: pytest.MonkeyPatch):
    stand_in(monkeypatch, "transformers.trainer_callback", "TrainerCallback")
    with pytest.raises(ValueError, match=r"^outt: is not an option"):
        trainstep.hugging_face_callback(outt="x")


def test_a_callback_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        trainstep.hugging_face_callback()


def test_tensorboard_gets_each_step(parts: Any, tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with trainstep.watch(
        out=tmp_path / "r.jsonl", page=False, quiet=True, inspect_every=0, tensorboard=tmp_path / "tb"
    ):
        train(*parts)
    events = accumulator.EventAccumulator(str(tmp_path / "tb" / "r"))
    events.Reload()
    assert [event.step for event in events.Scalars("trainstep (ms)/step")] == [1, 2, 3, 4, 5, 6]
    assert events.Scalars("trainstep (ms)/backward")[0].value > 0


def test_trackio_gets_each_step(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged: list[tuple[int, dict[str, float]]] = []
    finished: list[bool] = []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(True)
    )
    fake = types.ModuleType("trackio")
    fake.init = lambda **named: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with trainstep.watch(out=tmp_path / "r.jsonl", page=False, quiet=True, inspect_every=0, trackio="project"):
        train(*parts)
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6]
    assert logged[0][1]["trainstep/step_ms"] > 0
    assert finished == [True]


def test_a_missing_tracker_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with (
        pytest.raises(ValueError, match=r"pip install 'trainstep\[trackio\]'"),
        trainstep.watch(out=tmp_path / "r.jsonl", quiet=True, trackio="project"),
    ):
        pytest.fail("the block ran")


def test_the_live_line_says_what_takes_the_time():
    times = StepTimes(10_000_000, {Part.DATA: 2_000_000, Part.FORWARD: 3_000_000, Part.BACKWARD: 5_000_000}, 0)
    assert live_words(1234, [times] * 3) == "step 1,234: 10.0 ms, backward 50 %, forward 30 %, data 20 %"


def test_the_live_line_leaves_streams_that_are_no_terminals_alone():
    live, before = LiveLine(), (sys.stdout, sys.stderr)
    assert not live.is_possible
    live.open()
    assert (sys.stdout, sys.stderr) == before
    live.close()


@pytest.mark.slow
def test_a_watch_that_is_never_left_is_ended_with_python(tmp_path: Path):
    code = (
        "import torch, trainstep\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "watched = trainstep.watch(model, optimizer, out='r.jsonl', page=False, quiet=True, inspect_every=0)\n"
        "watched.__enter__()\n"
        "for _ in range(6):\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = run_python(tmp_path, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = records(tmp_path / "r.jsonl")
    assert record.fact("ending") == "Python ended before the watch did"
