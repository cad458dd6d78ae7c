"""FSDP: memory, gathers and their order, dtypes, compiled and checkpointed blocks, and states that other ranks load."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.fsdp_unit import UnitState
from trainstep.parallel.ranks import Ranks, alone

BLOCKS, WIDTH = 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return (x.float() * self.scale).square().mean()


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def data(rank: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5 + rank))


def test_units_are_the_blocks_and_the_rest_of_the_module():
    assert [unit.name for unit in FSDP(stack(), alone()).units] == ["root", *(f"blocks.{i}" for i in range(BLOCKS))]


def storage_bytes(ranks: Ranks) -> list[int]:
    """Bytes of parameters between steps, most whole units during a step, whole units after it, and bytes of gradients."""
    model = stack()
    sync = FSDP(model, ranks)
    sizes = [sum(parameter.nbytes for parameter in model.parameters())]
    whole_units = []

    def count_whole_units(*_: object) -> None:
        whole_units.append(sum(unit.state is not UnitState.SHARDED for unit in sync.units))

    for block in model.blocks:
        block.down.register_forward_hook(count_whole_units)
        block.up.register_full_backward_hook(count_whole_units)
    model(data()).backward()
    sync.finish_gradient_synchronization()
    sizes.append(max(whole_units))
    sizes.append(sum(unit.state is not UnitState.SHARDED for unit in sync.units))
    sizes.append(sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None))
    return sizes


def test_a_rank_holds_its_part_and_the_whole_of_a_few_units():
    parameters = sum(parameter.nbytes for parameter in stack().parameters())
    every_rank = run_ranks(2, storage_bytes)
    assert sum(own_bytes for own_bytes, *_ in every_rank) == parameters
    assert sum(gradients for *_, gradients in every_rank) == parameters
    for own_bytes, most_whole, left_whole, _ in every_rank:
        assert abs(own_bytes - parameters / 2) <= 8 * 4 * (BLOCKS + 1)
        assert most_whole <= 3  # the rest of the module, the block that runs, and the next one
        assert left_whole == 0


def most_whole_with_frozen_weights(ranks: Ranks) -> int:
    """The most units that are whole at a time in a backward pass, where each block has two units."""
    model = stack()
    for block in model.blocks:
        block.up.requires_grad_(False)
    sync = FSDP(model, ranks)
    whole_units = []
    for block in model.blocks:
        block.down.register_full_backward_hook(
            lambda *_: whole_units.append(sum(unit.state is not UnitState.SHARDED for unit in sync.units))
        )
    model(data()).backward()
    sync.finish_gradient_synchronization()
    return max(whole_units)


def test_frozen_weights_are_freed_as_backward_passes_them():
    assert max(run_ranks(2, most_whole_with_frozen_weights)) <= 5  # the rest of the module, and two blocks


def log_of_gathers(sync: FSDP) -> list[str]:
    """A list to which the name of each gathered unit is added."""
    log: list[str] = []
    gather = sync.collectives.all_gather

    def logged(tensor: Tensor, shard: Tensor, *, label: str = "") -> object:
        log.append(label.removeprefix("blocks."))
        return gather(tensor, shard, label=label)

    sync.collectives.all_gather = logged
    return log


def gathers(ranks: Ranks, ahead: int, reshard_after_forward: bool) -> list[str]:
    model = stack()
    sync = FSDP(model, ranks, ahead=ahead, reshard_after_forward=reshard_after_forward)
    log = log_of_gathers(sync)
    for number, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, number=number: log.append(f"forward {number}"))
        block.up.register_full_backward_hook(lambda *_, number=number: log.append(f"backward {number}"))
    model(data()).backward()
    sync.finish_gradient_synchronization()
    return log


def test_each_unit_is_gathered_one_ahead_and_again_for_backward():
    forward = ["root", "0", "1", "forward 0", "2", "forward 1", "3", "forward 2", "forward 3"]
    backward = ["2", "backward 3", "1", "backward 2", "0", "backward 1", "backward 0"]
    assert run_ranks(2, gathers, 1, True) == [forward + backward] * 2


def test_units_may_be_gathered_two_ahead():
    log = run_ranks(2, gathers, 2, True)[0]
    assert log[: log.index("forward 0")] == ["root", "0", "1", "2"]


def test_a_unit_kept_after_forward_is_gathered_once():
    log = run_ranks(2, gathers, 0, False)[0]
    assert sorted(line for line in log if " " not in line) == ["0", "1", "2", "3", "root"]


class Backwards(Stack):
    """A stack that runs its blocks from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return self.stem(x).square().mean()


