"""`AdamW` (Loshchilov 2019) in one pass over memory; it replaces torch.optim.AdamW.

Each element's parameter, gradient and two moments are read once, and all but the gradient written once
(costs/transformer.py), for all tensors of a group and dtype in one launch. Unlike torch's AdamW it takes gradients of another
dtype than the parameters' without a copy: for example gradients in bf16, as BucketedDDP averages them, of fp32 parameters.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainstep.ops import reference
from trainstep.spans import span

try:
    from trainstep.ops.adamw_kernel import Launch, Operands, Settings
except ImportError:  # there is no triton for this platform, and no GPU that it could use
    Launch = None  # type: ignore[assignment,misc]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TORCH_ONLY = ("amsgrad", "maximize", "differentiable")


class AdamW(torch.optim.Optimizer):
    """AdamW whose update is one kernel on a GPU.

    `lr` may be a tensor: on the device, the kernel reads it, so that a replayed CUDA graph uses its current value.
    Moments have the parameter's dtype; arithmetic is in fp32, in fp64 for fp64 parameters. The kernel runs on a GPU;
    ops/reference.py runs on a CPU, for fp64, and for a parameter with gaps in memory. State is that of
    torch.optim.AdamW(fused=True), with `step` on the device, and each loads the other's state_dict. A CUDA graph may capture `step`
    after one step outside.

    GradScaler leaves unscaling and skipping to this optimizer: the kernel divides by the scale and writes nothing after an
    overflow, and the host does not wait; gradients themselves stay scaled. Of DTensors (torch's FSDP2) each rank's kernel updates
    the rank's own part. ValueError for complex parameters and sparse gradients.
    """

    _step_supports_amp_scaling = True
    counts_steps_by_tensor = True
    """Lets ShardedOptimizer.flat update a part of a group and send it before the next part."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr: must have one element, not {lr.numel()}")
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"{name}: must not be negative, but is {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: must be two numbers, at least 0 and below 1, but are {betas}")
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self.rounded: dict[Tensor, Tensor] = {}
        """Parameter -> a tensor of another dtype and the same shape and layout, to which each update rounds the parameter."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"fused": True})  # tells torch's AdamW how to continue with this state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. ValueError for a complex parameter."""
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            raise ValueError(
                "params: complex parameters are not supported; use torch.view_as_real, or torch.optim.AdamW"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also takes the state of torch's AdamW. ValueError for an option that this optimizer does not have."""
        super().__setstate__(state)
        # A copied optimizer has neither yet. Loading a state keeps the launches: captured graphs read their tables.
        self.__dict__.setdefault("_launches", {})
        self.__dict__.setdefault("rounded", {})
        for group in self.param_groups:
            for name in _TORCH_ONLY:
                if group.pop(name, False):
                    raise ValueError(
                        f"{name}: trainstep's AdamW does not support it; load this state into torch.optim.AdamW"
                    )
            for name in ("foreach", "capturable", "decoupled_weight_decay"):
                group.pop(name, None)
            group["fused"] = True
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self.state[parameter] |= _converted(self.state[parameter], parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with span("adamw"):
            for group in self.param_groups:
                by_kind: dict[tuple[Any, ...], list[Tensor]] = {}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        fits_kernel = self._fits_kernel(parameter, self._state_of(parameter))
                        rounded_dtype = self.rounded.get(parameter, parameter).dtype
                        kind = (parameter.device, parameter.dtype, parameter.grad.dtype, rounded_dtype, fits_kernel)
                        by_kind.setdefault(kind, []).append(parameter)
                for kind, parameters in by_kind.items():
                    *_, fits_kernel = kind
                    if fits_kernel:
                        # The first tensor is in the key: parts of a group may step separately, each with tables of its own.
                        self._launch((id(parameters[0]), *kind), parameters, group)
                    else:
                        self._update_by_reference(parameters, group)
        return loss

    def _fits_kernel(self, parameter: Tensor, state: dict[str, Any]) -> bool:
        """Whether the kernel can update the parameter, which has this state."""
        part = _local(parameter)
        return (
            self._has_kernel(parameter)
            and part.numel() > 0
            and parameter.dtype in _KERNEL_DTYPES
            and _local(state["exp_avg"]).stride() == part.stride()
            and _local(self.rounded.get(parameter, parameter)).stride() == part.stride()
            and _placements(parameter.grad) == _placements(parameter)
        )

    def _has_kernel(self, parameter: Tensor) -> bool:
        return parameter.is_cuda and Launch is not None

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The parameter's state, made if it has none yet."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _launch(self, key: tuple[Any, ...], parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        parts = [_local(parameter) for parameter in parameters]
        gradients = [
            _laid_out_like(part, _local(_gradient(parameter)))
            for part, parameter in zip(parts, parameters, strict=True)
        ]
        steps = [state["step"] for state in states]
        found_inf = _on(parameters[0].device, getattr(self, "found_inf", None))
        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:  # a list: given one tensor, `_foreach_add_` reads it on the host, which waits for the device
            torch._foreach_add_(steps, [(found_inf == 0).to(steps[0].dtype).reshape(())] * len(steps))
        operands = Operands(
            parts,
            gradients,
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [_local(self.rounded[p]) if p in self.rounded else part for p, part in zip(parameters, parts, strict=True)],
            steps,
        )
        beta1, beta2 = group["betas"]
        lr, scale, device = group["lr"], getattr(self, "grad_scale", None), parameters[0].device
        on_device = isinstance(lr, Tensor) and lr.device == device
        settings = Settings(
            lr=lr.float() if on_device else float(lr),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=_on(device, scale),
            found_inf=found_inf,
        )
        self._launches.setdefault(key, Launch())(operands, settings)
        # The kernel does not tell autograd, which must refuse to differentiate what needs the values before the update.
        torch.autograd.graph.increment_version(
            [*parameters, *(self.rounded[p] for p in parameters if p in self.rounded)]
        )

    def _update_by_reference(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():  # waits for the device; no kernel runs here
            return
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            state, gradient = self.state[parameter], _gradient(parameter)
            state["step"] += 1
            reference.adamw_(
                parameter,
                gradient if scale is None else gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / scale,
                state["exp_avg"],
                state["exp_avg_sq"],
                state["step"],
                lr=group["lr"],
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            if parameter in self.rounded:
                self.rounded[parameter].copy_(parameter)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ValueError("params: a gradient is sparse; build its embedding with sparse=False")
    return gradient


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which has no memory of its own; any other tensor itself."""
    # Not by isinstance: the import of torch.distributed.tensor takes a second.
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _placements(tensor: Tensor | None) -> Any:
    """How ranks share a DTensor; None for any other tensor."""
    return getattr(tensor, "placements", None)


def _on(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _converted(state: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state with `step` on the device, and moments in the memory layout of the parameter."""
    step = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)
    moments = {name: _laid_out_like(torch.empty_like(parameter), state[name]) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": step, **moments}


def _laid_out_like(other: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, in the memory layout of `other`."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)
