"""What selective recomputation keeps of a block: the results of matmuls and of attention; and the modes that keep and give them.

    keeping = Keeping("selective", needed)
    with keeping: forward                    # under torch's checkpoint, which keeps nothing else
    with Kept(keeping): forward again        # kept results are given and not computed

[Note: what is kept] A mode sees every operator that reaches the dispatcher, ours included (flash_attention, rms_norm, swiglu,
rotary: torch.library's), and of a torch.autograd.Function those that run inside. What `swiglu_linear` saves, it saves after its
matmul has run, so that matmul's result is kept; in our model it is the next block's input, which is kept anyway. The result of a
matmul behind which nothing is saved (a block's last, as a rule) would be kept for nothing: `needed` leaves it out. An attention
that drops values at random is computed again, because the random numbers behind it would be others if it were not. Plain
attention's scores are larger than q and k, and are computed again.

Torch's own contexts count every operator, and fail where autocast's cache has a weight's cast in forward and not in backward. So
they serve only what torch.compile traces, whose partitioner reads their policy.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainstep.ops import flash_attention  # noqa: F401  (defines trainstep::flash_attention)

_aten = torch.ops.aten
_MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.convolution.default, _aten._scaled_mm.default})
"""Matmuls with weights; `narrow` keeps only results that are no larger than the first of the factors."""
_BATCHED = frozenset({_aten.bmm.default, _aten.baddbmm.default})
"""Products of activations, as in plain attention: kept if no larger than their factors together."""
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._flash_attention_forward.default,
        _aten._efficient_attention_forward.default,
        torch.ops.trainstep.flash_attention.default,
    }
)


class Keeping(TorchDispatchMode):
    """Forward: keeps the first `needed` of the results that `mode` keeps. Counts all of them."""

    def __init__(self, mode: str, needed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.results: dict[int, list[tuple[Tensor, int]]] = {}
        """Number of the result -> its tensors with their versions."""
        self.mode = mode
        self._needed = needed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not keeps(self.mode, func, args, kwargs):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.count < self._needed:
            self.results[self.count] = [_kept(x) for x in ([result] if isinstance(result, Tensor) else result)]
        self.count += 1
        return result


class Kept(TorchDispatchMode):
    """Backward: gives the results that were kept, each once, in place of computing them."""

    def __init__(self, keeping: Keeping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeping = keeping

    def __enter__(self) -> Any:
        self._count = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not keeps(self._keeping.mode, func, args, kwargs):
            return func(*args, **kwargs)
        kept = self._keeping.results.pop(self._count, None)
        self._count += 1
        if kept is None:  # nothing behind it is needed, or backward runs for a second time
            return func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x._version != version for x, version in kept):
            raise RuntimeError(
                f"recompute: the block changes the result of {func} in place; take recompute block, which keeps no result"
            )
        return kept[0][0] if len(func._schema.returns) == 1 else tuple(x for x, _ in kept)


def _kept(x: Any) -> tuple[Any, int]:
    """The tensor without autograd's history, which it will get, and its version, which counts for the original too."""
    if not isinstance(x, Tensor):
        return x, 0
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        alias = x.detach()
    return alias, alias._version


def keeps(mode: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `mode` keeps the result of this call of an operator."""
    if func in _ATTENTION:
        return not _drops(func, args, kwargs)
    if func in _BATCHED:
        a, b = args[-2:]
        return bool(a.shape[0] * a.shape[1] * b.shape[2] <= a.numel() + b.numel())
    if func not in _MATMULS:
        return False
    if mode != "narrow" or func is _aten.convolution.default:
        return True
    a, b = args[1:3] if func is _aten.addmm.default else args[:2]
    return bool(b.shape[1] <= a.shape[1])


def _drops(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an attention drops values at random."""
    if "dropout_p" in kwargs:
        return bool(kwargs["dropout_p"])
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else len(args)
    return place < len(args) and bool(args[place])


def _selective_policy(_context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = keeps("selective", func, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _narrow_policy(_context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = keeps("narrow", func, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


TRACED_CONTEXTS = {
    "selective": functools.partial(create_selective_checkpoint_contexts, _selective_policy),
    "narrow": functools.partial(create_selective_checkpoint_contexts, _narrow_policy),
}
"""Without counts: a compiler keeps no result that nothing needs."""
