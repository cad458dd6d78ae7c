"""AdamW is as accurate as torch's by the 2x rule. On a CPU the reference runs, on a GPU the kernel.

test_adamw_kernel.py runs this file with TRITON_INTERPRET=1: then the kernel runs on a CPU too.
"""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from numerics import assert_as_accurate_as
from trainstep.ops.adamw import AdamW

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STEPS = 20
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


class Interpreted(AdamW):
    def _has_kernel(self, _parameter: Tensor) -> bool:
        return True


OURS = Interpreted if INTERPRETED else AdamW


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def contents() -> list[Tensor]:
    """Tensors of odd sizes, of no element and of one, of more than a chunk, and many small ones."""
    shapes = [(1,), (), (0,), (7, 13), (4096,), (4097,), (3, 3000), *[(size,) for size in range(2, 40)]]
    return [normal(*shape, seed=index) if shape else normal(1)[0] for index, shape in enumerate(shapes)]


def parameters_of(tensors: list[Tensor], device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.detach().clone().to(device, dtype)) for tensor in tensors]


def run(
    optimizer: torch.optim.Optimizer, *, dtype: torch.dtype | None = None, steps: int = STEPS, first: int = 0
) -> None:
    """Take steps with gradients that are the same for every optimizer; parameter number `step` gets none in that step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(first, first + steps):
        for index, parameter in enumerate(parameters):
            gradient = normal(parameter.numel(), seed=1000 * step + index).view(parameter.shape) * 10.0 ** (
                index % 5 - 3
            )
            gradient = gradient.to(parameter.device, dtype or parameter.dtype)
            parameter.grad_dtype = None
            parameter.grad = None if index == step else gradient
        optimizer.step()


def test_parameters_are_as_accurate_as_torchs(device: str):
    parameters, torch_parameters, exact = [
        parameters_of(contents(), device, dtype) for dtype in (torch.float32, torch.float32, torch.float64)
    ]
    run(OURS(parameters, **OPTIONS))
    run(torch.optim.AdamW(torch_parameters, **OPTIONS))
    run(torch.optim.AdamW(exact, **OPTIONS))
    for index, (parameter, expected, exact_parameter) in enumerate(
        zip(parameters, torch_parameters, exact, strict=True)
    ):
        if parameter.numel():
            assert_as_accurate_as(parameter.detach(), expected.detach(), exact_parameter.detach(), f"parameter {index}")


def test_an_update_writes_rounded_copies(device: str):
    """A copy of each parameter but the last, in 16 bits and, for one of them, another layout."""
    parameters = parameters_of([*contents(), normal(6, 10)], device)
    copies = {parameter: torch.zeros_like(parameter, dtype=torch.float16) for parameter in parameters[:-1]}
    copies[parameters[3]] = torch.zeros(13, 7, dtype=torch.float16, device=device).T
    optimizer, alone = OURS(parameters, **OPTIONS), parameters_of([*contents(), normal(6, 10)], device)
    optimizer.rounded = dict(copies)
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, steps=3)
    run(OURS(alone, **OPTIONS), steps=3)
    for index, (parameter, other) in enumerate(zip(parameters, alone, strict=True)):
        if index != 3:  # its copy's layout leaves it to the reference
            torch.testing.assert_close(parameter, other, rtol=0, atol=0)
    for index, (parameter, rounded) in enumerate(copies.items()):
        if index > 2:  # the first had no gradient in a step each
            torch.testing.assert_close(rounded, parameter.detach().half(), rtol=0, atol=0)


def test_autograd_hears_of_an_update(device: str):
    """A backward that needs a parameter's value before the update is refused, as with torch's own optimizers."""
    parameter = parameters_of([normal(8)], device)[0]
    rounded = parameter.detach().bfloat16().requires_grad_()
    optimizer = OURS([parameter], **OPTIONS)
    optimizer.rounded = {parameter: rounded}
    losses = [(used * used).sum() for used in (parameter, rounded)]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_moments_as_accurate_as_torch(device: str):
    kinds = [(OURS, torch.float32), (torch.optim.AdamW, torch.float32), (torch.optim.AdamW, torch.float64)]
    states = []
    for kind, dtype in kinds:
        optimizer = kind(parameters_of(contents()[3:7], device, dtype), **OPTIONS)
        run(optimizer, steps=5)
        states.append(optimizer.state_dict()["state"])
    for index, state in states[0].items():
        assert float(state["step"]) == float(states[1][index]["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert_as_accurate_as(state[name], states[1][index][name], states[2][index][name], f"{name} {index}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_as_good_as_widened_ones(dtype: torch.dtype, device: str):
    narrow, wide = parameters_of(contents(), device), parameters_of(contents(), device)
    first, second = OURS(narrow, **OPTIONS), OURS(wide, **OPTIONS)
    for step in range(5):
        run(first, dtype=dtype, steps=1, first=step)
        for parameter, wide_parameter in zip(narrow, wide, strict=True):
            wide_parameter.grad = None if parameter.grad is None else parameter.grad.float()
        second.step()
    assert all(torch.equal(*pair) for pair in zip(narrow, wide, strict=True))
    with pytest.raises(RuntimeError):  # which is why trainstep's AdamW supports them
        run(torch.optim.AdamW(parameters_of(contents(), device), **OPTIONS, fused=True), dtype=dtype)


def test_narrow_parameters(device: str):
    """Moments have the parameter's dtype, and arithmetic is in fp32. (In fp16 squares of gradients vanish: torch gives NaN.)"""
    kinds = (torch.bfloat16, torch.bfloat16, torch.float64)
    parameters, torch_parameters, exact = [parameters_of(contents()[3:7], device, kind) for kind in kinds]
    with torch.no_grad():
        for narrow, wide in zip(parameters, exact, strict=True):
            wide.copy_(narrow)
    run(OURS(parameters, **OPTIONS), steps=3)
    run(torch.optim.AdamW(torch_parameters, **OPTIONS), steps=3)
    run(torch.optim.AdamW(exact, **OPTIONS), steps=3)
    for parameter, expected, exact_parameter in zip(parameters, torch_parameters, exact, strict=True):
        assert_as_accurate_as(parameter.detach(), expected.detach(), exact_parameter.detach())


