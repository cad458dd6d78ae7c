"""Flat shards: parts of state on each rank, state that other ranks load, groups, and gathers that the next forward waits for."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallel_training import Case, batches, built, loss_of
from ranks import run_ranks
from trainstep.costs.exchange import flat_units_of
from trainstep.ops.adamw import AdamW
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.ranks import Ranks, alone
from trainstep.parallel.units import parameter_sizes

CASE = Case()


def started(ranks: Ranks, **options: object) -> tuple[nn.Module, FlatShardedOptimizer]:
    model = built(CASE)
    units = [model.first, model.second]
    return model, FlatShardedOptimizer(model, torch.optim.AdamW, ranks=ranks, units=units, lr=1e-2, **options)


def train(model: nn.Module, optimizer: FlatShardedOptimizer, first: int, end: int, world_size: int = 6) -> None:
    """Train on data that does not depend on the number of ranks: each rank takes an equal part of six."""
    ranks = optimizer.gradient_sync.ranks
    share = world_size // ranks.world_size
    for step, rows in enumerate(batches(CASE, world_size)):
        if first <= step < end:
            own_rows = rows[ranks.rank * share : (ranks.rank + 1) * share]
            torch.stack([loss_of(model, row[0], CASE, 0) for row in own_rows]).mean().backward()
            optimizer.gradient_sync.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.gradient_sync.wait_for_parameters()


def state_bytes(ranks: Ranks) -> tuple[int, int]:
    model, optimizer = started(ranks)
    train(model, optimizer, 0, 1)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return sum(value.nbytes for value in moments), sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_state_equally(world_size: int):
    every_rank = run_ranks(world_size, state_bytes)
    parameters = every_rank[0][1]
    assert sum(state for state, _ in every_rank) == 2 * parameters
    filling = world_size * 8 * 4 * 3 * 2  # three units end at a multiple of 8 elements a rank; two moments
    assert all(abs(state - 2 * parameters / world_size) <= filling for state, _ in every_rank)


def saved(ranks: Ranks) -> dict[str, object]:
    model, optimizer = started(ranks)
    train(model, optimizer, 0, 2)
    return {"optimizer": optimizer.gathered_state_dict(), "model": model.state_dict()}


def resumed(ranks: Ranks, state: dict[str, object] | None) -> list[Tensor]:
    model, optimizer = started(ranks)
    if state is None:
        train(model, optimizer, 0, 2)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 2, 4)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("loading", [1, 2, 3])
def test_gathered_state_resumes_on_another_number_of_ranks(loading: int):
    state = run_ranks(2, saved)[0]
    uninterrupted = run_ranks(loading, resumed, None)[0]
    resumed_parameters = run_ranks(loading, resumed, state)[0]
    for expected, parameter in zip(uninterrupted, resumed_parameters, strict=True):
        assert torch.allclose(expected, parameter, rtol=1e-4, atol=1e-6)
    if loading == 2:
        assert all(
            torch.equal(expected, parameter)
            for expected, parameter in zip(uninterrupted, resumed_parameters, strict=True)
        )


def test_gathered_state_is_that_of_the_unsharded_optimizer():
    state = run_ranks(2, saved)[0]
    model = built(CASE)
    model.load_state_dict(state["model"])
    unsharded = torch.optim.AdamW(model.parameters(), lr=1e-2)
    unsharded.load_state_dict(state["optimizer"])
    moments = [unsharded.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert [moment.shape for moment in moments] == [parameter.shape for parameter in model.parameters()]
    assert all(float(unsharded.state[parameter]["step"]) == 2 for parameter in model.parameters())
    assert all(float(moment.abs().sum()) > 0 for moment in moments)


def own_shard(ranks: Ranks) -> list[bool]:
    model, optimizer = started(ranks)
    train(model, optimizer, 0, 2)
    state, parameters = deepcopy((optimizer.state_dict(), dict(model.state_dict())))
    train(model, optimizer, 2, 4)
    resumed_model, resumed_optimizer = started(ranks)
    resumed_model.load_state_dict(parameters)
    resumed_optimizer.load_state_dict(state)
    train(resumed_model, resumed_optimizer, 2, 4)
    pairs = zip(model.parameters(), resumed_model.parameters(), strict=True)
    return [torch.equal(expected, parameter) for expected, parameter in pairs]


def test_a_ranks_own_shard_resumes():
    assert all(equal for every_parameter in run_ranks(2, own_shard) for equal in every_parameter)


def test_a_shard_of_another_rank_is_refused():
    _, optimizer = started(alone())
    state = {**optimizer.state_dict(), "shard": {"rank": 1, "world_size": 2}}
    with pytest.raises(ValueError, match=r"shard of rank 1 of 2, and this is rank 0 of 1; save gathered_state_dict"):
        optimizer.load_state_dict(state)


def shard_of_other_units(ranks: Ranks, saved_mib: float, loaded_mib: float | None) -> list[str]:
    """Sentences on loading a shard cut by other units, with pieces as many and as large, and one that does not name its units."""
    sentences = []
    states = []
    for mib in (saved_mib, loaded_mib):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        optimizer = FlatShardedOptimizer(model, torch.optim.AdamW, ranks=ranks, bucket_mib=mib, lr=1e-2)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.gradient_sync.finish_gradient_synchronization()
        optimizer.step()
        states.append((optimizer, optimizer.state_dict()))
    (_, saved), (optimizer, own) = states
    shapes = [
        [value.shape for entry in optimizer_state["state"].values() for value in entry.values()]
        for optimizer_state in (saved, own)
    ]
    assert shapes[0] == shapes[1]
    without_cuts = {**own, "shard": {"rank": ranks.rank, "world_size": ranks.world_size}}
    for state in (saved, without_cuts):
        with pytest.raises(
            ValueError, match="state_dict: its shards were cut at other elements, by another bucket_mib"
        ) as error:
            optimizer.load_state_dict(state)
        sentences.append(str(error.value))
    optimizer.load_state_dict(own)
    return sentences


def test_a_shard_that_was_cut_elsewhere_is_refused():
    """With units of two or of four blocks, each rank has every other block whole, or every other pair of blocks."""
    block = 288 / 2**20
    for sentences in run_ranks(2, shard_of_other_units, 2 * block, 4 * block):
        assert len(sentences) == 2


def test_optimizers_that_read_whole_tensors_are_refused_by_name():
    class Muon(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="optimizer_cls: Muon is not known to treat each element alone"):
        FlatShardedOptimizer(built(CASE), Muon, ranks=alone(), lr=0.1)
    FlatShardedOptimizer(built(CASE), Muon, ranks=alone(), element_wise=True, lr=0.1)


def test_groups_have_their_own_options_and_schedulers_change_them():
    model = built(CASE)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = FlatShardedOptimizer(model, torch.optim.AdamW, ranks=alone(), groups=groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, 0, 1, world_size=1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    scheduler.step()
    after = [parameter.detach().clone() for parameter in model.parameters()]
    assert not all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
    train(model, optimizer, 1, 2, world_size=1)
    assert all(torch.equal(first, second) for first, second in zip(after, model.parameters(), strict=True))


def test_groups_cover_every_trained_parameter_once():
    model = built(CASE)
    first, *rest = model.parameters()
    with pytest.raises(ValueError, match=r"groups: leave out embedding\.weight"):
        FlatShardedOptimizer(model, torch.optim.SGD, ranks=alone(), groups=[{"params": rest}], lr=0.1)
    twice = [{"params": [first, *rest]}, {"params": [first]}]
    with pytest.raises(ValueError, match="groups: name a parameter twice"):
        FlatShardedOptimizer(model, torch.optim.SGD, ranks=alone(), groups=twice, lr=0.1)


def unfrozen_later(ranks: Ranks) -> tuple[list[bool], list[Tensor], dict[str, object]]:
    """Two steps with a layer frozen, two with it trained, sharded and then unsharded in one process; whether both agree."""
    results = []
    for sharded in (True, False):
        model = built(CASE)
        model.second.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ranks_of_run = ranks if sharded else alone()
        optimizer = FlatShardedOptimizer(model, torch.optim.AdamW, ranks=ranks_of_run, lr=1e-2) if sharded else None
        unsharded = torch.optim.AdamW(trained, lr=1e-2)
        for step, rows in enumerate(batches(CASE, 2)):
            if step == 2:
                model.second.requires_grad_(True)
                (optimizer or unsharded).add_param_group({"params": model.second.parameters(), "lr": 3e-2})
            if optimizer:
                loss_of(model, rows[ranks.rank][0], CASE, 0).backward()
                optimizer.gradient_sync.finish_gradient_synchronization()
            else:
                (sum(loss_of(model, row[0], CASE, 0) for row in rows) / 2).backward()
            (optimizer or unsharded).step()
            (optimizer or unsharded).zero_grad()
        if optimizer:
            optimizer.gradient_sync.wait_for_parameters()
            state = optimizer.gathered_state_dict()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    close = [
        torch.allclose(sharded_parameter, parameter, rtol=1e-5, atol=1e-6)
        for sharded_parameter, parameter in zip(*results, strict=True)
    ]
    return close, results[0], state


def test_a_group_of_unfrozen_parameters_can_be_added():
    for close, parameters, state in run_ranks(2, unfrozen_later):
        assert all(close)
        assert len(state["state"]) == len(parameters)
        assert [group["lr"] for group in state["param_groups"]] == [1e-2, 3e-2]


def test_a_known_or_foreign_parameter_cannot_be_added():
    model, optimizer = started(alone())
    with pytest.raises(
        ValueError, match=r"first\.weight: must be a parameter of the wrapped module, trained, and not known"
    ):
        optimizer.add_param_group({"params": [model.first.weight]})
    with pytest.raises(ValueError, match="a parameter: must be a parameter of the wrapped module"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(1))})


def load_while_gathering(ranks: Ranks) -> list[bool]:
    """Load right after an update, while shards are still being gathered; whether all values are the loaded ones."""
    model, optimizer = started(ranks)
    loss_of(model, next(batches(CASE, 2))[0][0], CASE, 0).backward()
    optimizer.gradient_sync.finish_gradient_synchronization()
    optimizer.step()
    state = {name: torch.ones_like(value) for name, value in built(CASE).state_dict().items()}
    model.load_state_dict(state)
    return [bool((value == 1).all()) for value in model.state_dict().values()]


def test_loading_waits_for_the_update():
    assert all(is_loaded for every_value in run_ranks(2, load_while_gathering) for is_loaded in every_value)


def order_of_waits(ranks: Ranks) -> list[str]:
    """The units whose gathers are waited for, and the modules that run, in the step after an update."""
    model, optimizer = started(ranks)
    train(model, optimizer, 0, 1)
    sync, log = optimizer.gradient_sync, []
    gather = sync.collectives.all_gather

    def logged(tensor: Tensor, shard: Tensor, *, label: str = "") -> object:
        pending = gather(tensor, shard, label=label)

        class Logged:
            def wait(self) -> None:
                log.append(f"wait {label}")
                pending.wait()

        log.append(f"start {label}")
        return Logged()

    sync.collectives.all_gather = logged
    for name, module in (("first", model.first), ("second", model.second)):
        module.register_forward_hook(lambda *_, name=name: log.append(f"ran {name}"))
    rows = next(iter(batches(CASE, 2)))
    loss_of(model, rows[0][0], CASE, 0).backward()
    sync.finish_gradient_synchronization()
    optimizer.step()
    log.append("update over")
    loss_of(model, rows[0][0], CASE, 0)
    return log


def test_the_next_forward_waits_for_each_unit_where_it_needs_it():
    for log in run_ranks(2, order_of_waits):
        gathers = log[log.index("start root") :]
        assert gathers == [
            *("start root", "start first", "start second", "update over"),
            *("wait root", "wait first", "ran first", "wait second", "ran second"),
        ]


class CountsForAGroup(torch.optim.SGD):
    """An unknown optimizer that counts its steps in its groups."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        super().step(closure)


