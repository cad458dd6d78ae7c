"""AdamW's implementations are as accurate as the loop by the paper's formula in fp64."""

import pytest
import torch
from torch import Tensor, nn

from numerics import assert_as_accurate_as
from trainstep.config.run import ADAMWS
from trainstep.training.optimizer import adamw_named, adamw_options, make_state, with_masters

RATE = 1e-2


def gradients(steps: int, shapes: list[tuple[int, ...]]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(*shape, generator=generator) for shape in shapes] for _ in range(steps)]


def by_formula(start: Tensor, received: list[Tensor]) -> Tensor:
    """Parameters by Loshchilov 2019, algorithm 2, with torch's defaults: betas 0.9 and 0.999, eps 1e-8, decay 0.01."""
    x = start.double()
    first_moment, second_moment = torch.zeros_like(x), torch.zeros_like(x)
    for t, gradient in enumerate(received, 1):
        g = gradient.double()
        first_moment, second_moment = 0.9 * first_moment + 0.1 * g, 0.999 * second_moment + 0.001 * g * g
        x = x * (1 - RATE * 0.01)
        x = x - RATE * (first_moment / (1 - 0.9**t)) / ((second_moment / (1 - 0.999**t)).sqrt() + 1e-8)
    return x


def run(implementation: str, start: list[Tensor], received: list[list[Tensor]], device: str) -> list[Tensor]:
    parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in start]
    optimizer = adamw_named(implementation)(parameters, **adamw_options(implementation, learning_rate=RATE))
    for step in received:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


def check(implementation: str, device: str) -> None:
    shapes = [(5, 7), (13,), (1,)]
    start, received = gradients(1, shapes)[0], gradients(4, shapes)
    exact_tensors = [by_formula(tensor, [step[index] for step in received]) for index, tensor in enumerate(start)]
    result, by_loop, truth, before = (
        torch.cat([tensor.flatten() for tensor in tensors])
        for tensors in (
            run(implementation, start, received, device),
            run("loop", start, received, device),
            exact_tensors,
            start,
        )
    )
    assert (truth - before).abs().mean() > RATE
    assert_as_accurate_as(result, by_loop, truth)


@pytest.mark.parametrize("implementation", ADAMWS)
def test_every_implementation_follows_the_formula(implementation: str):
    check(implementation, "cpu")


@pytest.mark.parametrize("implementation", ADAMWS)
def test_the_requested_implementation_is_used(implementation: str):
    optimizer = adamw_named(implementation)(
        [nn.Parameter(torch.ones(1))], **adamw_options(implementation, learning_rate=RATE)
    )
    group = optimizer.param_groups[0]
    chosen = (bool(group.get("foreach")), bool(group.get("fused")))
    assert chosen == (
        implementation == "foreach",
        implementation in ("fused", "trainstep"),
    )  # trainstep's AdamW sets fused too
    assert isinstance(optimizer, torch.optim.AdamW) == (implementation != "trainstep")
    assert group["lr"] == RATE


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ADAMWS)
def test_every_implementation_on_a_gpu_follows_the_formula(implementation: str):
    check(implementation, "cuda")


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("implementation", ADAMWS)
def test_state_that_is_made_before_the_first_step_changes_no_value(implementation: str, masters: bool):
    torch.manual_seed(5)
    start = [torch.randn(3, 5), torch.randn(7), torch.zeros(2, 2)]
    optimizer_cls = with_masters(adamw_named(implementation)) if masters else adamw_named(implementation)
    trained = []
    for early in (False, True):
        weights = [nn.Parameter(x.bfloat16() if masters else x.clone()) for x in start]
        optimizer = optimizer_cls(weights, **adamw_options(implementation, learning_rate=0.01))
        if early:
            make_state(optimizer)
            assert all(torch.equal(weight, x.to(weight.dtype)) for weight, x in zip(weights, start, strict=True))
            assert all(weight.grad is None for weight in weights)
            assert all(optimizer.state[weight]["step"].item() == 0 for weight in weights)
            assert all(
                not optimizer.state[weight][name].any() for weight in weights for name in ("exp_avg", "exp_avg_sq")
            )
        for step in range(3):
            for weight, x in zip(weights, start, strict=True):
                weight.grad = (x.sin() + step).to(weight.dtype)
            optimizer.step()
        trained.append(weights)
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