def gathers_of_two_steps(ranks: Ranks) -> list[list[str]]:
    model = Backwards()
    sync = FSDP(model, ranks)
    log = log_of_gathers(sync)
    logs = []
    for _ in range(2):
        model(data()).backward()
        sync.finish_gradient_synchronization()
        logs.append(list(log))
        log.clear()
    return logs


def test_units_are_gathered_ahead_in_the_order_of_the_last_forward():
    first, second = run_ranks(2, gathers_of_two_steps)[0]
    assert first[:3] == ["root", "0", "3"]  # in the module's order, so the first block is gathered too early
    assert second == ["root", "3", "2", "1", "0", "1", "2", "3"]


def sources_of_gathers(ranks: Ranks, dtype: torch.dtype | None) -> list[str]:
    """For each gather, whether it sends the unit's shard, or a part that already is at its place in the whole."""
    model = stack()
    sync = FSDP(model, ranks, compute_dtype=dtype)
    shards = {unit.shard.data_ptr() for unit in sync.units}
    gather = sync.collectives.all_gather
    sources = []

    def logged(tensor: Tensor, shard: Tensor, *, label: str = "") -> object:
        own_place = tensor[ranks.rank * shard.numel() :]
        sources.append(
            "shard" if shard.data_ptr() in shards else "whole" if shard.data_ptr() == own_place.data_ptr() else ""
        )
        return gather(tensor, shard, label=label)

    sync.collectives.all_gather = logged
    model(data().to(dtype)).backward()
    sync.finish_gradient_synchronization()
    return sources


@pytest.mark.parametrize(("dtype", "source"), [(None, "shard"), (torch.bfloat16, "whole")])
def test_a_shard_is_copied_before_it_is_sent_only_to_cast_it(dtype: torch.dtype | None, source: str):
    for sources in run_ranks(2, sources_of_gathers, dtype):
        assert sources == [source] * (2 * BLOCKS)  # in backward the root and the last block are still whole


def loss_after_a_broken_pass(ranks: Ranks) -> float:
    """The loss of a pass whose weights changed while their unit was being gathered, for a forward that failed in block 1."""
    model = stack()
    sync = FSDP(model, ranks)
    broken = model.blocks[1].down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(data())
    broken.remove()
    assert sync.units[3].state is UnitState.GATHERING
    with torch.no_grad():
        for parameter in model.blocks[2].parameters():
            parameter.mul_(2)
    return model(data()).item()


def test_a_unit_being_gathered_for_a_failed_pass_is_gathered_again():
    expected = stack()
    with torch.no_grad():
        for parameter in expected.blocks[2].parameters():
            parameter.mul_(2)
    assert run_ranks(2, loss_after_a_broken_pass) == [expected(data()).item()] * 2


def checkpointed_under_no_sync(ranks: Ranks) -> list[str]:
    model = stack()
    sync = FSDP(model, ranks)
    for block in model.blocks:  # around the hooks: they run again when the block is recomputed
        block.__class__ = CheckpointedBlock
    log = log_of_gathers(sync)
    with sync.no_sync():
        model(data()).backward()
    return log