def test_memory_order_does_not_matter(device: str):
    """Parameters are transposed, channels last, with gaps or unaligned; gradients have another memory order."""
    tensor = normal(4, 6, 5, 8).to(device)
    cut = [
        tensor[0, 0].t(),
        tensor.clone().contiguous(memory_format=torch.channels_last),
        tensor[1, :, ::2],
        tensor[2].view(-1)[1:],
    ]
    strided = [nn.Parameter(tensor) for tensor in cut]
    contiguous = [nn.Parameter(tensor.clone().contiguous()) for tensor in cut]
    run(OURS(contiguous, **OPTIONS))
    run(OURS(strided, **OPTIONS))
    if device == "cpu" and not INTERPRETED:
        assert all(torch.equal(*pair) for pair in zip(strided, contiguous, strict=True))
    for parameter, expected in zip(strided, contiguous, strict=True):  # gaps: the reference runs, not the kernel
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-6)


def test_state_moves_between_torch_and_ours(device: str):
    """Six steps, the last three by the other optimizer, give what six steps of either give."""
    results = []
    for first, second in [(OURS, torch.optim.AdamW), (torch.optim.AdamW, OURS), (OURS, OURS)]:
        parameters = parameters_of(contents()[3:7], device)
        before = first(parameters, **OPTIONS)
        run(before, steps=3)
        after = second(parameters, lr=0.5)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert after.param_groups[0]["lr"] == OPTIONS["lr"]
        run(after, steps=3, first=3)
        results.append([parameter.detach() for parameter in parameters])
    straight = parameters_of(contents()[3:7], device)
    run(OURS(straight, **OPTIONS), steps=6)
    assert all(torch.equal(*pair) for pair in zip(results[2], straight, strict=True))
    for result in results[:2]:
        assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(result, straight, strict=True))


