"""RunConfig -> TrainStep: the whole assembly on a page."""

from dataclasses import dataclass

import torch
from torch import nn

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.spans import span_children
from trainstep.training.attention import attention_named
from trainstep.training.batches import Batch, NextBatch, random_batches, read_text, text_batches
from trainstep.training.optimizer import adamw
from trainstep.training.precision import precision_named
from trainstep.training.recompute import recompute_blocks
from trainstep.training.step import TrainStep
from trainstep.training.transformer import Transformer
from trainstep.training.user_model import blocks_of, build_user_model


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A step and what feeds it. `module`: the model; compilation is in place, so its parameters keep their names."""

    run: RunConfig
    device: torch.device
    module: nn.Module
    step: TrainStep
    next_batch: NextBatch

    def micro_batches(self, step: int) -> list[Batch]:
        """The batches of that step, on the device. `next_batch` is asked for micro-batch number step x accumulation + i."""
        first = step * self.run.accumulation
        return [self.next_batch(first + index) for index in range(self.run.accumulation)]


def build_step(run: RunConfig) -> Assembly:
    """Build model, batches and optimizer on `run.device` and set torch's fp32 matmul mode to what the precision asks.

    ValueError, naming the field, for what cannot be built; ImportError for a model that cannot be imported.
    """
    device = torch.device(run.device)
    precision = precision_named(run.precision)
    torch.set_float32_matmul_precision(precision.matmul)
    torch.manual_seed(run.seed)
    module, next_batch = _model(run, device)
    _cast(module, precision.weights, with_buffers=not isinstance(run.model, ModelConfig))
    module.train(run.mode != "forward_no_grad")
    if run.recompute == "block":
        recompute_blocks(module)
    optimizer = None
    if run.trains:
        trainable = (parameter for parameter in module.parameters() if parameter.requires_grad)
        optimizer = adamw(trainable, implementation=run.adamw, learning_rate=run.learning_rate)
    step = TrainStep(
        _compiled(module, run),
        optimizer,
        mode=run.mode,
        autocast=(device.type, precision.autocast) if precision.autocast else None,
        scaler=torch.amp.GradScaler(device.type) if precision.scales_loss and run.trains else None,
        clip_grad_norm=run.clip_grad_norm,
    )
    return Assembly(run=run, device=device, module=module, step=step, next_batch=next_batch)


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
    """Our own model must compile whole (fullgraph); of someone else's, graph breaks are theirs to allow."""
    fullgraph = isinstance(run.model, ModelConfig)
    if run.compile == "block":
        for block in blocks_of(module):
            block.compile(fullgraph=fullgraph)
    if run.compile == "model":
        module.compile(fullgraph=fullgraph)
    return module


def parameter_count(module: nn.Module) -> int:
    """Parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
