"""Master weights are updated, parameters are their rounding, and both are saved and loaded exactly."""

import copy

import pytest
import torch
from torch import Tensor, nn

from trainstep.ops.adamw import AdamW
from trainstep.training.optimizer import MASTER, MasterWeights

SHAPES = ((5, 3), (7,), (2, 2, 2))
OPTIMIZERS = pytest.mark.parametrize("optimizer_cls", [AdamW, torch.optim.AdamW, torch.optim.SGD])


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator).to(torch.bfloat16).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(*shape, generator=generator).bfloat16() for shape in SHAPES]


def take(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for index, (parameter, gradient) in enumerate(zip(params, gradients(step), strict=True)):
            parameter.grad = None if index == step else gradient.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


@OPTIMIZERS
def test_masters_equal_fp32_parameters(optimizer_cls: type[torch.optim.Optimizer]):
    narrow, wide = parameters(), parameters(torch.float32)
    optimizer = MasterWeights(narrow, optimizer_cls, lr=1e-2)
    take(optimizer, narrow, range(5))
    take(optimizer_cls(wide, lr=1e-2), wide, range(5))
    for parameter, exact in zip(narrow, wide, strict=True):
        assert torch.equal(optimizer.state[parameter][MASTER], exact)
        assert torch.equal(parameter, exact.bfloat16())


def test_small_updates_add_up():
    """A hundred updates of 1/1000 of the weight, each of which bf16 would round away."""
    with_master, without = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(2))
    for parameter, optimizer in (
        (with_master, MasterWeights([with_master], torch.optim.SGD, lr=1e-3)),
        (without, torch.optim.SGD([without], lr=1e-3)),
    ):
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert without.item() == 1
    assert with_master.item() == pytest.approx(0.9, abs=2**-9)


@OPTIMIZERS
def test_saved_state_resumes_in_another_optimizer(optimizer_cls: type[torch.optim.Optimizer]):
    uninterrupted, saved_parameters, loaded_parameters = parameters(), parameters(), parameters()
    take(MasterWeights(uninterrupted, optimizer_cls, lr=1e-2), uninterrupted, range(6))
    before = MasterWeights(saved_parameters, optimizer_cls, lr=1e-2)
    take(before, saved_parameters, range(3))
    saved = copy.deepcopy(before.state_dict())
    after = MasterWeights(loaded_parameters, optimizer_cls, lr=0.5)
    after.load_state_dict(saved)
    assert all(torch.equal(*pair) for pair in zip(saved_parameters, loaded_parameters, strict=True))
    take(after, loaded_parameters, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(uninterrupted, loaded_parameters, strict=True))


def test_state_takes_twelve_bytes_per_parameter():
    params = parameters()
    optimizer = MasterWeights(params, AdamW)
    take(optimizer, params, range(len(SHAPES), len(SHAPES) + 1))
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert sum(value.nbytes for value in tensors) == 12 * sum(parameter.numel() for parameter in params)


def test_schedulers_and_groups_work():
    params = parameters()
    groups = [{"params": params[:1], "lr": 1.0}, {"params": params[1:2]}]
    optimizer = MasterWeights(groups, torch.optim.SGD, lr=2.0)
    optimizer.add_param_group({"params": params[2:], "lr": 4.0})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = [parameter.detach().float() for parameter in params]
    for expected in (1.0, 0.5):
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
        for parameter, start, factor in zip(params, before, (1.0, 2.0, 4.0), strict=True):
            start -= expected * factor
            assert torch.equal(optimizer.state[parameter][MASTER], start)


def test_fp32_parameters_are_refused():
    with pytest.raises(ValueError, match=r"params: a torch\.float32 parameter needs no master weight"):
        MasterWeights(parameters(torch.float32), AdamW)


def test_values_loaded_later_are_kept():
    params = parameters()
    optimizer = MasterWeights(params, AdamW, lr=1e-4)
    with torch.no_grad():
        for parameter in params:
            parameter.copy_(torch.full_like(parameter, 3.0))
    take(optimizer, params, range(len(SHAPES), len(SHAPES) + 2))
    assert all((optimizer.state[parameter][MASTER] - 3).abs().max() < 1e-3 for parameter in params)


def test_another_optimizers_state_is_refused():
    params = parameters()
    without_masters = torch.optim.AdamW(params)
    take(without_masters, params, range(2))
    with pytest.raises(ValueError, match="state_dict: has no master weights"):
        MasterWeights(params, torch.optim.AdamW).load_state_dict(without_masters.state_dict())


def test_groups_added_later_are_saved_too():
    params = parameters()
    optimizer = MasterWeights(params[:1], torch.optim.AdamW, lr=1e-2)
    optimizer.add_param_group({"params": params[1:]})
    take(optimizer, params, range(2))
    loaded = MasterWeights(params[:1], torch.optim.AdamW, lr=1e-2)
    loaded.add_param_group({"params": params[1:]})
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(loaded, params, range(2, 3))
    with pytest.raises(ValueError, match="needs no master weight"):
        loaded.add_param_group({"params": parameters(torch.float32)})
    take(loaded, params, range(3, 4))


def test_a_deep_copy_trains_in_the_same_way():
    model = nn.ParameterList(parameters())
    optimizer = MasterWeights(model, AdamW, lr=1e-2)
    take(optimizer, list(model), range(2))
    copied_model, copied_optimizer = copy.deepcopy((model, optimizer))
    for stepping, stepped_model in ((optimizer, model), (copied_optimizer, copied_model)):
        take(stepping, list(stepped_model), range(2, 4))
    assert all(torch.equal(*pair) for pair in zip(model, copied_model, strict=True))