class AdamWThatCounts(AdamW):
    """trainstep's AdamW counts steps tensor by tensor; this subclass also counts them in its groups."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        super().step(closure)


def sgd_with_a_hook(*arguments: object, **options: object) -> torch.optim.Optimizer:
    """SGD with a hook that counts its steps in its groups."""
    optimizer = torch.optim.SGD(*arguments, **options)

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["calls"] = group.get("calls", 0) + 1

    optimizer.register_step_post_hook(count)
    return optimizer


def order_of_updates(ranks: Ranks, optimizer_cls: type[torch.optim.Optimizer]) -> tuple[list[str], list[object]]:
    """The units updated before each gather in a step, whether groups stay the same, and their counts of steps."""
    model = built(CASE)
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [
        {"params": [parameter for parameter in names if parameter.dim() > 1]},
        {"params": [parameter for parameter in names if parameter.dim() == 1], "lr": 0.5},
    ]
    optimizer = FlatShardedOptimizer(
        model, optimizer_cls, ranks=ranks, groups=groups, units=[model.first, model.second], element_wise=True, lr=1e-2
    )
    sync, log = optimizer.gradient_sync, []
    gather = sync.collectives.all_gather

    def logged(tensor: Tensor, shard: Tensor, *, label: str = "") -> object:
        changed = [
            name for name, piece in zip(sync.names, sync.pieces, strict=True) if piece is not None and moved(piece)
        ]
        log.append(f"{label} behind {', '.join(sorted({name.split('.')[0] for name in changed}))}")
        return gather(tensor, shard, label=label)

    loss_of(model, next(iter(batches(CASE, 2)))[ranks.rank][0], CASE, 0).backward()
    sync.finish_gradient_synchronization()
    before = {piece: piece.detach().clone() for piece in sync.pieces if piece is not None}

    def moved(piece: Tensor) -> bool:
        return not torch.equal(piece, before[piece])

    sync.collectives.all_gather = logged
    groups_before = optimizer.param_groups
    optimizer.step()
    return log, [optimizer.param_groups is groups_before, [group.get("calls") for group in optimizer.param_groups]]


@pytest.mark.parametrize("optimizer_cls", [torch.optim.SGD, AdamW])
def test_a_unit_is_sent_before_the_next_is_updated(optimizer_cls: type[torch.optim.Optimizer]):
    for log, (same_groups, _) in run_ranks(2, order_of_updates, optimizer_cls):
        sent = [line.split(" behind ") for line in log]
        assert [label for label, _ in sent] == ["root", "first", "second"]
        updated = [set(names.split(", ")) for _, names in sent]
        assert "first" not in updated[0]
        assert "first" in updated[1]
        assert "second" not in updated[1]
        assert "second" in updated[2]
        assert same_groups


@pytest.mark.parametrize("optimizer_cls", [CountsForAGroup, AdamWThatCounts, sgd_with_a_hook])
def test_an_optimizer_that_counts_steps_makes_one_step(optimizer_cls: type[torch.optim.Optimizer]):
    for log, (_, calls) in run_ranks(2, order_of_updates, optimizer_cls):
        assert all("second" in line.split(" behind ")[1] for line in log)
        assert calls == [1, 1]


def hooks_of_all_optimizers(ranks: Ranks) -> list[float]:
    """Sums of a hook on every torch optimizer that all-reduces, where one rank has no piece of a unit."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(1, 1, bias=False))
    optimizer = FlatShardedOptimizer(model, torch.optim.AdamW, ranks=ranks, bucket_mib=1e-6)
    lacks_pieces = [not pieces for pieces in optimizer.gradient_sync.unit_pieces]
    sums = []

    def meet(*_: object) -> None:
        value = torch.ones(1)
        optimizer.gradient_sync.collectives.all_reduce(value).wait()
        sums.append(value.item())

    handle = register_optimizer_step_post_hook(meet)
    try:
        for parameter in model.parameters():
            parameter.sum().backward()
        optimizer.gradient_sync.finish_gradient_synchronization()
        optimizer.step()
    finally:
        handle.remove()
    assert any(lacks_pieces) == (ranks.rank == 1)
    return sums


