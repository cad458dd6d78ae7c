"""Logits that are computed when somebody first uses them: `LateLogits(hidden, weight, dtype)` stands for `hidden @ weight.T`.

A fused loss makes no logits, but a forward may return them beside its loss. Most training loops drop them; for those that do not,
the first use of this tensor (any function of torch, or a method) computes them, with their graph to hidden and weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only


class LateLogits(Tensor):
    """(..., V) in `dtype`, from hidden (..., C) and weight (V, C), multiplied in `matmul_dtype`.

    RuntimeError at the first use if hidden or weight were changed in place since: then the logits cannot be had any more.
    """

    _parts: tuple[Tensor, Tensor]
    _matmul_dtype: torch.dtype
    _versions: list[int]
    _logits: Tensor | None

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, *, matmul_dtype: torch.dtype, dtype: torch.dtype) -> "LateLogits":
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: LateLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made._parts, made._matmul_dtype = (hidden, weight), matmul_dtype
        made._versions = [_version_of(part) for part in made._parts]
        made._logits = None
        return made

    def computed(self) -> Tensor:
        """The logits, an ordinary tensor; the same one at each call."""
        with torch._C.DisableTorchFunctionSubclass():
            wants_graph = torch.is_grad_enabled() and any(part.requires_grad for part in self._parts)
            if self._logits is None or (wants_graph and not self._logits.requires_grad):
                if [_version_of(part) for part in self._parts] != self._versions:
                    raise RuntimeError(
                        "ops=trainstep: logits beside a fused loss are computed when they are first used, and the weights have "
                        "changed since; use them before the optimizer's step, or run without ops=trainstep"
                    )
                hidden, weight = (part.to(self._matmul_dtype) for part in self._parts)
                with torch.autocast(self.device.type, enabled=False):
                    self._logits = F.linear(hidden, weight).to(self.dtype)
            return self._logits

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **(options or {}))
        arguments, options = tree_map_only(LateLogits, LateLogits.computed, (arguments, options or {}))
        return function(*arguments, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments, options = tree_map_only(LateLogits, LateLogits.computed, (arguments, options or {}))
        return function(*arguments, **options)


def _version_of(part: Tensor) -> int:
    """How often the tensor was changed in place; tensors of inference mode do not count."""
    return 0 if part.is_inference() else part._version


_SHAPES = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.element_size,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    }
)
"""What can be asked without the logits."""
