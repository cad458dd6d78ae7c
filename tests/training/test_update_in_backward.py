"""Updating during backward is the plain step to the bit, and gradients of only one block exist at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel_strategies import SMALL_COPIES
from quick import slow_unless
from ranks import run_ranks
from trainstep.config.parallel import SyncConfig
from trainstep.config.parsing import build_config, build_run
from trainstep.config.run import Phase, RunConfig
from trainstep.ops.adamw import AdamW
from trainstep.parallel.ddp import BucketedDDP, NaiveDDP
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.units import parameter_sizes
from trainstep.plan.peak_memory import expected_memory
from trainstep.training.build import Assembly, build_step
from trainstep.training.optimizer import MasterWeights
from trainstep.training.parallelism import parallel
from trainstep.training.step import TrainStep
from trainstep.training.update_in_backward import UpdateInBackward

SHAPE = {"layers": 3, "d_model": 16, "d_ff": 32, "heads": 2, "vocab_size": 40, "context": 8, "batch_size": 2}


def run(**values: Any) -> RunConfig:
    return build_run({**SHAPE, "device": "cpu", "adamw": "trainstep", "learning_rate": 1e-2, **values})


def run_of_rank(**values: Any) -> RunConfig:
    values = {**SHAPE, "device": "cpu", "adamw": "trainstep", "learning_rate": 1e-2, "ranks": 2, **values}
    step: RunConfig = build_config("parallel", values).run
    return step


def weights_and_state(assembly: Assembly) -> list[Tensor]:
    assert assembly.step.optimizer is not None
    state = assembly.step.optimizer.state_dict()["state"]
    tensors = [parameter.detach() for parameter in assembly.module.parameters()]
    return tensors + [value for _, values in sorted(state.items()) for value in values.values()]


def trained(config: RunConfig, *, falling_rate: bool = False) -> tuple[list[float], list[Tensor]]:
    assembly = build_step(config)
    assert assembly.step.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(assembly.step.optimizer, 1, gamma=0.8 if falling_rate else 1.0)
    losses = []
    for step in range(7):
        losses.append(assembly.take(assembly.micro_batches(step)).item())
        schedule.step()
    return losses, weights_and_state(assembly)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"ops": "fused"},
        {"precision": "bf16_autocast"},
        {"precision": "bf16"},
        {"precision": "bf16_master", "ops": "fused"},
        {"recompute": "block"},
        {"capture": "step", "precision": "bf16_master"},
        pytest.param({"compile": "block"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_weights_and_state_are_those_of_the_plain_step(values: dict[str, Any]):
    plain_losses, plain = trained(run(**values), falling_rate=True)
    losses, tensors = trained(run(**values, update="in_backward"), falling_rate=True)
    assert losses == plain_losses
    assert all(torch.equal(*pair) for pair in zip(tensors, plain, strict=True))


@contextmanager
def noting_updates(assembly: Assembly, note: Callable[[list[nn.Parameter]], None]) -> Iterator[None]:
    """Calls `note` with the parameters of each update that has gradients to use."""
    optimizer = assembly.step.optimizer
    assert optimizer is not None
    real = optimizer.step

    def step(*arguments: Any) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.grad is not None for parameter in parameters):
            note(parameters)
        return real(*arguments)

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer.step = real  # type: ignore[method-assign]


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_only_one_blocks_gradients_exist_at_a_time(precision: str):
    assembly = build_step(run(precision=precision, update="in_backward"))
    assembly.step(assembly.micro_batches(0))
    names = {parameter: name for name, parameter in assembly.module.named_parameters()}
    updates: list[tuple[str, set[str], set[str]]] = []

    def note(parameters: list[nn.Parameter]) -> None:
        held = {names[parameter] for parameter in assembly.module.parameters() if parameter.grad is not None}
        updates.append((str(assembly.step.running), {names[parameter] for parameter in parameters}, held))

    marks: list[tuple[Phase, int]] = []
    with noting_updates(assembly, note):
        assembly.step(assembly.micro_batches(1), lambda phase: marks.append((phase, len(updates))))
    assert all(updated == held for _, updated, held in updates)
    blocks = [{name for name in names.values() if f"blocks.{layer}." in name} for layer in (2, 1, 0)]
    assert [updated for _, updated, _ in updates] == [{"head.weight"}, {"norm.weight"}, *blocks, {"embedding.weight"}]
    assert {phase for phase, _, _ in updates} == {"backward"}
    assert marks == [(Phase.FORWARD, 0), (Phase.BACKWARD, 6), (Phase.OPTIMIZER, 6)]


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_the_formula_has_the_gradients_of_the_largest_part(precision: str):
    assembly = build_step(run(precision=precision, update="in_backward"))
    assembly.step(assembly.micro_batches(0))
    sizes = parameter_sizes(assembly.module)
    values = {**SHAPE, "sync": "none", "ranks": 1, "precision": precision, "adamw": "trainstep"}
    expected, plain = (
        expected_memory(build_config("parallel", {**values, "update": update}), sizes)
        for update in ("in_backward", "after_backward")
    )
    assert expected is not None
    assert plain is not None
    held_bytes: list[int] = []
    with noting_updates(
        assembly, lambda parameters: held_bytes.append(sum(parameter.grad.nbytes for parameter in parameters))
    ):
        assembly.step(assembly.micro_batches(1))
    assert expected.in_backward.gradients_bytes == max(held_bytes)
    assert expected.before_sync.gradients_bytes == held_bytes[-1]
    assert expected.after_backward.gradients_bytes == expected.in_step.gradients_bytes == 0
    assert plain.after_backward.gradients_bytes == sum(held_bytes)
    assert plain.peak.total_bytes - expected.peak.total_bytes == sum(held_bytes) - max(held_bytes)


def test_the_peak_counts_a_blocks_gradients_beside_what_is_left_of_the_activations():
    """By hand: a root of 64 elements and two blocks of 256, in fp32; backward begins with the second block."""
    from trainstep.costs.exchange import ParameterSize

    sizes = [
        ParameterSize(name=name, numel=numel, element_bytes=4, unit=unit)
        for name, numel, unit in (("a", 64, "root"), ("b", 256, "blocks.0"), ("c", 256, "blocks.1"))
    ]
    config = build_config(
        "parallel", {**SHAPE, "sync": "none", "ranks": 1, "adamw": "trainstep", "update": "in_backward"}
    )
    expected = expected_memory(config, sizes, activations_bytes=1000)
    assert expected is not None
    assert expected.in_backward.gradients_bytes == 4 * 256
    assert expected.in_backward.activations_bytes == 500
    assert expected.peak_point == "in_backward"
    without = expected_memory(config, sizes, activations_bytes=10_000)
    assert without is not None
    assert without.peak_point == "after_forward"


# Models of which not every parameter has a gradient at every step.


class Odd(nn.Module):
    """Blocks of two layers, of which one step leaves out a part; embedding and head are one tensor, a bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0][0].bias.requires_grad_(False)  # type: ignore[index]

    def forward(self, tokens: Tensor, leave_out: bool) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = x + torch.tanh(block[0](x) if leave_out and number == 1 else block(x))  # type: ignore[index]
        return nn.functional.cross_entropy(self.head(x), tokens)