def test_hooks_of_all_optimizers_run_as_often_on_every_rank():
    assert run_ranks(2, hooks_of_all_optimizers) == [[2.0, 2.0]] * 2  # of this optimizer, and of its inner optimizer


def step_after_an_error(ranks: Ranks) -> tuple[bool, list[Tensor]]:
    """Whether an optimizer has its groups as before when it refused a gradient, which is of another unit on each rank; then the
    parameters after steps without such a gradient."""
    model, optimizer = started(ranks)
    before = [list(group["params"]) for group in optimizer.param_groups]
    refused = optimizer.gradient_sync.unit_pieces[ranks.rank + 1][0]
    refused.grad = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), refused.shape)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    inner = optimizer._inner
    restored = (
        inner.param_groups is optimizer.param_groups and [group["params"] for group in inner.param_groups] == before
    )
    optimizer.zero_grad()
    train(model, optimizer, 0, 2)
    return restored, [parameter.detach().clone() for parameter in model.parameters()]


def test_an_error_in_a_step_restores_groups_and_ranks_stay_equal():
    (restored_on_0, first), (restored_on_1, second) = run_ranks(2, step_after_an_error)
    assert restored_on_0
    assert restored_on_1
    assert all(torch.equal(on_rank_0, on_rank_1) for on_rank_0, on_rank_1 in zip(first, second, strict=True))


