"""Gives the modules of a script trainstep's fused ops, from outside: norms, SwiGLU, and the loss of a Hugging Face Llama.

    with_our_ops(applied, module)      # every part that computes what one of our ops computes runs that op from now on
    fusable_parts(module)              # how many parts that would be; nothing is changed

`applied` notes what was done and what was left (applied.py). Weights and their names stay. What a part is called with that our op
does not take (a second argument, another dtype) goes to its own forward.

[Note: what a norm computes] Names say little: Mistral's and Qwen's norms are Llama's under another name, and Gemma's has another
formula under a like one. So a module is an RMSNorm if it has one weight of one dimension and an epsilon, and gives, with a random
weight, what rms_norm gives for a few random rows. Those tell formulas apart: one row is as small as the epsilon, rows and columns
have unlike scales (a norm over groups, or over the whole tensor, differs), and no mean is 0 (LayerNorm differs). The dtype of its
result is looked at for each dtype that may come in, with and without autocast. What runs is the forward of a copy of the module,
and random numbers stay as they are. Modules with hooks or parametrisations are left alone.

[Note: what an MLP computes] An MLP is SwiGLU if its activation is SiLU and its forward has the instructions of Llama's. It is not
run: its matrices are large, and its projections may be wrapped, as adapters do; the changed MLP calls them all the same.

Both take contiguous tensors alone: a norm by hand keeps the strides of its input, and code behind it may count on them.
"""

import contextlib
import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainstep.measure.run.changed.attention import Notes
from trainstep.ops import hugging_face_llama, reference
from trainstep.ops.operators import has_kernel
from trainstep.ops.rms_norm import rms_norm
from trainstep.ops.swiglu import swiglu

_LLAMA = "transformers.models.llama.modeling_llama"
_EPSILONS = ("eps", "variance_epsilon")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SILU = ("SiLU", "SiLUActivation")
_SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine")
"""Modules whose parts have shards of weights, some of which look whole."""
_MOST_OFF = {torch.float32: 1e-3, torch.bfloat16: 1 / 64, torch.float16: 1 / 64}
"""How far a norm's row may be from our op's, relative to its largest value, by the least precise dtype: roundings are within it."""
_NOTHING = "no part of the script's module computes what one of trainstep's ops does"
_NO_KERNEL = "where the model is, trainstep's ops are plain PyTorch; they have kernels for GPUs"


class _Part(NamedTuple):
    """A module, and what its forward becomes."""

    module: nn.Module
    forward: Callable[..., Any]


def with_our_ops(applied: Notes, module: nn.Module) -> None:
    """Give the parts of the module our ops, and let what is compiled be compiled anew. Called when no forward is under way."""
    if not any(has_kernel(weight) for weight in module.parameters()):
        applied.left("ops", _NO_KERNEL)
        return
    parts, llamas = list(_parts(module)), list(_llamas(module))
    for part in parts:
        part.module.forward = MethodType(part.forward, part.module)
        applied.did("ops")
    for llama in llamas:
        hugging_face_llama.patch_loss(llama)
        applied.did("ops")
    if not parts and not llamas:
        applied.left("ops", _NOTHING)
    elif "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code has the old forwards in it; torch 2.13 guards them, older ones may not


def fusable_parts(module: nn.Module) -> int:
    """The number of parts that `with_our_ops` would change."""
    return sum(1 for _ in _parts(module)) + sum(1 for _ in _llamas(module))


def _llamas(module: nn.Module) -> Iterator[nn.Module]:
    """The Llamas of Transformers whose loss may be changed. Where a script has not imported Transformers' Llama there is none."""
    kind = getattr(sys.modules.get(_LLAMA), "LlamaForCausalLM", None)
    parts = module.modules() if kind is not None and not _is_spread(module) else ()
    return (part for part in parts if type(part) is kind and not hugging_face_llama.loss_refusal(part))


def _parts(module: nn.Module) -> Iterator[_Part]:
    """Norms and MLPs that have the forward of their class."""
    if _is_spread(module):
        return
    for part in module.modules():
        if hugging_face_llama.has_own_forward(part):
            try:
                forward = (_as_norm(part) or _as_mlp(part)) if _is_plain(part) else None
            except Exception:  # noqa: BLE001  (somebody else's forward may raise anything, and the script has to go on)
                continue
            if forward is not None:
                yield _Part(part, forward)


def _is_spread(module: nn.Module) -> bool:
    """Whether parts are copied to several devices in each forward, or have shards of weights."""
    return any(isinstance(part, nn.DataParallel) or type(part).__name__ in _SHARDED for part in module.modules())


def _is_plain(part: nn.Module) -> bool:
    """Whether the module's own parameters are whole and on a device, and nobody's hooks run with it."""
    own = [*part.parameters(recurse=False)]
    is_whole = all(type(weight) is nn.Parameter and not hasattr(weight, "ds_id") for weight in own)
    return is_whole and not hugging_face_llama.has_hooks(part) and all(weight.device.type != "meta" for weight in own)


