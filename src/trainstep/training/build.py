"""Builds a training step from a RunConfig: model, batches, precision, optimizer, parallel strategy, capture."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.parallel.clipping import RankedGradScaler
from trainstep.parallel.ranks import Ranks, alone
from trainstep.spans import span_children
from trainstep.training.attention import attention_named
from trainstep.training.batches import Batch, NextBatch, random_batches, read_text, text_batches
from trainstep.training.captured import CapturedTrainStep, EventMark, unmarked
from trainstep.training.fused_transformer import FusedTransformer
from trainstep.training.optimizer import Parallel, adamw_named, adamw_options, unwrapped, with_masters
from trainstep.training.precision import precision_named
from trainstep.training.recompute import RecomputedForward, recomputable
from trainstep.training.step import TrainStep
from trainstep.training.transformer import Transformer
from trainstep.training.update_in_backward import UpdateInBackward
from trainstep.training.user_model import blocks_of, build_user_model


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A step with its model and its batches. `module`: the model, compiled in place, so its parameters keep their names."""

    run: RunConfig
    device: torch.device
    module: nn.Module
    step: TrainStep
    next_batch: NextBatch
    ranks: Ranks
    captured: CapturedTrainStep | None = None
    """The step as one graph, if the run asks for that; `step` itself always runs without a graph."""
    seen: Any = None
    """The return value of build_step's `look`."""
    recomputed: Sequence[RecomputedForward] = ()
    """The forward of each block, if the run recomputes; with a budget every block is recomputed until the modes are chosen."""

    def take(self, micro_batches: Sequence[Batch], mark: EventMark = unmarked) -> Tensor:
        """Run one step, as a graph if the run asks for that. Returns the last micro-batch's loss, detached."""
        return self.step(micro_batches, mark) if self.captured is None else self.captured(micro_batches, mark)

    def complete(self) -> None:
        """Do the work that a graph has left to its next launch. Call it, on every rank, before calling `step` itself."""
        if self.captured is not None:
            self.captured.complete()

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's batches of a step, on the device."""
        # Micro-batches are numbered step by step, and within a step rank by rank: so a step on N ranks has the tokens of
        # a step of one process with N times the accumulation.
        first = (step * self.ranks.world_size + self.ranks.rank) * self.run.accumulation
        return [self.next_batch(first + index) for index in range(self.run.accumulation)]


def build_step(
    run: RunConfig, parallel: Parallel | None = None, *, look: Callable[[nn.Module], Any] | None = None
) -> Assembly:
    """Build model, batches and optimizer on `run.device`, and set torch's fp32 matmul mode to that of the precision.

    `parallel`: this process is one of several ranks, and its device is theirs. `look` is called with the module before a
    parallel strategy shards its parameters; its return value becomes `seen`.

    Raises ValueError, naming the field, if the step cannot be built, and ImportError if the model cannot be imported.
    """
    device = parallel.ranks.device if parallel else torch.device(run.device)
    precision = precision_named(run.precision)
    torch.set_float32_matmul_precision(precision.matmul)
    torch.manual_seed(run.seed)
    module, next_batch = _model(run, device)
    _cast(module, precision.weights, with_buffers=not isinstance(run.model, ModelConfig))
    module.train(run.mode != "forward_no_grad")
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable and run.mode in ("forward_backward", "step"):
        raise ValueError("model: none of its parameters is trained; set requires_grad, or use mode forward")
    recomputed = _recompute(module, run)
    _compile(module, run)
    seen = look(module) if look else None
    options = adamw_options(run.adamw, learning_rate=run.learning_rate)
    wrap = parallel.wrap if parallel else unwrapped
    optimizer_cls = adamw_named(run.adamw)
    if precision.masters:
        optimizer_cls = with_masters(optimizer_cls)
    apart = run.capture != "none" and device.type == "cuda" and parallel is not None and parallel.makes_nodes
    with _off_the_default_stream(device) if apart else nullcontext():
        wrapped = wrap(module, optimizer_cls if run.trains else None, options)
    scaler = None
    if precision.scales_loss and run.trains:
        # Ranks must skip a step together.
        scaler = RankedGradScaler(parallel.ranks) if parallel else torch.amp.GradScaler(device.type)
    in_backward = None
    by_bucket = run.update == "by_bucket" and wrapped.gradient_sync is not None
    if (run.updates_in_backward or by_bucket) and wrapped.optimizer is not None:
        in_backward = UpdateInBackward(wrapped.module, wrapped.optimizer, wrapped.gradient_sync, by_bucket=by_bucket)
    step = TrainStep(
        wrapped.module,
        wrapped.optimizer,
        mode=run.mode,
        autocast=(device.type, precision.autocast) if precision.autocast else None,
        scaler=scaler,
        clip_grad_norm=run.clip_grad_norm,
        gradient_sync=wrapped.gradient_sync,
        in_backward=in_backward,
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
        recomputed=recomputed,
    )