class CheckpointedBlock(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(super().__call__, x, use_reentrant=False)


def test_recomputing_under_no_sync_gathers_nothing_more():
    expected = ["root", "0", "1", "2", "3", "2", "1", "0"]
    assert run_ranks(2, checkpointed_under_no_sync) == [expected] * 2


class Uneven(Block):
    """A block whose `down` only rank 0 uses."""

    rank = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.rank == 0 else x + self.up(x)[:, :WIDTH]


def uneven_gradients(ranks: Ranks, forwards: int) -> list[list[float]]:
    model = stack()
    for block in model.blocks:
        block.__class__, block.rank = Uneven, ranks.rank
    sync = FSDP(model, ranks)
    losses = [model(data(number)) for number in range(forwards)]
    for loss in losses[:-1]:
        with sync.no_sync():
            loss.backward()
    losses[-1].backward()
    sync.finish_gradient_synchronization()
    return [[] if p.grad is None else p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("forwards", [1, 2])
def test_ranks_with_different_gradients_send_the_same_messages(forwards: int):
    pieces = run_ranks(2, uneven_gradients, forwards)
    sums: dict[int, Tensor] = {}
    for rank in range(2):
        model = stack()
        for block in model.blocks:
            block.__class__, block.rank = Uneven, rank
        sum(model(data(number)) for number in range(forwards)).backward()
        for index, p in enumerate(model.parameters()):
            if p.grad is not None:
                sums[index] = sums.get(index, torch.zeros_like(p)) + p.grad / 2
    for index, expected in sums.items():
        gradient = torch.tensor([*pieces[0][index], *pieces[1][index]])
        assert torch.allclose(gradient, expected.flatten(), rtol=1e-5, atol=1e-6)


def trained(ranks: Ranks, how: str, dtype: str = "none") -> list[Tensor]:
    model = stack()
    if how == "compiled":
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    if how == "checkpointed":
        for block in model.blocks:
            block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    compute_dtype = torch.bfloat16 if dtype == "bf16" else None
    sync = FSDP(model, ranks, compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(data(2 * step + ranks.rank).to(compute_dtype)).backward()
        sync.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(data().to(compute_dtype))  # an evaluation between steps
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return [value for name, value in sync.full_state_dict().items() if name != "scale"]


def alone_trained(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model = stack().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        (sum(model(data(2 * step + rank).to(dtype)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["plain", "compiled", "checkpointed"])
def test_blocks_may_be_compiled_or_checkpointed(how: str):
    expected = alone_trained()
    for parameters in run_ranks(2, trained, how):
        for parameter, single in zip(parameters, expected, strict=True):
            assert torch.allclose(parameter, single, rtol=1e-5, atol=1e-6)


def test_computing_in_bf16_keeps_an_fp32_master():
    exact = alone_trained(torch.float64)
    parameters = run_ranks(2, trained, "plain", "bf16")[0]
    assert any((value.bfloat16().float() != value).any() for value in parameters)
    for parameter, single in zip(parameters, exact, strict=True):
        assert torch.allclose(parameter.double(), single, rtol=0.05, atol=0.01)


def full_states(ranks: Ranks) -> tuple[list[str], list[bool], list[bool]]:
    expected = stack().state_dict()
    model = stack()
    sync = FSDP(model, ranks)
    state = sync.full_state_dict()
    with pytest.raises(ValueError, match=r"state_dict: this rank has pieces.*full_state_dict"):
        model.state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict: this rank has pieces.*load_full_state_dict"):
        model.load_state_dict(expected)
    sync.load_full_state_dict({name: value + 1 for name, value in state.items()})
    moved = sync.full_state_dict(on_rank_0_only=True)
    equal = [torch.equal(state[name], expected[name]) for name in expected]
    return list(state), equal, [torch.equal(moved[name], expected[name] + 1) for name in moved]


def test_the_full_state_dict_is_the_modules():
    (names, equal, moved), (_, _, of_rank_1) = run_ranks(2, full_states)
    assert names == list(stack().state_dict())
    assert all(equal)
    assert all(moved)
    assert len(moved) == len(names)
    assert of_rank_1 == []


def test_a_state_dict_of_another_module_is_refused_by_name():
    sync = FSDP(stack(), alone())
    state = sync.full_state_dict()
    with pytest.raises(ValueError, match=r"state: blocks\.0\.up\.bias is only in the module"):
        sync.load_full_state_dict({name: value for name, value in state.items() if name != "blocks.0.up.bias"})
    with pytest.raises(ValueError, match=r"state: stem\.bias has shape \(3,\), but in the module \(16,\)"):
        sync.load_full_state_dict({**state, "stem.bias": torch.zeros(3)})


def detached(ranks: Ranks) -> list[bool]:
    model = stack()
    FSDP(model, ranks).detach()
    model(data()).backward()
    pairs = zip(model.parameters(), stack().parameters(), strict=True)
    return [torch.equal(parameter, original) and parameter.grad is not None for parameter, original in pairs]


def test_a_detached_module_is_as_before_wrapping():
    assert all(equal for every_parameter in run_ranks(2, detached) for equal in every_parameter)


class Tied(Stack):
    """A stack that uses a block's weight outside the block."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(x).expand(2 * WIDTH), self.blocks[0].down.weight).sum()


def used_elsewhere(ranks: Ranks) -> tuple[str, list[str]]:
    """The note on an error from a parameter used outside its block, and the notes on an error that has another cause."""
    torch.manual_seed(0)
    model = Tied()
    FSDP(model, ranks, ahead=0)
    with pytest.raises(RuntimeError) as caught:
        model(data())
    [note] = caught.value.__notes__
    broken = stack()
    FSDP(broken, ranks)
    with pytest.raises(RuntimeError) as unrelated:
        broken(Closed())
    return note, getattr(unrelated.value, "__notes__", [])


class Closed(Tensor):
    """A tensor whose data cannot be read."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Tensor:
        raise RuntimeError("the reader is closed")


def test_a_parameter_used_outside_its_block_is_named():
    for note, other_notes in run_ranks(2, used_elsewhere):
        assert "one-dimensional. If this was " in note
        assert "blocks.0.down.weight (" in note
        assert other_notes == []


def cast_afterwards(ranks: Ranks) -> list[str]:
    sentences = []
    for change in (nn.Module.bfloat16, nn.Module.double, lambda model: model._apply(torch.clone)):
        model = stack()
        FSDP(model, ranks)
        change(model)
        with pytest.raises(ValueError, match="compute_dtype") as caught:
            model(data())
        sentences.append(str(caught.value))
    return sentences


def block_alone(ranks: Ranks) -> tuple[Tensor, bool]:
    """The gradient of a whole weight, of a block that runs by its `forward` alone, and whether all units are sharded after that."""
    sync = FSDP(stack(), ranks)
    block, sent = sync.module.blocks[1], sync.traffic.messages["reduce_scatter"]
    with sync.gathered(block):
        (gradient,) = torch.autograd.grad(block.forward(data()).sum(), [block.up.weight])
    sharded = all(unit.state is UnitState.SHARDED for unit in sync.units)
    return gradient, sharded and sync.traffic.messages["reduce_scatter"] == sent


def test_a_block_is_whole_for_a_run_of_its_own():
    block = stack().blocks[1]
    (expected,) = torch.autograd.grad(block(data()).sum(), [block.up.weight])
    for gradient, nothing_left in run_ranks(2, block_alone):
        assert nothing_left
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_casting_after_wrapping_is_refused_by_name():
    for sentences in run_ranks(2, cast_afterwards):
        assert all(sentence.startswith("stem.weight: is no longer the piece") for sentence in sentences)


def test_ahead_is_at_most_two():
    with pytest.raises(ValueError, match="ahead: must be 0, 1 or 2, not 3"):
        FSDP(stack(), alone(), ahead=3)


def test_a_unit_that_is_not_part_of_the_module_is_refused():
    with pytest.raises(ValueError, match="units: a Linear is not part of the module"):
        FSDP(stack(), alone(), units=[nn.Linear(1, 1)])


def tied_across_blocks(ranks: Ranks, ahead: int) -> Tensor:
    """The sum of gradients of blocks with frozen weights, two of which share a trained one; rank 1 uses it only in the later."""
    torch.manual_seed(0)
    stack = Stack()
    first, second = stack.blocks[0], stack.blocks[1]
    second.up = first.up
    for block in stack.blocks:
        block.down.requires_grad_(False)
    if ranks.rank == 1:
        first.forward = lambda x: x + first.down(torch.cat([x, x], -1))
    sync = FSDP(stack, ranks, ahead=ahead)
    stack(torch.ones(2, WIDTH)).square().mean().backward()
    sync.finish_gradient_synchronization()
    return torch.stack([parameter.grad.sum() for parameter in stack.parameters() if parameter.grad is not None]).sum()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_weight_of_two_blocks_that_one_rank_uses_once_gets_its_gradient(ahead: int):
    """One rank's last gradient comes a block earlier than the other's; if it were sent then, messages would not match."""
    sums = run_ranks(2, tied_across_blocks, ahead)
    assert all(torch.isfinite(total) for total in sums)


def called_twice(ranks: Ranks, compute_dtype: str, reshard_after_forward: bool) -> list[Tensor]:
    """Two forwards before one backward: autograd reaches each parameter twice if the compute dtype differs."""
    model = stack()
    sync = FSDP(model, ranks, compute_dtype=getattr(torch, compute_dtype), reshard_after_forward=reshard_after_forward)
    x = data(ranks.rank).to(getattr(torch, compute_dtype))
    (model(x) + model(2 * x)).backward()
    sync.finish_gradient_synchronization()
    return [torch.cat([p.grad for p in model.parameters() if p.grad is not None])]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_model_called_twice_before_its_backward_has_both_gradients(reshard_after_forward: bool):
    exact, rounded = (
        torch.cat([part for [part] in run_ranks(2, called_twice, dtype, reshard_after_forward)])
        for dtype in ("float32", "bfloat16")
    )
    assert (rounded - exact).abs().max() <= 0.05 * exact.abs().max()


def whole_after_backward(ranks: Ranks, together: int) -> list[str]:
    """Names of units that a backward under no_sync leaves whole, with `together` blocks in a checkpoint."""
    model = stack()
    sync = FSDP(model, ranks)

    def blocks(first: int, x: Tensor) -> Tensor:
        for block in model.blocks[first : first + together]:
            x = block(x)
        return x

    model.forward = lambda x: (
        sum(  # type: ignore[method-assign]
            checkpoint(blocks, first, x, use_reentrant=False) for first in range(0, BLOCKS, together)
        )
        .square()
        .mean()
    )
    with sync.no_sync():
        model(data()).backward()
    return [unit.name for unit in sync.units if unit.state is not UnitState.SHARDED]


@pytest.mark.parametrize("together", [1, 2, 4])
def test_checkpoints_over_several_blocks_leave_only_the_last_units_whole(together: int):
    for names in run_ranks(2, whole_after_backward, together):
        assert set(names) <= {"root", "blocks.0"}


def loss_after_a_shorter_evaluation(ranks: Ranks) -> float:
    """The loss of the second step. An evaluation before the update gathers fewer blocks, and what it keeps is stale afterwards."""
    model = stack()
    sync = FSDP(model, ranks, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        loss = model(data())
        loss.backward()
        sync.finish_gradient_synchronization()
        if step == 0:
            forward = model.forward
            model.forward = lambda x: model.blocks[0](model.stem(x)).square().mean()  # type: ignore[method-assign]
            with torch.no_grad():
                model(data())
            model.forward = forward  # type: ignore[method-assign]
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_an_evaluation_of_fewer_blocks_before_the_update_leaves_nothing_stale():
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(data())
        loss.backward()
        optimizer.step()
    for sharded_loss in run_ranks(2, loss_after_a_shorter_evaluation):
        assert sharded_loss == pytest.approx(loss.item(), rel=1e-5)