def _as_norm(module: Any) -> Callable[..., Any] | None:
    """The forward of an RMSNorm by our op; None for another module. [Note: what a norm computes]"""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    eps = next((value for name in _EPSILONS if (value := getattr(module, name, None)) is not None), None)
    if names != ["weight"] or module.weight.dim() != 1 or [*module.children()] or not isinstance(eps, float):
        return None  # torch.nn.RMSNorm without an epsilon takes one by x's dtype, which is not known here
    theirs, width = type(module).forward, module.weight.shape[0]
    if width == 1 or module.weight.dtype not in _DTYPES or not module.training:
        return None
    results = _result_dtypes(module, eps)
    if not results:
        return None

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        if len(inputs) == 1 and not options and _is_taken(x := inputs[0]) and x.shape[-1:] == (width,):
            dtype = results.get((torch.is_autocast_enabled(x.device.type), x.dtype))
            if dtype is not None:
                return rms_norm(x, self.weight, eps, dtype=dtype)
        return theirs(self, *inputs, **options)

    return forward


def _result_dtypes(module: Any, eps: float) -> Mapping[tuple[bool, torch.dtype], torch.dtype]:
    """(autocast is on, x's dtype) -> the dtype of the norm's result, where it gives what rms_norm gives; empty for another norm."""
    device, width = module.weight.device, module.weight.shape[0]
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(2, 2, width, generator=generator, device="cpu") + 0.5
    scales = torch.tensor([eps**0.5, 0.05, 1.0, 20.0], device="cpu").view(2, 2, 1)
    rows = rows * scales * torch.linspace(0.5, 2.0, width, device="cpu")
    weight = (0.5 + torch.rand(width, generator=generator, device="cpu")).to(device, module.weight.dtype)
    twin = copy.copy(module)
    twin._parameters = {"weight": weight}
    seen: list[tuple[tuple[bool, torch.dtype], torch.dtype]] = []
    near: list[Tensor] = []
    with (
        torch.no_grad(),
        _kept_random_numbers(),
        warnings.catch_warnings(action="ignore"),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),  # what the module compiles itself is no compilation of the script
    ):
        for dtype in _DTYPES:
            x = rows.to(device, dtype)
            for autocast in (False, True):
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    y = _called(type(module).forward, twin, x)
                if y is not None and y.dtype in _DTYPES:
                    seen.append(((autocast, dtype), y.dtype))
                    near.append(_is_near(y, reference.rms_norm(x, weight, eps).to(y.dtype), (x, weight)))
    fits = torch.stack(near).tolist() if near else []  # the host waits once for a norm
    if any(not fit and dtype == torch.float32 for ((_, dtype), _), fit in zip(seen, fits, strict=True)):
        return {}
    return {key: dtype for (key, dtype), fit in zip(seen, fits, strict=True) if fit}


@contextlib.contextmanager
def _kept_random_numbers() -> Iterator[None]:
    """Python's random numbers go on as if nothing had been drawn."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _called(forward: Callable[..., Any], twin: Any, x: Tensor) -> Tensor | None:
    """What a norm's copy gives; None if it refuses x, as some refuse dtypes that are unlike, or gives something else."""
    try:
        y = forward(twin, x)
    except RuntimeError:
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None


def _is_near(theirs: Tensor, ours: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    most = max(_MOST_OFF[tensor.dtype] for tensor in (theirs, *inputs))
    theirs, ours = theirs.float(), ours.float()
    off, largest = (theirs - ours).abs().amax(-1), ours.abs().amax(-1)
    return (theirs.isfinite().all(-1) & (off <= most * largest) & (largest > 0)).all()


def _is_taken(x: Any) -> bool:
    """Whether our ops take x with the result that plain code would have: no subclass, no other order in memory."""
    return type(x) is Tensor and x.is_contiguous()


def _as_mlp(module: Any) -> Callable[..., Any] | None:
    """The forward of a SwiGLU MLP by our op; None for another module. [Note: what an MLP computes]"""
    theirs, activation = type(module).forward, getattr(module, "act_fn", None)
    code = getattr(theirs, "__code__", None)
    if code is None or not any(_is_alike(code, known.__code__) for known in _LLAMAS_MLP) or not _is_silu(activation):
        return None

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        if len(inputs) == 1 and not options:
            gate, up = self.gate_proj(inputs[0]), self.up_proj(inputs[0])
            if _is_taken(gate) and _is_taken(up) and gate.shape == up.shape and gate.dtype == up.dtype:
                return self.down_proj(swiglu(gate, up))
            return self.down_proj(self.act_fn(gate) * up)
        return theirs(self, *inputs, **options)

    return forward


def _is_silu(activation: Any) -> bool:
    if not isinstance(activation, nn.Module) or not _is_plain(activation):
        return False
    is_known = type(activation) is nn.SiLU or type(activation).__module__.startswith("transformers.")
    return is_known and type(activation).__name__ in _SILU and hugging_face_llama.has_own_forward(activation)


def _in_one_line(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _in_two_lines(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504  (as Transformers has it)


_LLAMAS_MLP: tuple[Any, ...] = (_in_one_line, _in_two_lines)


def _is_alike(code: CodeType, known: CodeType) -> bool:
    """Whether two functions have the same instructions and names."""
    return (code.co_code, code.co_names, code.co_argcount) == (known.co_code, known.co_names, known.co_argcount)