def test_parts_of_a_group_may_step_separately(device: str):
    """Flat shards step so: results are the same, and each part keeps its table for the kernel."""
    joint_parameters, separate_parameters = (
        parameters_of(contents()[3:7], device),
        parameters_of(contents()[3:7], device),
    )
    joint, separate = OURS(joint_parameters, **OPTIONS), OURS(separate_parameters, **OPTIONS)
    groups = separate.param_groups
    gradients = [normal(*parameter.shape, seed=index).to(device) for index, parameter in enumerate(joint_parameters)]
    tables = []
    for _ in range(3):
        for parameter, part_parameter, gradient in zip(joint_parameters, separate_parameters, gradients, strict=True):
            parameter.grad = part_parameter.grad = gradient
        joint.step()
        for part in (separate_parameters[:2], separate_parameters[2:]):
            separate.param_groups = [{**groups[0], "params": part}]
            separate.step()
        tables.append([launch._tables.addresses for launch in separate._launches.values()])
    assert all(torch.equal(*pair) for pair in zip(joint_parameters, separate_parameters, strict=True))
    assert len(tables[0]) == (2 if separate._has_kernel(separate_parameters[0]) else 0)
    assert all(table is kept_table for table, kept_table in zip(tables[0], tables[2], strict=True))


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_groups_schedulers_closures_and_a_tensor_lr_work(lr: Any, device: str):
    first, second = parameters_of(contents()[3:5], device)
    if isinstance(lr, Tensor):
        lr = lr.to(device)
    optimizer = OURS(
        [{"params": [first]}, {"params": [second], "weight_decay": 0.5, "lr": 0.0}], lr=lr, weight_decay=0.0
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    before = first.detach().clone()
    unchanged = second.detach().clone()
    assert optimizer.step(closure) is not None
    torch.testing.assert_close(first.detach(), before - 0.3)  # the first step is lr times the gradient's sign
    scheduler.step()
    optimizer.step(closure)
    torch.testing.assert_close(first.detach(), before - 0.45)
    assert torch.equal(second.detach(), unchanged)


def test_scaler_skips_and_unscales(device: str):
    own_parameters, torch_parameters = parameters_of(contents()[3:7], device), parameters_of(contents()[3:7], device)
    optimizers = [OURS(own_parameters, **OPTIONS), torch.optim.AdamW(torch_parameters, **OPTIONS, fused=True)]
    for optimizer in optimizers:
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            parameters = optimizer.param_groups[0]["params"]
            scaler.scale(sum((parameter**2).sum() for parameter in parameters)).backward()
            if step == 1:
                parameters[2].grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    for parameter, expected in zip(own_parameters, torch_parameters, strict=True):
        torch.testing.assert_close(parameter, expected)
        assert float(optimizers[0].state[parameter]["step"]) == 3


def test_loading_a_state_keeps_the_tables_that_graphs_read(device: str):
    """A loaded state may be the very tensors that a graph updates, so the graph is launched again, and reads its tables."""
    parameters = parameters_of(contents()[3:5], device)
    optimizer = OURS(parameters, **OPTIONS)
    run(optimizer, steps=1)
    launches = optimizer._launches
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._launches is launches
    run(copy.deepcopy(optimizer), steps=1)


@pytest.fixture
def mesh(device: str, tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


def test_dtensors_are_updated_where_their_memory_is(mesh: DeviceMesh, device: str):
    """torch's FSDP2 trains DTensors."""
    plain = parameters_of(contents(), device)
    shared = [nn.Parameter(distribute_tensor(tensor.to(device), mesh, [Replicate()])) for tensor in contents()]
    run(OURS(plain, **OPTIONS))
    optimizer = OURS(shared, **OPTIONS)
    for step in range(STEPS):
        for index, parameter in enumerate(shared):
            gradient = normal(parameter.numel(), seed=1000 * step + index).view(parameter.shape) * 10.0 ** (
                index % 5 - 3
            )
            whole = distribute_tensor(gradient.to(device), mesh, [Replicate()])
            parameter.grad = None if index == step else whole
        optimizer.step()
    assert all(isinstance(optimizer.state[parameter]["exp_avg"], DTensor) for parameter in shared)
    for one, other in zip(plain, shared, strict=True):
        assert torch.equal(one, other.to_local())  # type: ignore[attr-defined]
    assert bool(optimizer._launches) == optimizer._has_kernel(shared[0])


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_update():
    lr = torch.tensor(1e-2, device="cuda")
    captured, eager = parameters_of(contents(), "cuda"), parameters_of(contents(), "cuda")
    optimizers = [OURS(captured, **(OPTIONS | {"lr": lr})), OURS(eager, **(OPTIONS | {"lr": lr}))]
    for optimizer in optimizers:
        run(optimizer, steps=1, first=100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parameter in captured:
            parameter.grad = torch.ones_like(parameter)  # in the graph's memory: where no gradient was before
        optimizers[0].step()
    for step in range(3):
        lr.fill_(1e-2 / (step + 1))
        graph.replay()
        for parameter_ in eager:
            parameter_.grad = torch.ones_like(parameter_)
        optimizers[1].step()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr: must not be negative, but is -1.0"),
        ({"betas": (0.9, 1.0)}, "betas: must be two numbers, at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas: must be two numbers"),
        ({"lr": torch.ones(2)}, "lr: must have one element, not 2"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(1))], **options)


def test_complex_parameters_and_amsgrad_are_refused():
    with pytest.raises(ValueError, match="params: complex"):
        AdamW([nn.Parameter(torch.ones(1, dtype=torch.complex64))])
    torch_optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad: trainstep's AdamW does not support it"):
        AdamW([nn.Parameter(torch.ones(1))]).load_state_dict(torch_optimizer.state_dict())
