"""Logits that are computed when somebody first uses them: `late_logits(hidden, weight, ...)` stands for `hidden @ weight.T`.

A fused loss makes no logits, but a forward may return them beside its loss. Most training loops drop them; for those that do not,
the first use of this tensor computes them. It is in autograd's graph from the start, so that gradients go on to hidden and weight
whichever way it is used. Its shape, dtype and the like, `detach()` and `float()` need no logits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only


def late_logits(hidden: Tensor, weight: Tensor, *, matmul_dtype: torch.dtype, dtype: torch.dtype) -> "LateLogits":
    """(..., V) in `dtype`, from hidden (..., C) and weight (V, C), multiplied in `matmul_dtype`, as in the backward pass.

    It is in autograd's graph where hidden or weight is, unless it is made without gradients.
    The first use raises RuntimeError if hidden or weight were changed in place since, as by an optimizer's step. What changes a
    weight through its `.data` is not noticed.
    """
    late: LateLogits = _Head.apply(hidden, weight, matmul_dtype, dtype)  # type: ignore[no-untyped-call]
    return late


class _Source:
    """What the logits are computed from, and the logits once they are."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
        self._parts, self._dtype = (hidden, weight), dtype
        self._versions = self._seen_versions()
        self._logits: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._parts[0].shape[:-1], self._parts[1].shape[0])

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    def _seen_versions(self) -> list[int]:
        """How often each was changed in place; tensors of inference mode do not count."""
        return [0 if part.is_inference() else part._version for part in self._parts]

    def logits(self) -> Tensor:
        """The logits without a graph; the same tensor at each call."""
        if self._logits is None:
            if self._seen_versions() != self._versions:
                raise RuntimeError(
                    "ops=trainstep: logits beside a fused loss are computed when they are first used, and the head's weight or "
                    "input has changed since; use them before the optimizer's step, or run without ops=trainstep"
                )
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self._logits = F.linear(*(part.detach().to(self._dtype) for part in self._parts))
        return self._logits


class LateLogits(Tensor):
    """Stands for the logits (..., V) of `_source` in its dtype; the first function that needs their values computes them."""

    _source: _Source
    _computed: Tensor | None
    _with_graph: Tensor | None

    @staticmethod
    def __new__(cls, source: _Source, dtype: torch.dtype) -> "LateLogits":
        made: LateLogits = Tensor._make_wrapper_subclass(cls, source.shape, dtype=dtype, device=source.device)
        made._source, made._computed, made._with_graph = source, None, None
        return made

    def computed(self) -> Tensor:
        """An ordinary tensor of the logits without a graph; the same one at each call."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._computed is None:
                with torch.inference_mode(False), torch.no_grad():
                    self._computed = self._source.logits().to(self.dtype)
            return self._computed

    def as_tensor(self) -> Tensor:
        """The logits with their graph, if there is one; always in the same memory, so that what is written into them stays."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._with_graph is None and torch.is_grad_enabled() and self.requires_grad:
                self._with_graph = _Use.apply(self)  # type: ignore[no-untyped-call]
            return self.computed() if self._with_graph is None else self._with_graph

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        first: Any = next(iter(arguments), None)
        with torch._C.DisableTorchFunctionSubclass():
            if function in _WITHOUT_LOGITS:
                return function(*arguments, **options)
            is_alone = isinstance(first, LateLogits) and len(arguments) == 1 and not options
            if is_alone and first._computed is None and first._with_graph is None:
                if function is Tensor.detach:
                    return LateLogits(first._source, first.dtype)
                if function is Tensor.float:
                    return _Cast.apply(first, torch.float32)  # type: ignore[no-untyped-call]
        arguments, options = tree_map_only(LateLogits, LateLogits.as_tensor, (tuple(arguments), options))
        return function(*arguments, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """What gets past the method above, below autograd: custom functions, hooks, wrappers of a model's outputs."""
        whole = tree_map_only(LateLogits, LateLogits.computed, (tuple(arguments), options or {}))
        result = function(*whole[0], **whole[1])
        is_in_place = function._schema.is_mutable and arguments and isinstance(arguments[0], LateLogits)
        return arguments[0] if is_in_place else result


class _Head(torch.autograd.Function):
    """hidden, weight -> logits, which nobody computes yet."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, matmul_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.matmul_dtype = matmul_dtype
        ctx.set_materialize_grads(False)
        return LateLogits(_Source(hidden, weight, matmul_dtype), dtype)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor | None) -> Any:
        if dlogits is None:
            return None, None, None, None
        hidden, weight = ctx.saved_tensors
        with torch.autocast(dlogits.device.type, enabled=False):
            dlogits = dlogits.to(ctx.matmul_dtype)
            dhidden = (dlogits @ weight.to(ctx.matmul_dtype)).to(hidden.dtype) if ctx.needs_input_grad[0] else None
            rows = dlogits.reshape(-1, dlogits.shape[-1]).T
            columns = hidden.reshape(-1, hidden.shape[-1]).to(ctx.matmul_dtype)
            dweight = (rows @ columns).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dhidden, dweight, None, None


class _Use(torch.autograd.Function):
    """Late logits as an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, late: LateLogits) -> Tensor:
        return late.computed().detach()

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> Tensor:
        return dlogits


class _Cast(torch.autograd.Function):
    """Late logits in another dtype."""

    @staticmethod
    def forward(ctx: Any, late: LateLogits, dtype: torch.dtype) -> Tensor:
        ctx.dtype = late.dtype
        return LateLogits(late._source, dtype)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, None]:
        return dlogits.to(ctx.dtype), None


_PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_leaf", "grad_fn")
_WITHOUT_LOGITS = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.element_size,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_inference,
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    }
)
