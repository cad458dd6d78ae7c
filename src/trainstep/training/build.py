"""RunConfig -> TrainStep: the whole assembly on a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.parallel.grad_scaler import RankedGradScaler
from trainstep.parallel.ranks import Ranks, alone
from trainstep.spans import span_children
from trainstep.training.attention import attention_named
from trainstep.training.batches import Batch, NextBatch, random_batches, read_text, text_batches
from trainstep.training.captured import CapturedTrainStep, EventMark, unmarked
from trainstep.training.master_weights import MasterWeights
from trainstep.training.optimizer import adamw_named, adamw_options
from trainstep.training.precision import precision_named
from trainstep.training.recompute import recompute_blocks
from trainstep.training.step import TrainStep
from trainstep.training.transformer import Transformer
from trainstep.training.user_model import blocks_of, build_user_model
from trainstep.training.wrapping import Parallel, unwrapped


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A step and what feeds it. `module`: the model; compilation is in place, so its parameters keep their names."""

    run: RunConfig
    device: torch.device
    module: nn.Module
    step: TrainStep
    next_batch: NextBatch
    ranks: Ranks
    captured: CapturedTrainStep | None = None
    """The step as one graph, where the run asks for it; `step` itself never is one."""
    seen: Any = None
    """What `look` of build_step returned."""

    def take(self, micro_batches: Sequence[Batch], mark: EventMark = unmarked) -> Tensor:
        """One step, captured where it is to be. The last micro-batch's loss, detached."""
        return self.step(micro_batches, mark) if self.captured is None else self.captured(micro_batches, mark)

    def complete(self) -> None:
        """Before `step` is called itself: what a graph left to its next launch. Every rank must ask."""
        if self.captured is not None:
            self.captured.complete()

    def micro_batches(self, step: int) -> list[Batch]:
        """The batches of that step, on the device. `next_batch` is asked for micro-batch number step x accumulation + i; with N
        ranks a step has N times as many, and each rank its own, so that a step sees the same tokens on any number."""
        first = (step * self.ranks.world_size + self.ranks.rank) * self.run.accumulation
        return [self.next_batch(first + index) for index in range(self.run.accumulation)]


def build_step(
    run: RunConfig, parallel: Parallel | None = None, *, look: Callable[[nn.Module], Any] | None = None
) -> Assembly:
    """Build model, batches and optimizer on `run.device` and set torch's fp32 matmul mode to what the precision asks.

    `parallel`: this process is one of several ranks; its device is theirs. `look` sees the module before a parallel strategy takes
    its parameters apart; what it returns is `seen`.

    ValueError, naming the field, for what cannot be built; ImportError for a model that cannot be imported.
    """
    device = parallel.ranks.device if parallel else torch.device(run.device)
    precision = precision_named(run.precision)
    torch.set_float32_matmul_precision(precision.matmul)
    torch.manual_seed(run.seed)
    module, next_batch = _model(run, device)
    _cast(module, precision.weights, with_buffers=not isinstance(run.model, ModelConfig))
    module.train(run.mode != "forward_no_grad")
    if run.recompute == "block":
        recompute_blocks(module, draws_random_numbers=not isinstance(run.model, ModelConfig))
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable and run.mode in ("forward_backward", "step"):
        raise ValueError("model: none of its parameters is trained; set requires_grad, or take mode forward")
    module = _compiled(module, run)
    seen = look(module) if look else None
    options = adamw_options(run.adamw, learning_rate=run.learning_rate)
    wrap = parallel.wrap if parallel else unwrapped
    optimizer_cls = adamw_named(run.adamw)
    if precision.masters:
        optimizer_cls = partial(MasterWeights, optimizer_cls=optimizer_cls)
    wrapped = wrap(module, optimizer_cls if run.trains else None, options)
    step = TrainStep(
        wrapped.module,
        wrapped.optimizer,
        mode=run.mode,
        autocast=(device.type, precision.autocast) if precision.autocast else None,
        scaler=_scaler(device, parallel) if precision.scales_loss and run.trains else None,
        clip_grad_norm=run.clip_grad_norm,
        gradient_sync=wrapped.gradient_sync,
    )
    ranks = parallel.ranks if parallel else alone(device)
    captured = None if run.capture == "none" else CapturedTrainStep(step, ranks, strict=run.capture == "step")
    return Assembly(
        run=run,
        device=device,
        module=module,
        step=step,
        next_batch=next_batch,
        ranks=ranks,
        captured=captured,
        seen=seen,
    )


def _model(run: RunConfig, device: torch.device) -> tuple[nn.Module, NextBatch]:
    if not isinstance(run.model, ModelConfig):
        module, next_batch = build_user_model(run.model.function, run, device)
        if run.compile == "none":
            span_children(module)
        return module.to(device), next_batch
    attention = attention_named(run.attention, run.context, device)
    with device:
        transformer = Transformer(run.model, attention=attention, context=run.context)
    return transformer, _batches(run, run.model.vocab_size, device)


def _cast(module: nn.Module, dtype: torch.dtype, *, with_buffers: bool) -> None:
    """Weights to the precision's dtype. Our buffers, the rotary tables, stay in fp32; complex ones would lose a part."""
    for tensor in (*module.parameters(), *(module.buffers() if with_buffers else ())):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _batches(run: RunConfig, vocab_size: int, device: torch.device) -> NextBatch:
    if run.data != "random":
        return text_batches(
            read_text(run.data), batch_size=run.batch_size, context=run.context, seed=run.seed, device=device
        )
    return random_batches(
        vocab_size=vocab_size, batch_size=run.batch_size, context=run.context, seed=run.seed, device=device
    )


def _compiled(module: nn.Module, run: RunConfig) -> nn.Module:
    """Our own model must compile whole (fullgraph); of someone else's, graph breaks are theirs to allow.

    Of a block its forward alone: hooks of parallel strategies stand on the block and must not be compiled with it.
    """
    fullgraph = isinstance(run.model, ModelConfig)
    if run.compile == "block":
        for block in blocks_of(module):
            block.forward = torch.compile(block.forward, fullgraph=fullgraph)
    if run.compile == "model":
        module.compile(fullgraph=fullgraph)
    return module


def _scaler(device: torch.device, parallel: Parallel | None) -> torch.amp.GradScaler:
    """Several ranks skip a step together."""
    return RankedGradScaler(parallel.ranks) if parallel else torch.amp.GradScaler(device.type)


def parameter_count(module: nn.Module) -> int:
    """Parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