@contextmanager
def _off_the_default_stream(device: torch.device) -> Iterator[None]:
    """Inside, a wrapper makes the nodes that accumulate gradients, if a graph is to hold them. [Note: one stream] in capture/"""
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _model(run: RunConfig, device: torch.device) -> tuple[nn.Module, NextBatch]:
    if not isinstance(run.model, ModelConfig):
        module, next_batch = build_user_model(run.model.function, run, device)
        if run.compile == "none":
            span_children(module)
        return module.to(device), next_batch
    attention = attention_named(run.attention, run.context, device)
    model_cls: Callable[..., nn.Module] = Transformer
    if run.ops == "fused":
        model_cls = partial(FusedTransformer, loss_sum_dtype=torch.float32 if run.loss_sum_dtype == "fp32" else None)
    with device:
        transformer = model_cls(run.model, attention=attention, context=run.context)
    return transformer, _batches(run, run.model.vocab_size, device)


def _cast(module: nn.Module, dtype: torch.dtype, *, with_buffers: bool) -> None:
    """Cast parameters to the precision's dtype; the buffers of our own model, the rotary tables, stay in fp32."""
    for tensor in (*module.parameters(), *(module.buffers() if with_buffers else ())):
        if tensor.is_floating_point():  # a cast would drop the imaginary part of a complex tensor
            tensor.data = tensor.data.to(dtype)


def _batches(run: RunConfig, vocab_size: int, device: torch.device) -> NextBatch:
    if run.data != "random":
        return text_batches(
            read_text(run.data), batch_size=run.batch_size, context=run.context, seed=run.seed, device=device
        )
    return random_batches(
        vocab_size=vocab_size, batch_size=run.batch_size, context=run.context, seed=run.seed, device=device
    )


def _recompute(module: nn.Module, run: RunConfig) -> list[RecomputedForward]:
    """Put a RecomputedForward around every block's forward; it also compiles the block, if blocks are compiled."""
    if not run.recomputes:
        return []
    blocks = recomputable(
        module,
        draws_random_numbers=not isinstance(run.model, ModelConfig),
        compile=partial(torch.compile, fullgraph=_is_whole(run)) if run.compile == "block" else None,
    )
    for block in blocks[:: run.recompute_every]:
        block.mode = "block" if run.recompute_budget_gib is not None else run.recompute
    for block in blocks[: run.narrow_blocks]:  # what the first blocks keep is held longest
        block.mode = "narrow"
    return blocks


def _compile(module: nn.Module, run: RunConfig) -> None:
    if run.compile == "block" and not run.recomputes:
        for block in blocks_of(module):
            # The forward alone: parallel strategies put hooks on the block, which must not be compiled with it.
            block.forward = torch.compile(block.forward, fullgraph=_is_whole(run))
    if run.compile == "model":
        module.compile(fullgraph=_is_whole(run))


def _is_whole(run: RunConfig) -> bool:
    """Whether what is compiled must be one graph: our own model has graph breaks for flash-attn-4 only, a user's may have some."""
    return isinstance(run.model, ModelConfig) and run.attention != "flash_attn_4"


def parameter_count(module: nn.Module) -> int:
    """The number of parameters; a tied parameter counts once."""
    return sum(parameter.numel() for parameter in module.parameters())