@pytest.mark.parametrize("masters", [False, True])
def test_what_is_left_is_updated_in_the_optimizers_phase(masters: bool):
    results = []
    for in_backward in (False, True):
        model = Odd().to(torch.bfloat16 if masters else torch.float32)
        optimizer = (MasterWeights if masters else AdamW)(
            [{"params": model.blocks.parameters(), "lr": 1e-2}, {"params": model.embedding.parameters(), "lr": 1e-3}]
        )
        step = TrainStep(model, optimizer, in_backward=UpdateInBackward(model, optimizer) if in_backward else None)
        for number in range(6):
            step([{"tokens": torch.tensor([0, 1, 2, number % 5]), "leave_out": number % 3 == 1}])
            assert all(parameter.grad is None for parameter in model.parameters())
        states = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters() if parameter.requires_grad]
        results.append([*model.parameters(), *states])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


class NeedsItsOldValue(nn.Module):
    """Uses its second weight without a gradient in a place that backward reaches after the weight's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((3,), value)) for value in (2.0, 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.first * self.second.detach() * self.second).sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_value_that_is_still_needed_is_an_error(device: str):
    model = NeedsItsOldValue().to(device)
    optimizer = AdamW(model.parameters())
    step = TrainStep(model, optimizer, in_backward=UpdateInBackward(model, optimizer))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step([{"x": torch.ones(3, device=device, requires_grad=True)}])


class Reentrant(nn.Module):
    """Two checkpoints of the kind that runs a backward of its own share a layer: alone, or in a block with another layer."""

    def __init__(self, in_block: bool) -> None:
        super().__init__()
        layers = nn.ModuleDict({"shared": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        self.blocks = nn.ModuleList([layers]) if in_block else layers
        self._layers = [layers]

    def forward(self, x: Tensor) -> Tensor:
        x = self._layers[0]["other"](x)
        for _ in range(2):
            x = checkpoint(self._layers[0]["shared"], x, use_reentrant=True)
        return x.sum()


@pytest.mark.parametrize(("in_block", "name"), [(False, r"blocks\.shared\.(weight|bias)"), (True, r"blocks\.0")])
def test_a_gradient_that_comes_twice_is_an_error(in_block: bool, name: str):
    model = Reentrant(in_block)
    optimizer = AdamW(model.parameters())
    step = TrainStep(model, optimizer, in_backward=UpdateInBackward(model, optimizer))
    with pytest.raises(RuntimeError, match=f"{name}: a gradient came twice in one backward"):
        step([{"x": torch.ones(2, 4, requires_grad=True)}])


def test_a_backward_of_somebody_else_only_adds_gradients():
    model = Odd()
    optimizer = AdamW(model.parameters())
    update = UpdateInBackward(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.tensor([1]), False).backward()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert model.embedding.weight.grad is not None
    update.finish()
    assert not torch.equal(before[0], model.embedding.weight)


class CountsCalls(AdamW):
    """A class of somebody else, which may count calls of `step`."""


def test_what_cannot_be_updated_in_parts_is_refused():
    model = Odd()
    for optimizer in (torch.optim.LBFGS(model.parameters()), CountsCalls(model.parameters())):
        with pytest.raises(ValueError, match=r"optimizer: .* cannot update a block alone; take trainstep's AdamW"):
            UpdateInBackward(model, optimizer)
    hooked = AdamW(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks on a step"):
        UpdateInBackward(model, hooked)
    sync = NaiveDDP(model, alone(torch.device("cpu")))
    with pytest.raises(ValueError, match="sync: NaiveDDP has no buckets to update; take BucketedDDP"):
        UpdateInBackward(model, AdamW(model.parameters()), sync)
    sync.detach()
    optimizer = AdamW(model.parameters())
    update = UpdateInBackward(model, optimizer)
    with pytest.raises(ValueError, match="in_backward: an update in backward is for mode step"):
        TrainStep(model, optimizer, clip_grad_norm=1.0, in_backward=update)
    with pytest.raises(ValueError, match="micro_batches: gradients of several add up first"):
        TrainStep(model, optimizer, in_backward=update)([{}, {}])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "forward_backward"}, "mode forward_backward has no update; take mode step"),
        ({"adamw": "fused"}, "AdamW's fused updates all parameters at once; take adamw trainstep"),
        ({"clip_grad_norm": 1.0}, "clipping needs the norm of all gradients first"),
        ({"accumulation": 2}, "gradients of micro-batches add up first"),
        ({"precision": "fp16_autocast"}, "loss scaling looks for overflows"),
        ({"compile": "model"}, "a model compiled whole completes all gradients at once; take compile block or none"),
    ],
)
def test_impossible_configs_are_refused(values: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=f"update: in_backward: {words}.*, or update after_backward"):
        run(update="in_backward", **values)


@pytest.mark.parametrize("sync", ["naive", "flat", "overlapped", "sharded", "sharded_flat", "fsdp", "torch_ddp"])
def test_other_strategies_are_refused(sync: str):
    values = {**SHAPE, "sync": sync, "ranks": 2, "adamw": "trainstep", "update": "in_backward"}
    with pytest.raises(
        ValueError, match=f"update: {sync} updates after_backward alone; take that, or sync none or bucketed"
    ):
        build_config("parallel", values)


# On several ranks.


def trained_on_ranks(ranks: Ranks, config: SyncConfig, step: RunConfig) -> tuple[list[float], list[Tensor]]:
    assembly = build_step(step, parallel(ranks, config))
    if config.transport == "copies":  # the model's messages are too small for the default
        assert isinstance(assembly.step.gradient_sync, BucketedDDP)
        assembly.step.gradient_sync.collectives.send_by(SMALL_COPIES)
    losses = [assembly.take(assembly.micro_batches(number)).item() for number in range(7)]
    return losses, weights_and_state(assembly)


BUCKETED = {
    "fp32": ({}, {}),
    "captured": ({"capture": "step"}, {}),
    "masters": ({"precision": "bf16_master"}, {}),
    "masters, averaged in fp32": ({"precision": "bf16_master"}, {"reduce_dtype": "fp32"}),
    "averaged in bf16": ({}, {"reduce_dtype": "bf16"}),
    "kept in bf16": ({}, {"reduce_dtype": "bf16", "keeps_gradient_dtype": False}),
    "one bucket": ({}, {"bucket_mib": 10.0}),
    "in place": ({}, {"in_place": True}),
    "in place, captured masters": ({"precision": "bf16_master", "capture": "step"}, {"in_place": True}),
    "in place, by copies": ({}, {"in_place": True, "transport": "copies", "inbox_mib": 1}),
    "by copies": ({}, {"transport": "copies", "inbox_mib": 1}),
    "captured masters, recomputed": ({"precision": "bf16_master", "capture": "step", "recompute": "block"}, {}),
}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", slow_unless(("fp32", "masters", "averaged in bf16", "captured masters, recomputed").__contains__, BUCKETED)
)
def test_buckets_are_updated_behind_their_messages_as_by_the_plain_step(case: str, world_size: int):
    """Two ranks take both updates; three take them from case to case in turn."""
    values, options = BUCKETED[case]
    updates = ["in_backward", "by_bucket"]
    if world_size == 3:
        updates = [updates[[*BUCKETED].index(case) % 2]]
    config = SyncConfig(name="bucketed", **{"bucket_mib": 0.005, **options})
    plain = run_ranks(world_size, trained_on_ranks, config, run_of_rank(**values))
    for update in updates:
        updated = run_ranks(world_size, trained_on_ranks, config, run_of_rank(**values, update=update))
        for (losses, tensors), (plain_losses, plain_tensors) in zip(updated, plain, strict=True):
            assert losses == plain_losses, update
            assert all(torch.equal(*pair) for pair in zip(tensors, plain_tensors, strict=True)), update


def odd_on_ranks(ranks: Ranks, in_backward: bool, options: dict[str, bool]) -> list[Tensor]:
    """Weights of a model of which rank 0 leaves out a part that rank 1 uses, then both."""
    model = Odd()
    sync = BucketedDDP(model, ranks, bucket_mib=300 / 2**20, in_place=options.get("in_place", False))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    by_bucket = options.get("by_bucket", False)
    update = UpdateInBackward(model, optimizer, sync, by_bucket=by_bucket) if in_backward else None
    step = TrainStep(model, optimizer, gradient_sync=sync, in_backward=update)
    for number in range(6):
        leave_out = (ranks.rank == 0 and number % 3 == 1) or number % 3 == 2
        step([{"tokens": torch.tensor([0, 1, 2, (number + ranks.rank) % 5]), "leave_out": leave_out}])
    return [parameter.detach() for parameter in model.parameters()]


def test_unused_parameters_are_as_in_the_plain_step():
    plain = run_ranks(2, odd_on_ranks, False, {})[0]
    cases: list[dict[str, bool]] = [{}, {"by_bucket": True}, {"in_place": True}, {"in_place": True, "by_bucket": True}]
    for options in cases:
        for weights in run_ranks(2, odd_on_ranks, True, options):
            assert all(torch.equal(*pair) for pair in zip(weights, plain, strict=True))


def beside_on_ranks(ranks: Ranks, in_place: bool) -> tuple[list[Tensor], list[int], int]:
    """As `odd_on_ranks`, updated on a stream of its own, of which a CPU has none. Also how many gradients are kept when the step
    waits for that stream, in each step, and in the end."""
    model = Odd()
    sync = BucketedDDP(model, ranks, bucket_mib=300 / 2**20, in_place=in_place)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    update = UpdateInBackward(model, optimizer, sync, by_bucket=True)
    sync.call_on_average(update._update_bucket, when="arrived", stream=cast(Any, object()))
    kept: list[int] = []
    step_stream = SimpleNamespace(wait_stream=lambda stream: kept.append(len(sync._kept)))
    step = TrainStep(model, optimizer, gradient_sync=sync, in_backward=update)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patched.setattr(torch.cuda, "current_stream", lambda: step_stream)
        for number in range(6):
            leave_out = (ranks.rank == 0 and number % 3 == 1) or number % 3 == 2
            step([{"tokens": torch.tensor([0, 1, 2, (number + ranks.rank) % 5]), "leave_out": leave_out}])
    return [parameter.detach() for parameter in model.parameters()], kept, len(sync._kept)


def test_a_stream_is_for_averages_as_they_arrive():
    sync = BucketedDDP(Odd(), alone(torch.device("cpu")))
    for when, stream in (("arrived", None), ("all_sent", cast(Any, object()))):
        with pytest.raises(ValueError, match=f"stream: .* when is '{when}'"):
            sync.call_on_average(lambda bucket: None, when=cast(Any, when), stream=stream)
    sync.detach()


@pytest.mark.parametrize("in_place", [False, True])
def test_beside_backward_updates_are_the_same_and_gradients_are_kept_until_the_step_has_waited(in_place: bool):
    plain = run_ranks(2, odd_on_ranks, False, {})[0]
    trained = sum(parameter.requires_grad for parameter in Odd().parameters())
    for rank, (weights, kept, left) in enumerate(run_ranks(2, beside_on_ranks, in_place)):
        assert all(torch.equal(*pair) for pair in zip(weights, plain, strict=True))
        # Rank 0 leaves a layer out in two of three steps, rank 1 in one; in place zeros are averaged for it
        without = [number % 3 == 2 or (rank == 0 and number % 3 == 1) for number in range(6)]
        assert kept == [trained - (2 if left_out and not in_place else 0) for left_out in without]
        assert left == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_by_bucket_takes_micro_batches_and_leaves_buckets_their_memory(in_place: bool):
    config = SyncConfig(name="bucketed", bucket_mib=0.005, in_place=in_place)
    plain = run_ranks(2, trained_on_ranks, config, run_of_rank(accumulation=2))
    updated = run_ranks(2, trained_on_ranks, config, run_of_rank(accumulation=2, update="by_bucket"))
    for (losses, tensors), (plain_losses, plain_tensors) in zip(updated, plain, strict=True):
        assert losses == plain_losses
        assert all(torch.equal(*pair) for pair in zip(tensors, plain_tensors, strict=True))


def test_one_process_has_no_buckets_to_update():
    model = Odd()
    with pytest.raises(ValueError, match="sync: none has no buckets to update; take BucketedDDP"):
        UpdateInBackward(model, AdamW(model.parameters()), by_bucket=True)
    with pytest.raises(ValueError, match="ranks: update by_bucket hides messages, and one rank sends none"):
        build_config("parallel", {**SHAPE, "ranks": 1, "sync": "none", "adamw": "trainstep", "update": "by_bucket"})
    with pytest.raises(ValueError, match="update: by_bucket hides messages between ranks"):
        run(update="by_bucket")
    with pytest.raises(ValueError, match="in_place: reduce_dtype averages gradients in a copy"):
        SyncConfig(name="bucketed", in_place=True, reduce_dtype="bf16")
    with pytest.raises(ValueError, match="in_place: fsdp has no buckets; leave it out, or take bucketed and sharded"):
        SyncConfig(name="fsdp", in_place=True)


def buckets_held(ranks: Ranks, config: SyncConfig, step: RunConfig) -> dict[str, list[str]]:
    """Phase -> names of the buckets that have memory at its end."""
    assembly = build_step(step, parallel(ranks, config))
    sync = assembly.step.gradient_sync
    assert isinstance(sync, BucketedDDP)
    held = {"start": [bucket.name for bucket in sync.buckets if bucket.flat.untyped_storage().nbytes()]}

    def note(phase: Phase) -> None:
        held[str(phase)] = [bucket.name for bucket in sync.buckets if bucket.flat.untyped_storage().nbytes()]

    for number in range(2):
        assembly.step(assembly.micro_batches(number), note)
    return {**held, "all": [bucket.name for bucket in sync.buckets]}


def test_a_bucket_has_memory_only_until_its_update():
    config = SyncConfig(name="bucketed", bucket_mib=0.005)
    for held in run_ranks(2, buckets_held, config, run(update="in_backward")):
        assert len(held["all"]) > 4
        assert held["start"] == held["forward"] == held["optimizer"] == []
        assert held["backward"] == held["grad_sync"] == held["all"][-1:]


# On GPUs. Attention's backward adds in any order there, so plain runs differ too.

GPU_SHAPE = {"layers": 8, "d_model": 512, "d_ff": 1344, "heads": 8, "vocab_size": 1000, "context": 32, "batch_size": 1}
"""Few tokens, so that gradients take more memory than activations."""


def losses_and_peak(config: RunConfig, ranks: tuple[Ranks, SyncConfig] | None = None) -> tuple[list[float], int]:
    """Losses of twelve steps, and the most bytes that were allocated in the last of them."""
    assembly = build_step(config, parallel(*ranks) if ranks else None)
    losses = []
    for step in range(12):
        torch.cuda.reset_peak_memory_stats()
        losses.append(assembly.take(assembly.micro_batches(step)).item())
    return losses, torch.cuda.max_memory_allocated()


def assert_as_close_as_plain_runs(updated: list[float], plain: list[float], again: list[float]) -> None:
    spread = max(abs(one - other) for one, other in zip(plain, again, strict=True))
    assert max(abs(one - other) for one, other in zip(updated, plain, strict=True)) <= 4 * spread


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("ops", ["plain", "fused"])
def test_on_a_gpu_the_losses_are_the_same_and_the_peak_lower(precision: str, ops: str):
    """The peak has one block's gradients where it had those of eight."""
    config = build_run({**GPU_SHAPE, "device": "cuda", "adamw": "trainstep", "precision": precision, "ops": ops})
    (plain, peak), (again, _) = losses_and_peak(config), losses_and_peak(config)
    updated, lower_peak = losses_and_peak(replace(config, update="in_backward"))
    assert_as_close_as_plain_runs(updated, plain, again)
    gradients_bytes = (2 if precision == "bf16_master" else 4) * config.model.parameters  # type: ignore[union-attr]
    assert peak - lower_peak > gradients_bytes / 2