def changed_groups(ranks: Ranks, change: str) -> tuple[list[bool], list[bool]]:
    """Whether each matrix and each bias moves in a step after groups were changed by hand. The learning rate of biases is 0."""
    model = built(CASE)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, biases = ([parameter for parameter in trained if (parameter.dim() > 1) == flag] for flag in (True, False))
    optimizer = FlatShardedOptimizer(
        model,
        torch.optim.SGD,
        ranks=ranks,
        groups=[{"params": matrices}, {"params": biases, "lr": 0.0}],
        units=[model.first, model.second],
        lr=0.1,
    )
    groups = optimizer.param_groups
    if change == "reverse":
        groups.reverse()
    elif change == "clear":
        groups[0]["params"].clear()
    elif change == "pop":
        groups.pop(1)
    elif change == "move":
        groups[1]["params"] += groups[0]["params"]
        groups[0]["params"] = []
    before = [parameter.detach().clone() for parameter in trained]
    loss_of(model, next(iter(batches(CASE, 2)))[ranks.rank][0], CASE, 0).backward()
    optimizer.gradient_sync.finish_gradient_synchronization()
    optimizer.step()
    optimizer.gradient_sync.wait_for_parameters()
    moved = [not torch.equal(parameter, old) for parameter, old in zip(trained, before, strict=True)]
    return tuple(
        [moves for moves, parameter in zip(moved, trained, strict=True) if (parameter.dim() > 1) == flag]
        for flag in (True, False)
    )


