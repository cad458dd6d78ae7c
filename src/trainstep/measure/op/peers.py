"""The functions of other packages that compute the same ops, each found and called in one place.

`PEERS["liger", "rms_norm"]()` imports what it needs, and gives a function of the op's tensors as implementations.py describes it,
or raises CellFailed with the package to install. Signatures are those of the versions in `PACKAGES` of config/op.py. Every option
stands at the package's default, except where that would write over a tensor which the next pass reads.
"""

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from trainstep.config.op import PACKAGES
from trainstep.measure.harness.failures import refused

EPS = 1e-5
"""The epsilon of both norms, for every implementation."""
Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


def installed_version(implementation: str) -> str:
    """The package of a peer and its version, as `liger-kernel 0.8.5`; empty for an implementation that is no package."""
    if implementation not in PACKAGES:
        return ""
    package, _ = PACKAGES[implementation]
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _named(implementation: str, module: str, name: str) -> Any:
    """An object of a peer's module. CellFailed, with the reason, if the module or anything it needs is absent."""
    package, tested = PACKAGES[implementation]
    reason = f"it has no {name}"
    try:
        value = getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError, RuntimeError) as error:  # OSError, RuntimeError: a shared library does not load
        value, reason = None, str(error)
    if value is None:
        raise refused(
            f"implementation: {implementation} is not installed; pip install {package}=={tested} (import {module}: {reason})",
            "import_error",
        )
    return value


def _liger_rms_norm() -> Function:
    norm = _named("liger", "liger_kernel.ops", "LigerRMSNormFunction")

    def run(x: Tensor, weight: Tensor) -> Outputs:
        # offset, casting mode; not in place, because that would write dx over dy.
        return (norm.apply(x, weight, EPS, 0.0, "llama", False),)

    return run


def _liger_add_rms_norm() -> Function:
    norm = _named("liger", "liger_kernel.ops", "LigerFusedAddRMSNormFunction")

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        y, h = norm.apply(x, residual, weight, EPS, 0.0, "llama", False)
        return y, h

    return run


def _liger_rotary() -> Function:
    rope = _named("liger", "liger_kernel.ops", "LigerRopeFunction")

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        # It rotates q and k, and backward their gradients, in place: each pass turns them further, which costs no time.
        # No positions; heads are dimension 1; cos and sin have half of the rotated width.
        rotated_q, rotated_k = rope.apply(q, k, cos, sin, None, 1, q.shape[-1])
        return rotated_q, rotated_k

    return run


def _liger_swiglu() -> Function:
    # LigerSiLUMulFunction takes gate and up apart, and would copy the halves of a joint projection first.
    swiglu = _named("liger", "liger_kernel.ops", "LigerFusedGateUpSiLUMulFunction")

    def run(x: Tensor) -> Outputs:
        return (swiglu.apply(x),)

    return run


def _liger_loss() -> Function:
    loss = _named("liger", "liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction")

    def run(x: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
        return (loss.apply(x, weight, targets)[0],)

    return run


def _quack_rms_norm() -> Function:
    rmsnorm = _named("quack", "quack.rmsnorm", "rmsnorm")

    def run(x: Tensor, weight: Tensor) -> Outputs:
        return (rmsnorm(x, weight, eps=EPS),)

    return run


def _quack_add_rms_norm() -> Function:
    rmsnorm = _named("quack", "quack.rmsnorm", "rmsnorm")

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        y, h = rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)
        return y, h

    return run


def _quack_rotary() -> Function:
    apply_rotary_emb = _named("quack", "quack.rotary", "apply_rotary_emb")

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        rotated_q, rotated_k = (apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
        return rotated_q, rotated_k

    return run


def _quack_loss() -> Function:
    loss = _named("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy")

    def run(x: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
        return (loss(x, weight, targets),)

    return run


def _cudnn_rms_norm() -> Function:
    rms_norm = _named("cudnn", "cudnn.ops.norm", "rms_norm")

    def run(x: Tensor, weight: Tensor) -> Outputs:
        return (rms_norm(x, weight, eps=EPS),)

    return run


PEERS: Mapping[tuple[str, str], Callable[[], Function]] = {
    ("liger", "rms_norm"): _liger_rms_norm,
    ("liger", "add_rms_norm"): _liger_add_rms_norm,
    ("liger", "rotary"): _liger_rotary,
    ("liger", "swiglu"): _liger_swiglu,
    ("liger", "linear_cross_entropy"): _liger_loss,
    ("quack", "rms_norm"): _quack_rms_norm,
    ("quack", "add_rms_norm"): _quack_add_rms_norm,
    ("quack", "rotary"): _quack_rotary,
    ("quack", "linear_cross_entropy"): _quack_loss,
    ("cudnn", "rms_norm"): _cudnn_rms_norm,
}
"""(implementation, op) -> what finds its function."""