ON_GPUS: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward": ("in_backward", {}),
    "by bucket": ("by_bucket", {}),
    "by bucket, in place": ("by_bucket", {"in_place": True}),
    "by bucket, in place, by copies": ("by_bucket", {"in_place": True, "transport": "copies", "inbox_mib": 32}),
}
"""Name -> update, and options of the strategy."""


def on_gpus(ranks: Ranks, config: RunConfig, options: dict[str, Any]) -> tuple[list[float], int]:
    return losses_and_peak(config, (ranks, SyncConfig(name="bucketed", bucket_mib=8.0, **options)))


@pytest.mark.multigpu
@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_on_gpus_buckets_are_updated_behind_their_messages(precision: str, capture: str):
    values = {**GPU_SHAPE, "device": "cuda", "adamw": "trainstep", "precision": precision, "capture": capture}
    config = build_config("parallel", {**values, "ranks": 2, "sync": "bucketed"}).run
    (plain, peak), (again, _) = (run_ranks(2, on_gpus, config, {}, backend="nccl")[0] for _ in range(2))
    for update, options in ON_GPUS.values():
        updating = replace(config, update=update)
        updated, its_peak = run_ranks(2, on_gpus, updating, options, backend="nccl")[0]
        assert_as_close_as_plain_runs(updated, plain, again)
        if capture == "none" and update == "in_backward":
            assert its_peak < peak