@pytest.mark.parametrize(("change", "move"), [("reverse", True), ("clear", False), ("pop", True), ("move", False)])
def test_groups_are_read_as_they_are_at_the_step(change: str, move: bool):
    for matrices, biases in run_ranks(2, changed_groups, change):
        assert all(moved == move for moved in matrices)
        assert not any(biases)


def update_in_a_closure(ranks: Ranks, in_a_closure: bool) -> tuple[list[float], float | None, list[Tensor]]:
    """Losses of the passes, what `step` returned, and the parameters after it."""
    model, optimizer = started(ranks)
    rows = next(iter(batches(CASE, 2)))
    losses: list[float] = []

    def passes() -> float:
        loss = loss_of(model, rows[ranks.rank][0], CASE, 0)
        loss.backward()
        optimizer.gradient_sync.finish_gradient_synchronization()
        losses.append(loss.item())
        return loss.item()

    if not in_a_closure:
        passes()
    returned = optimizer.step(passes if in_a_closure else None)
    return losses, returned, list(model.state_dict().values())


def test_a_closure_runs_once_before_the_first_unit():
    with_closure, without = (run_ranks(2, update_in_a_closure, flag) for flag in (True, False))
    for (losses, returned, parameters), (expected_losses, nothing, expected) in zip(with_closure, without, strict=True):
        assert (losses, returned, nothing) == (expected_losses, expected_losses[0], None)
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def detached_after_an_update(ranks: Ranks) -> list[Tensor]:
    model, optimizer = started(ranks)
    rows = next(iter(batches(CASE, 2)))
    loss_of(model, rows[ranks.rank][0], CASE, 0).backward()
    optimizer.gradient_sync.finish_gradient_synchronization()
    optimizer.step()
    optimizer.gradient_sync.detach()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_detach_waits_for_gathers():
    first, second = run_ranks(2, detached_after_an_update)
    assert all(torch.equal(on_rank_0, on_rank_1) for on_rank_0, on_rank_1 in zip(first, second, strict=True))


