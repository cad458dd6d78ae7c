"""Traces a training step of any model on fake tensors: nothing is computed and no memory is taken.

    step = trace_step(run)            # run.model: the user's function, or the built-in model

The table (costs/traced_step.py) has the tensors in the order in which they come and go, and the work of every op. It is that of a
GPU, whatever this machine has, by the rules of gpu_rules.py.
"""

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from trainstep.config.run import Phase, RunConfig
from trainstep.costs.traced_step import TracedStep
from trainstep.parallel.units import parameter_sizes
from trainstep.training.batches import Batch
from trainstep.training.build import build_step
from trainstep.training.gpu_rules import gpu_rules
from trainstep.training.partition import Partition, partitioned
from trainstep.training.precision import float32_matmuls
from trainstep.training.tape import Tape

_ON_GPU_ONLY = ("sdpa_cudnn", "sdpa_efficient", "flash_attn_4")
_ASKS_FOR_DATA = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_NO_DATA = ("data pointer", "data_ptr", "Cannot copy out of meta tensor", "meta tensors", ".numpy()")
"""Words in torch's errors when code looks into a tensor without memory."""
_ALWAYS_UNSEEN = (
    "One path through the model's code is traced; a branch taken at random, or in other steps only, is not.",
    "What kernels take for themselves inside an operator is not seen, but for attention's dq and trainstep's fused head.",
    "The optimizer is trainstep's AdamW (--adamw); another one's state and temporary tensors differ.",
)


class Tracer:
    """Traces runs, equal ones once."""

    def __init__(self) -> None:
        self._steps: dict[RunConfig, TracedStep] = {}

    def __call__(self, run: RunConfig) -> TracedStep:
        """The trace of the run, made by `trace_step` the first time."""
        key = traced_run(run)
        if key not in self._steps:
            self._steps[key] = trace_step(run)
        return self._steps[key]


def trace_step(run: RunConfig, *, on_gpu: bool = True) -> TracedStep:
    """Trace one micro-batch's forward and backward. `on_gpu` False: as this machine's CPU would run it, for tests.

    ValueError, in one sentence, if the model cannot be imported or traced.
    """
    if run.compile == "model":
        raise ValueError("compile: a model compiled whole is not traced; take compile block, or none, which needs more")
    gc.collect()  # tensors of a trace before would be freed in this one
    with ExitStack() as stack:
        stack.enter_context(float32_matmuls(torch.get_float32_matmul_precision()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if on_gpu:
            stack.enter_context(gpu_rules())
        stack.enter_context(_modules_move())
        partition = stack.enter_context(partitioned()) if run.compile != "none" else Partition()
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with _one_sentence(run.model.name):
            return _trace(traced_run(run), fake, partition)


def _trace(run: RunConfig, fake: FakeTensorMode, partition: Partition) -> TracedStep:
    assembly = build_step(run)
    [batch] = assembly.micro_batches(0)
    batch = _faked(batch, fake)
    tape = partition.tape = Tape(assembly.module, batch)

    def mark(phase: Phase) -> None:
        if phase is Phase.FORWARD:
            gc.collect()  # what is unreachable is not kept
            tape.end_forward()

    with tape:
        _loss = assembly.step([batch], mark)  # alive as long as in a step that is run
    tape.finish()
    buffers = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in assembly.module.buffers()}
    return TracedStep(
        model=run.model.name,
        parameters=tuple(parameter_sizes(assembly.module)),
        buffers_bytes=sum(buffers.values()),
        batch_bytes=tuple(x.untyped_storage().nbytes() for x in batch.values() if isinstance(x, Tensor)),
        tensors=tape.tensors(),
        forward=tuple(tape.forward),
        backward=tuple(tape.backward),
        work=tape.work(),
        unseen=tuple(_unseen(sorted(tape.custom_ops), sorted(tape.custom_functions))),
    )


def traced_run(run: RunConfig) -> RunConfig:
    """The run as it is traced: one micro-batch, no update. ValueError for flex attention, which no CPU differentiates."""
    if run.attention == "flex":
        raise ValueError("attention: flex is not traced; take sdpa, which keeps as much for backward")
    return replace(
        run,
        device="cpu",
        mode=run.mode if run.mode.startswith("forward") else "forward_backward",
        precision="fp32" if run.precision == "tf32" else run.precision,
        attention="sdpa" if run.attention in _ON_GPU_ONLY else run.attention,
        capture="none",
        adamw="fused",
        update="after_backward",
        accumulation=1,
        clip_grad_norm=None,
    )


@contextmanager
def _modules_move() -> Iterator[None]:
    """Inside, `module.to(...)` and its like change fake parameters, tied ones too. Torch swaps them, which ties forbid."""
    before = nn.Module._apply

    def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(change)
        with torch.no_grad():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = change(parameter)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else change(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _faked(batch: Batch, fake: FakeTensorMode) -> Batch:
    return {
        name: fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x
        for name, x in batch.items()
    }


def _unseen(operators: Sequence[str], functions: Sequence[str]) -> Iterator[str]:
    yield from _ALWAYS_UNSEEN
    if operators:
        yield f"What these operators from outside torch take for themselves is not seen: {', '.join(operators)}."
    if functions:
        names = ", ".join(functions)
        yield f"What these autograd functions keep that is no tensor, or their own kernels allocate, is not seen: {names}."


@contextmanager
def _one_sentence(model: str) -> Iterator[None]:
    """ValueError in one sentence for whatever the user's code raises. Sentences about the run pass."""
    try:
        yield
    except ImportError as error:
        words = _line(error)
        raise ValueError(
            words if words.startswith("model: ") else f"model: {model} cannot be imported: {words}"
        ) from None
    except _ASKS_FOR_DATA as error:
        raise ValueError(
            f"model: {model} needs data to be traced: {_place(error)} looks at a tensor's values; measure it: trainstep memory"
        ) from None
    except SystemExit as error:
        raise ValueError(f"model: {model} ends the process, in {_place(error)}, so that it cannot be traced") from None
    except Exception as error:
        if any(words in str(error) for words in _NO_DATA):
            raise ValueError(
                f"model: {model} needs data to be traced: {_place(error)} reads a tensor's memory; measure it: trainstep memory"
            ) from None
        if isinstance(error, ValueError) and not _is_users(error):
            raise
        raise ValueError(
            f"model: {model} cannot be traced: {_place(error)} raises {type(error).__name__}: {_line(error)}"
        ) from None


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the error that are neither of torch nor of trainstep."""
    own = (Path(__file__).parents[1], Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not any(Path(frame.filename).is_relative_to(folder) for folder in own)]


def _is_users(error: BaseException) -> bool:
    return bool(_users_frames(error))


def _place(error: BaseException) -> str:
    frames = _users_frames(error)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "its code"


def _line(error: BaseException) -> str:
    """The first line of an error's words."""
    return next(iter(str(error).strip().splitlines()), "without a message")
