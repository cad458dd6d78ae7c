"""The 8B step of sweeps/step_8b.toml, smaller: its loss and gradients are as accurate as those of the plain model in one process.

Each rank compares its own pieces of the averaged gradients by the 2x rule. On GPUs the width and the vocabulary are the real ones.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from trainstep.config.model import ModelConfig, size
from trainstep.config.parallel import SyncConfig
from trainstep.config.run import RunConfig
from trainstep.ops.reference import allowed_error, largest_error
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.training.batches import random_batches
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel

SMALL: dict[str, Any] = {"d_model": 64, "d_ff": 176, "layers": 3, "heads": 2, "vocab_size": 151}
LARGE = size("8B")
BATCHES = 8
"""Of which the plain model's largest error in the loss counts: that of a single number may be 0 by chance."""
OPTIONS: dict[str, Any] = {
    "batch_size": 1,
    "precision": "bf16",
    "attention": "trainstep",
    "ops": "fused",
    "adamw": "trainstep",
    "recompute": "selective",
    "mode": "forward_backward",
}


def spread(module: nn.Module, std: float) -> None:
    """Weights far from their initial scale, so that every part contributes to the loss; each tensor the same in both models."""
    generator = torch.Generator(next(module.parameters()).device).manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            # Gate and up are drawn one after the other, as the two matrices that they are in the plain model.
            rows = parameter.data.split(parameter.shape[0] // 2) if is_joint(parameter, module) else (parameter.data,)
            for part in rows:
                part.normal_(std=std, generator=generator).add_(1.0 if parameter.dim() == 1 else 0.0)


def is_joint(parameter: nn.Parameter, module: nn.Module) -> bool:
    return any(parameter is other for name, other in module.named_parameters() if name.endswith("gate_up.weight"))


def pieces(assembly: Assembly) -> Iterator[tuple[str, int, int, Tensor]]:
    """Each parameter's name, the elements before this rank's piece, those of the whole, and the piece's averaged gradient."""
    sync = assembly.step.gradient_sync
    names = [name for name, _ in assembly.module.named_parameters()]
    if isinstance(sync, ShardedGradients):
        wholes = [parameter.numel() for parameter in sync.trained_parameters]
        for name, piece, (first, _), whole in zip(names, sync.pieces, sync.ends, wholes, strict=True):
            if piece is not None:
                assert piece.grad is not None
                yield name, first, whole, piece.grad
        return
    wholes = [tensor.numel() for tensor in assembly.seen.values()]
    for (name, piece), whole in zip(assembly.module.named_parameters(), wholes, strict=True):
        if piece.numel():
            assert piece.grad is not None
            yield name, 0 if assembly.ranks.rank == 0 else whole - piece.numel(), whole, piece.grad


def plain(run: RunConfig, weights: dict[str, Tensor], world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The plain model's losses of several batches, the ranks' first, and the gradients of the ranks' mean by the fused names."""
    device = next(iter(weights.values())).device
    options = {"attention": "plain", "ops": "plain", "recompute": "none", "narrow_blocks": 0, "adamw": "fused"}
    module = build_step(RunConfig(**{**vars(run), **options})).module
    parts = {}
    for name, tensor in weights.items():
        names = [name.replace("gate_up", part) for part in ("gate", "up")] if "gate_up" in name else [name]
        parts |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    module.load_state_dict(parts)
    module.to(dtype)
    assert isinstance(run.model, ModelConfig)
    batch = random_batches(
        vocab_size=run.model.vocab_size, batch_size=run.batch_size, context=run.context, seed=run.seed, device=device
    )
    averaged = dict[str, Tensor]()
    with torch.no_grad():
        found = {"losses": torch.stack([module(**batch(number)) for number in range(BATCHES)])}
    for rank in range(world_size):
        module.zero_grad()
        module(**batch(rank)).backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            share = parameter.grad / world_size
            averaged[name] = averaged[name] + share if rank else share
    for name in weights:
        names = [name.replace("gate_up", part) for part in ("gate", "up")] if "gate_up" in name else [name]
        found[name] = torch.cat([averaged[part] for part in names])
    return found


def checked(ranks: Ranks, sync: dict[str, Any], fields: dict[str, Any], std: float) -> dict[str, int]:
    """Asserts the 2x rule for this rank's loss and pieces. Returns the elements that it compared, by parameter."""
    run = RunConfig(**{**OPTIONS, **fields})

    def look(module: nn.Module) -> dict[str, Tensor]:
        spread(module, std)
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    assembly = build_step(run, parallel(ranks, SyncConfig(**sync)), look=look)
    assert [forward.mode for forward in assembly.recomputed] == ["narrow"] + ["selective"] * (run.model.layers - 1)
    loss = assembly.step.compute(assembly.micro_batches(0))
    references = partial(plain, run, assembly.seen, ranks.world_size)
    same, exact = references(torch.bfloat16), references(torch.float64)
    assert loss.dtype == same["losses"].dtype
    error = largest_error(loss, exact["losses"][ranks.rank])
    assert error <= allowed_error(same["losses"], exact["losses"], loss.dtype), f"loss: off by {error:.3g}"
    compared: dict[str, int] = {}
    for name, first, whole, gradient in pieces(assembly):
        assert same[name].numel() == whole
        truth = exact[name].flatten()[first : first + gradient.numel()]
        error, allowed = largest_error(gradient, truth), allowed_error(same[name], exact[name], gradient.dtype)
        assert gradient.isfinite().all(), name
        assert error <= allowed, f"{name}: off by {error:.3g}, and {allowed:.3g} is allowed"
        compared[name] = gradient.numel()
    del assembly, same, exact, references, gradient, truth
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # these processes stay for other tests, on GPUs that are nearly full
    return compared


def assert_every_element_is_as_accurate(
    sync: dict[str, Any], fields: dict[str, Any], std: float, backend: str = "gloo"
) -> None:
    every_rank = run_ranks(2, checked, sync, fields, std, backend=backend)
    whole = sum(sum(compared.values()) for compared in every_rank)
    assert whole == fields["model"].parameters
    assert all(every_rank), "each rank has a part of them"


@pytest.mark.parametrize("strategy", ["fsdp", "sharded_flat"])
def test_the_step_is_as_accurate_as_the_plain_model(strategy: str):
    fields = {"model": ModelConfig(**SMALL), "context": 40, "device": "cpu", "narrow_blocks": 1}
    assert_every_element_is_as_accurate({"name": strategy}, fields, std=0.2)


@pytest.mark.multigpu
@pytest.mark.parametrize("transport", ["library", "copies"])
@pytest.mark.parametrize("strategy", ["fsdp", "sharded_flat"])
def test_at_the_real_width_it_is_too(strategy: str, transport: str):
    """Two layers of 8B with its vocabulary, 2,048 tokens a rank; in fp64 that takes some 45 GiB of each GPU."""
    shape = {name: getattr(LARGE, name) for name in ("d_model", "d_ff", "heads", "vocab_size")}
    fields = {"model": ModelConfig(**shape, layers=2), "context": 2048, "device": "cuda", "narrow_blocks": 1}
    assert_every_element_is_as_accurate({"name": strategy, "transport": transport}, fields, 0.02, "nccl")
