"""Peers: a missing package is named with its version; with stub modules in their places, arguments and outputs are the op's."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainstep.config.op import HAVE, PACKAGES, OpConfig
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.op.implementations import REFERENCES, function_of, why_refused
from trainstep.measure.op.peers import EPS, PEERS, installed_version
from trainstep.measure.op.tensors import random_tensors

SIZES: dict[str, dict[str, int]] = {
    "rms_norm": {"tokens": 6, "width": 8},
    "add_rms_norm": {"tokens": 6, "width": 8},
    "rotary": {"tokens": 6, "heads": 4, "key_heads": 2, "head_dim": 8},
    "swiglu": {"tokens": 6, "width": 8},
    "linear_cross_entropy": {"tokens": 6, "width": 8, "vocabulary": 10},
}


def applied(function: Callable[..., Any]) -> SimpleNamespace:
    """A stub of a class of torch.autograd.Function."""
    return SimpleNamespace(apply=function)


def liger() -> dict[str, Any]:
    """Functions with the parameters of liger_kernel.ops 0.8.5, which compute the references."""

    def rms_norm(
        X: Any, W: Any, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
    ) -> Any:
        assert (eps, offset, casting_mode, in_place) == (EPS, 0.0, "llama", False)
        return REFERENCES["rms_norm"](X, W)[0]

    def add(X: Any, R: Any, W: Any, eps: float, offset: float, casting_mode: str, in_place: bool) -> Any:
        assert (eps, offset, casting_mode, in_place) == (EPS, 0.0, "llama", False)
        return REFERENCES["add_rms_norm"](X, R, W)

    def rope(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any, unsqueeze_dim: int, rotary_dim: int) -> Any:
        assert (position_ids, unsqueeze_dim, rotary_dim) == (None, 1, 2 * cos.shape[-1])
        return REFERENCES["rotary"](q, k, cos, sin)

    return {
        "LigerRMSNormFunction": applied(rms_norm),
        "LigerFusedAddRMSNormFunction": applied(add),
        "LigerRopeFunction": applied(rope),
        "LigerFusedGateUpSiLUMulFunction": applied(lambda y: REFERENCES["swiglu"](y)[0]),
        "LigerFusedLinearCrossEntropyFunction": applied(
            lambda _input, weight, target: (
                *REFERENCES["linear_cross_entropy"](_input, weight, target),
                None,
                None,
                None,
            )
        ),
    }


def quack_rmsnorm(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = 1e-6, prenorm: bool = False
) -> Any:
    assert (eps, prenorm) == (EPS, residual is not None)
    return REFERENCES["rms_norm"](x, weight)[0] if residual is None else REFERENCES["add_rms_norm"](x, residual, weight)


def quack_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    assert x.shape[1] == cos.shape[0], "positions are the second dimension"
    x_BHSD = x.transpose(1, 2)
    return REFERENCES["rotary"](x_BHSD, x_BHSD, cos, sin)[0].transpose(1, 2)


STUBS: dict[str, dict[str, Any]] = {
    "liger_kernel.ops": liger(),
    "quack.rmsnorm": {"rmsnorm": quack_rmsnorm},
    "quack.rotary": {"apply_rotary_emb": quack_rotary},
    "quack.linear_cross_entropy": {
        "chunked_linear_cross_entropy": lambda x, weight, target: REFERENCES["linear_cross_entropy"](x, weight, target)[
            0
        ]
    },
    "cudnn.ops.norm": {"rms_norm": lambda input, weight, bias=None, eps=1.0: REFERENCES["rms_norm"](input, weight)[0]},
}


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub modules with the names of the packages' modules."""
    for name, objects in STUBS.items():
        for parent in (".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 2)):
            module = sys.modules.get(parent) or ModuleType(parent)
            monkeypatch.setitem(sys.modules, parent, module)
        vars(sys.modules[name]).update(objects)


def config_of(implementation: str, op: str) -> OpConfig:
    return OpConfig(op=op, implementation=implementation, device="cuda", **SIZES[op])  # type: ignore[arg-type]


def test_every_op_that_a_package_has_stands_in_the_table():
    assert set(PEERS) == {(name, op) for name in PACKAGES for op in HAVE[name]}


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize(("implementation", "op"), PEERS)
def test_a_peer_is_called_as_its_package_takes_it(implementation: str, op: str):
    config = config_of(implementation, op)
    tensors = random_tensors(config, torch.device("cpu"))
    outputs = function_of(config)(**tensors.arguments)
    assert isinstance(outputs, tuple)
    for output, expected in zip(outputs, REFERENCES[op](**tensors.arguments), strict=True):
        assert torch.equal(output, expected)
    assert len(outputs) == len(tensors.gradients)
    gradients = torch.autograd.grad(outputs, tuple(tensors.leaves.values()), tensors.gradients)
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in tensors.leaves.values()]


@pytest.mark.parametrize(("implementation", "op"), PEERS)
def test_a_missing_package_is_named_with_its_version(implementation: str, op: str, monkeypatch: pytest.MonkeyPatch):
    for name in {name.split(".")[0] for name in STUBS}:
        monkeypatch.setitem(sys.modules, name, None)
    package, tested = PACKAGES[implementation]
    with pytest.raises(CellFailed) as caught:
        function_of(config_of(implementation, op))
    assert caught.value.failure.kind == "import_error"
    words = f"implementation: {implementation} is not installed; pip install {package}=={tested} (import "
    assert caught.value.failure.message.startswith(words)


def test_a_package_without_the_function_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ModuleType("liger_kernel.ops"))
    with pytest.raises(CellFailed, match=r"import liger_kernel\.ops: it has no LigerRopeFunction"):
        function_of(config_of("liger", "rotary"))


def test_a_peers_refusal_is_a_sentence_and_our_own_error_is_a_fault():
    reason = why_refused(config_of("quack", "rotary"), AssertionError("headdim must be divisible by 8"))
    assert reason == "implementation: quack does not take this case: headdim must be divisible by 8"
    assert why_refused(config_of("trainstep", "rotary"), ValueError("q, k: must be")) is None
    assert why_refused(config_of("liger", "rotary"), TypeError("apply() got an unexpected argument")) is None
    resources = type("OutOfResources", (Exception,), {})("out of resource: shared memory")
    assert "does not fit this GPU" in (why_refused(config_of("trainstep", "rotary"), resources) or "")


def test_the_version_of_a_package_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainstep.measure.op.peers.version", lambda package: "0.9.1")
    assert installed_version("liger") == "liger-kernel 0.9.1"
    assert installed_version("eager") == ""