def gradients_changed_in_place(ranks: Ranks) -> tuple[list[bool], bool]:
    """Whether each piece's gradient is this rank's part of the average, before and after it is scaled and zeroed in place."""
    model, optimizer = started(ranks)
    sync = optimizer.gradient_sync
    agree = []
    for _ in range(2):
        replicated_model = deepcopy(model)
        for module in (model, replicated_model):
            loss_of(module, next(batches(CASE, 2))[0][0], CASE, 0).backward()
        sync.finish_gradient_synchronization()
        for index, (piece, parameter) in enumerate(zip(sync.pieces, replicated_model.parameters(), strict=True)):
            if piece is not None:
                agree.append(torch.allclose(piece.grad, sync.cut(index, parameter.grad), rtol=1e-5, atol=1e-7))
                piece.grad.mul_(2)
        optimizer.zero_grad(set_to_none=False)
    zeroed = all(piece is None or not piece.grad.any() for piece in sync.pieces)
    return agree, zeroed


def test_gradients_of_pieces_may_be_changed_in_place():
    for agree, zeroed in run_ranks(2, gradients_changed_in_place):
        assert agree
        assert all(agree)
        assert zeroed


def many_blocks(ranks: Ranks, most_bytes: int | None) -> tuple[dict[str, int], list[str], list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    unsharded_model = deepcopy(model)
    expected = [unit.name for unit in flat_units_of(parameter_sizes(model), ranks.world_size, most_bytes)]
    bucket_mib = None if most_bytes is None else max(most_bytes, 0.1) / 2**20
    optimizer = FlatShardedOptimizer(model, torch.optim.AdamW, ranks=ranks, bucket_mib=bucket_mib, lr=1e-2)
    optimizer.gradient_sync.traffic.clear()
    unsharded = torch.optim.AdamW(unsharded_model.parameters(), lr=1e-2)
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.gradient_sync.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        unsharded_model(inputs).square().mean().backward()
        unsharded.step()
        unsharded.zero_grad()
    optimizer.gradient_sync.wait_for_parameters()
    messages = dict(optimizer.gradient_sync.traffic.messages)
    return messages, expected, list(model.state_dict().values()), list(unsharded_model.state_dict().values())


@pytest.mark.parametrize(
    ("most_bytes", "together"),
    [(None, 10), (15 * 288, 15), (40 * 288, 40), (1, 1), (0, 1)],
    ids=["a quarter", "15", "all", "each", "less than a byte"],
)
def test_small_blocks_share_messages_with_their_neighbours(most_bytes: int | None, together: int):
    """40 equal blocks of 288 bytes, so few that a quarter of them shares a message by default."""
    for messages, expected, sharded, unsharded in run_ranks(2, many_blocks, most_bytes):
        units = -(-40 // together)
        assert expected[0] == ("0" if together == 1 else f"0 to {together - 1}")
        assert len(expected) == units
        assert messages["reduce_scatter"] == messages["all_gather"] == 3 * units
        for parameter, unsharded_parameter in zip(sharded, unsharded, strict=True):
            torch.testing.assert_close(parameter, unsharded_parameter, rtol=1e-6, atol=1e-7)


def refused_size(ranks: Ranks) -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="bucket_mib: must be positive, not 0") as refused:
        FlatShardedOptimizer(model, torch.optim.AdamW, ranks=ranks, bucket_mib=0)
    return str(refused.value)


def test_a_bucket_size_of_zero_is_refused():
    assert len(run_ranks(2, refused_size)) == 2
