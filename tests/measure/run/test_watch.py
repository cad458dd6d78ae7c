"""A watched training loop: its steps, what they hold, and that watching changes nothing."""

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from run_records import a_watch, records_of, same_with_and_without, watched
from trainstep.config.script import Part
from trainstep.measure.run.recording import WARMUPS, Ending
from trainstep.measure.run.watch import active_watch


def a_model(width: int = 16) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, width)
    )


def loop(steps: int = 8, *, accumulation: int = 1, before: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train and return the losses, which are read once training is over."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        before(step)
        for _ in range(accumulation):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def amp() -> list[float]:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 16)).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled() -> list[float]:
    torch._dynamo.reset()
    model = torch.compile(a_model(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_what_the_watch_collects_is_not_the_scripts(tmp_path: Path):
    """Between steps the watch reads traces, writes records, and shows its line; the garbage of that is its own."""
    gc.disable()  # so that nothing else is collected
    try:
        with watched(tmp_path, on_step=lambda *_: gc.collect()) as watch:
            loop(8)
    finally:
        gc.enable()
    records = [record for record in records_of(watch) if record.samples]
    collected = [time_s for record in records for time_s in record.samples["garbage_collection"].values]
    assert len(collected) >= 4
    assert sum(collected) == 0


@pytest.mark.parametrize("train", [loop, lambda: loop(accumulation=3), amp], ids=["plain", "accumulation", "autocast"])
@pytest.mark.parametrize("every", [0, 2, None])
def test_losses_are_the_same_to_the_bit(train: Callable[[], list[float]], every: int | None, tmp_path: Path):
    same_with_and_without(train, tmp_path, every=every)


@pytest.mark.slow
def test_a_compiled_model_keeps_its_losses_and_is_not_compiled_again(tmp_path: Path):
    same_with_and_without(compiled, tmp_path, every=2)
    with watched(tmp_path / "again", every=2) as watch:
        compiled()
    compilations = [
        line for record in records_of(watch) for line in record.tables.get("compilations", {"step": []})["step"]
    ]
    assert set(compilations) == {1}


def test_a_step_is_divided_into_its_parts(tmp_path: Path):
    data = DataLoader(TensorDataset(torch.randn(48, 16)), batch_size=4)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(tmp_path) as watch:
        for (batch,) in data:
            model(batch).sum().backward()
            optimizer.step()
    (record,) = records_of(watch)
    assert record.fact("steps_seen") == watch.steps == 12
    assert record.fact("ending") == "finished"
    assert record.fact("backward_passes") == 12
    assert record.fact("loader_workers") == 0
    assert record.fact("forward_passes") == 11, "the first step shows which modules to follow"
    for name in ("step", "data_wait", "forward", "backward", "optimizer"):
        samples = record.samples[name]
        assert (len(samples.warmups), len(samples.values)) == (WARMUPS, 12 - WARMUPS)
        assert min(samples.values) > 0, name
    for values in zip(*(record.samples[name].values for name in ("step", *Part)), strict=True):
        assert values[0] == pytest.approx(sum(values[1:]), abs=1e-8)


def test_accumulation_is_one_step(tmp_path: Path):
    with watched(tmp_path) as watch:
        loop(5, accumulation=4)
    (record,) = records_of(watch)
    assert (watch.steps, record.fact("backward_passes")) == (5, 20)


def test_evaluation_is_a_part_of_its_own(tmp_path: Path):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(tmp_path) as watch:
        for step in range(8):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            if step == 5:
                with torch.no_grad():
                    model(torch.randn(4, 16))
    (record,) = records_of(watch)
    evaluated = [seconds > 0 for seconds in record.samples["evaluation"].values]
    assert evaluated == [step == 6 for step in range(WARMUPS, 8)], "it belongs to the step that it delays"


def test_a_gan_makes_one_step_of_both_updates(tmp_path: Path):
    first, second = a_model(), a_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with watched(tmp_path) as watch:
        for _ in range(10):
            for optimizer, model in zip(optimizers, (first, second), strict=True):
                optimizer.zero_grad()
                model(torch.randn(4, 16)).sum().backward()
                optimizer.step()
    (record,) = records_of(watch)
    assert 10 <= watch.steps <= 11, "the first update alone looks like a step"
    assert record.fact("optimizers") == 2


def test_updates_that_a_scaler_leaves_out_are_steps_too(tmp_path: Path):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watched(tmp_path) as watch:
        for step in range(8):
            loss = model(torch.randn(4, 16)).sum() * (float("inf") if step in (4, 6) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (record,) = records_of(watch)
    assert (watch.steps, record.fact("skipped_updates")) == (8, 2)


def test_updates_inside_backward_end_one_step(tmp_path: Path):
    model = a_model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    with watched(tmp_path) as watch:
        for _ in range(6):
            model(torch.randn(4, 16)).sum().backward()
    assert watch.steps == 6


def test_a_closure_that_computes_the_loss_is_divided_too(tmp_path: Path):
    model = a_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    batch = torch.randn(4, 16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with watched(tmp_path) as watch:
        for _ in range(6):
            optimizer.step(closure)  # type: ignore[arg-type]
    (record,) = records_of(watch)
    assert watch.steps == 6
    for name in ("forward", "backward", "optimizer"):
        assert min(record.samples[name].values) > 0


def test_an_optimizer_that_fails_and_is_caught_leaves_no_part_open(tmp_path: Path):
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("no update")
            return super().step(closure)

    model = a_model()
    optimizer = Failing(model.parameters(), lr=0.1)
    with watched(tmp_path) as watch:
        for step in range(8):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.fails = step == 4
            try:
                optimizer.step()
            except RuntimeError:
                assert step == 4
    assert watch.steps == 7
    assert watch.part is None


def test_modules_that_nobody_calls_give_way_to_those_inside(tmp_path: Path):
    class Wrapper(torch.nn.Module):
        """As a LightningModule: its own forward is never called."""

        def __init__(self) -> None:
            super().__init__()
            self.model = a_model()

    wrapper = Wrapper()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    with watched(tmp_path) as watch:
        for _ in range(10):
            wrapper.model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    (record,) = records_of(watch)
    assert record.samples["forward"].values[-1] > 0


def test_an_inspected_step_has_tables_and_no_times(tmp_path: Path):
    with watched(tmp_path, every=6) as watch:
        loop(13)
    records = records_of(watch)
    inspected = [record for record in records if record.fact("inspected_step")]
    assert [record.fact("inspected_step") for record in inspected] == [6, 12]
    assert [record.config["first_step"] for record in records] == [1, 7, 13]
    timed = sum(len(record.samples["step"].values) for record in records if record.samples)
    assert timed == 13 - WARMUPS - 2
    for record in inspected:
        assert set(record.tables["classes"]["phase"]) >= {"forward", "backward", "optimizer"}
        assert record.fact("profiled_step_s") > 0
        assert record.fact("watching_s") > 0


def test_what_is_timed_in_place_of_an_adam_by_tensor_is_no_step(tmp_path: Path):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    with watched(tmp_path, every=6) as watch:
        for _ in range(8):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.steps == 8
    table = next(record.tables["patterns"] for record in records_of(watch) if "patterns" in record.tables)
    assert (table["pattern"], table["least_is_timed"]) == (("optimizer by tensor",), (True,))
    assert table["least_s"][0] > 0


def test_lines_that_read_values_are_in_the_record(tmp_path: Path):
    seen: list[float] = []
    with watched(tmp_path, every=5) as watch:
        loop(6, before=lambda step: seen.append(torch.ones(1).item()))
    table = next(record.tables["waits"] for record in records_of(watch) if "waits" in record.tables)
    assert table["file"] == (__file__,)
    assert "seen.append(torch.ones(1).item())" in table["source"][0]
    assert table["calls"] == (1,)


def test_a_scripts_own_profiler_goes_first(tmp_path: Path):
    steps: list[int] = []
    schedule = torch.profiler.schedule(wait=3, warmup=1, active=2, repeat=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            watched(tmp_path, every=2) as watch,
            torch.profiler.profile(
                schedule=schedule, on_trace_ready=lambda prof: steps.append(len(prof.events()))
            ) as prof,
        ):
            loop(12, before=lambda step: prof.step() if step else None)
    assert steps
    assert steps[0] > 0
    assert not watch.trouble
    assert records_of(watch)[-1].fact("own_profiler") is True


def test_torch_is_as_it_was(tmp_path: Path):
    from torch.optim import optimizer
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def state() -> list[Any]:
        return [
            torch.autograd.backward,
            torch.amp.GradScaler.step,
            _BaseDataLoaderIter.__next__,
            DataLoader.__iter__,
            torch.autograd.profiler.profile._prepare_trace,
            torch.Tensor.item,
            dict(optimizer._global_optimizer_pre_hooks),
            dict(optimizer._global_optimizer_post_hooks),
            list(gc.callbacks),
        ]

    model = a_model()
    before = state()
    optimizer_of_model = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(tmp_path, every=2, modules=[model]):
        for _ in range(5):
            model(torch.randn(4, 16)).sum().backward()
            optimizer_of_model.step()
        assert model._forward_hooks
    assert state() == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_fault_of_the_watch_never_reaches_the_script(tmp_path: Path):
    def fails(step: int, times: object) -> None:
        raise OSError("the disk is full")

    watch = a_watch(tmp_path, on_step=fails)
    watch.start()
    losses = loop(6)
    watch.stop(Ending(words="finished"))
    assert losses == loop(6)
    assert watch.trouble == "OSError: the disk is full"
    assert active_watch() is None


def test_only_one_watch_at_a_time(tmp_path: Path):
    with watched(tmp_path) as watch:
        assert active_watch() is watch
        with pytest.raises(RuntimeError, match="watched already"):
            a_watch(tmp_path / "other").start()
        loop(4)
    assert watch.steps == 4


def test_steps_marked_by_hand(tmp_path: Path):
    model = a_model()
    with watched(tmp_path, modules=[model]) as watch:
        for _ in range(5):
            model(torch.randn(4, 16)).sum().backward()
            assert "mark the steps yourself" in watch.why_no_step or watch.steps
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            watch.step()
    (record,) = records_of(watch)
    assert (watch.steps, watch.why_no_step) == (5, "")
    assert min(record.samples["forward"].values) > 0


def test_without_a_step_nothing_is_written_and_a_sentence_says_why(tmp_path: Path):
    with watched(tmp_path) as watch:
        torch.ones(2).sum()
    assert "no optimizer made a step" in watch.why_no_step
    assert records_of(watch) == []


def test_how_it_ended_is_recorded_with_the_part(tmp_path: Path):
    watch = a_watch(tmp_path)
    watch.start()
    optimizer = torch.optim.SGD(a_model().parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(RuntimeError):
        torch.ones(1).backward()
    watch.stop(Ending(words="RuntimeError: boom"))
    (record,) = records_of(watch)
    assert record.fact("ending") == "RuntimeError: boom"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_watches_nothing(tmp_path: Path):
    with watched(tmp_path) as watch:
        loop(3)
        process = os.fork()
        if not process:
            try:
                torch.set_num_threads(1)  # a fork has no OpenMP threads, and would wait for them without end
                loop(3)
            finally:
                os._exit(0 if watch.steps == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert watch.steps == 3


def test_compilations_and_graph_breaks_are_rows(tmp_path: Path):
    """The script's own, not those before the watch, whose numbers torch gives out again after a reset."""

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    for width in (3, 4, 5):
        doubled(torch.ones(width))
    torch._dynamo.reset()

    with watched(tmp_path) as watch:
        loop(6, before=lambda step: print(doubled(torch.ones(4 if step < 4 else 8)).shape))
    record = records_of(watch)[-1]
    rows = record.tables["compilations"]
    again = [(step, reason) for step, reason in zip(rows["step"], rows["reason"], strict=True) if reason]
    assert {step for step, _ in again} == {5}
    assert "size mismatch" in again[0][1]
    assert set(rows["step"]) == {1, 5}
    assert sum(record.tables["graph_breaks"]["count"]) == 2  # of the two shapes
    assert record.fact("recompilations") == len(again)
