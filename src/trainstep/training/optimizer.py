"""AdamW in torch's three implementations and ours, with fp32 master weights, and how a parallel strategy wraps it.

The wrapping types stand here and not in parallelism.py, which imports every strategy, so that a step of one process
imports none of them.

[Note: master weights] A bf16 weight has 8 significant bits: an update smaller than 1/256 of the weight is lost, and most
updates are smaller. So the optimizer keeps each weight in fp32 and updates that copy, and the model computes with its
rounding (Micikevicius 2018, "Mixed Precision Training", section 3.1). AdamW then takes 2 (weight) + 2 (gradient) + 4 + 4 +
4 (master, two moments) = 16 bytes per parameter, like fp32; but what autograd keeps and matmuls read is half as large,
without autocast's casts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainstep.ops.adamw import AdamW
from trainstep.parallel.gradient_sync import GradientSync
from trainstep.parallel.ranks import Ranks

MASTER = "master"
"""The name of the fp32 weight in a parameter's state."""

OptimizerClass = Callable[..., torch.optim.Optimizer]


def adamw_named(implementation: str) -> OptimizerClass:
    """The class of the implementation: ours, or torch's."""
    return AdamW if implementation == "trainstep" else torch.optim.AdamW


def with_masters(optimizer_cls: OptimizerClass) -> OptimizerClass:
    """Constructs MasterWeights around the class. It has the name of the class, by which a parallel strategy knows an optimizer."""

    def construct(params: Iterable[Any], **options: Any) -> MasterWeights:
        return MasterWeights(params, optimizer_cls, **options)

    construct.__name__ = getattr(optimizer_cls, "__name__", str(optimizer_cls))
    construct.__qualname__ = f"MasterWeights of {construct.__name__}"
    return construct


def adamw_options(implementation: str, *, learning_rate: float) -> dict[str, Any]:
    """AdamW's options (Loshchilov 2019); torch's class runs as a loop over parameters, in foreach groups, or fused."""
    if implementation == "trainstep":
        return {"lr": learning_rate}
    return {"lr": learning_rate, "foreach": implementation == "foreach", "fused": implementation == "fused"}


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A module and an optimizer under a parallel strategy.

    `module` is the module to call; torch's wrappers may replace the module that was given to them.
    """

    module: nn.Module
    gradient_sync: GradientSync | None
    optimizer: torch.optim.Optimizer | None


class Wrap(Protocol):
    """Wraps a module and constructs its optimizer, if a class is given.

    Both in one call, because some wrappers must exist before the optimizer, and some are part of it.
    """

    def __call__(
        self, module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]
    ) -> Wrapped: ...


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The ranks to which this process belongs, and how they wrap a module."""

    ranks: Ranks
    wrap: Wrap
    makes_nodes: bool = False
    """Whether wrapping makes the autograd nodes that accumulate gradients, as torch's DDP does. [Note: one stream] in capture/"""


def unwrapped(module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]) -> Wrapped:
    """The module and its optimizer in a single process."""
    return Wrapped(module=module, gradient_sync=None, optimizer=optimizer_over(module, optimizer_cls, options))


def optimizer_over(
    module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer | None:
    """The optimizer of a module's trained parameters; None without a class."""
    if optimizer_cls is None:
        return None
    return optimizer_cls((parameter for parameter in module.parameters() if parameter.requires_grad), **options)


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of AdamW that its first update would make, and change nothing else.

    By an update with gradients of 0 at a learning rate of 0, which leaves weights and moments as they are, and whose step is taken
    back. For memory: state that exists before the first forward has segments of its own, and does not lie scattered among those
    that activations left. The gradients are None afterwards. Parameters that no loss uses get state, too, and are never updated.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter in parameters:
            parameter.grad = None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


class MasterWeights(torch.optim.Optimizer):
    """Runs `optimizer_cls(params, **options)` on fp32 copies and rounds them into `params` after each step.

    [Note: master weights] Groups and their options belong to this optimizer: schedulers change them here. Gradients have
    the parameters' dtype; trainstep's AdamW takes them as they are and writes the parameters in the same pass; for other
    classes `step` copies each gradient to fp32 (4 bytes per parameter more, while it runs) and rounds the masters
    afterwards. A value that is copied into a parameter between steps, from a checkpoint for example, also becomes its
    master's, unless it is the master's rounding. The state of a parameter holds `master` beside what the class keeps;
    `state_dict` has both, and `load_state_dict` gives the parameters their masters' values. Raises ValueError for a
    parameter that is not fp16 or bf16.

    On several ranks a sharded optimizer makes one over what a rank owns, so masters are sharded like the rest of the state.
    """

    counts_steps_by_tensor = True
    """True as far as `inner` counts so too: may_step_by_unit (parallel/units.py) asks both."""
    loads_parameters = True
    """Tells sharded optimizers that load_state_dict changes parameters, which other ranks must then receive."""

    def __init__(
        self, params: Iterable[Any], optimizer_cls: Callable[..., torch.optim.Optimizer] = AdamW, **options: Any
    ) -> None:
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._versions: dict[Tensor, int] = {}
        """Parameter -> its version when it was last equal to its master's rounding."""
        super().__init__(params, options)
        groups = [
            {**group, "params": [self._masters[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = optimizer_cls(groups, **options)
        """The optimizer of the masters."""
        self._round_in_update()
        self._take_options()
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        added: list[Tensor] = [params] if isinstance(params, Tensor) else list(params)
        for parameter in added:
            if parameter.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"params: a {parameter.dtype} parameter needs no master weight; use the optimizer itself"
                )
        super().add_param_group({**param_group, "params": added})
        for parameter in added:
            self._masters[parameter] = nn.Parameter(parameter.detach().float())
            self._versions[parameter] = parameter._version
        if hasattr(self, "inner"):
            self.inner.add_param_group({**param_group, "params": [self._masters[parameter] for parameter in added]})
            self._round_in_update()
            self._take_options(len(self.param_groups) - 1)
            self._show_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and round them into the parameters.

        As in any optimizer, `param_groups` may hold a part of the parameters while it runs: the others stay as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [parameter for group in self.param_groups for parameter in group["params"]]
        self._take_changes(stepped)
        updated = [parameter for parameter in stepped if parameter.grad is not None]
        for parameter in updated:
            gradient = parameter.grad
            assert gradient is not None
            self._masters[parameter].grad_dtype = None  # allows a gradient narrower than its fp32 master
            self._masters[parameter].grad = gradient if self._rounds else gradient.float()
        whole = self.inner.param_groups
        self.inner.param_groups = [
            {**group, "params": [self._masters[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        try:
            self.inner.step()
        finally:
            self.inner.param_groups = whole
        masters: list[Tensor] = [self._masters[parameter] for parameter in updated]
        for tensor in masters:
            tensor.grad = None
        if updated and not self._rounds:
            torch._foreach_copy_(updated, masters)
        self._versions |= {parameter: parameter._version for parameter in stepped}
        if len(self.inner.state) != self._shown:
            self._show_state()
        return loss

    def values_changed(self, params: Iterable[Tensor]) -> None:
        """Tell it of values that were written to these parameters through other tensors, which it cannot notice."""
        self._versions |= dict.fromkeys(params, -1)

    def state_dict(self) -> dict[str, Any]:
        """The state by number of the parameter, and the groups with their options, as in torch's optimizers."""
        self._show_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class. Raises ValueError for the state of another optimizer."""
        # Not through the base class, which would round the state to the parameters' dtype.
        if any(MASTER not in state_dict["state"].get(index, {}) for index in range(len(self._masters))):
            raise ValueError("state_dict: has no master weights; it belongs to another optimizer")
        inner_state = {
            index: {name: value for name, value in state.items() if name != MASTER}
            for index, state in state_dict["state"].items()
        }
        self.inner.load_state_dict(
            {**state_dict, "state": {index: state for index, state in inner_state.items() if state}}
        )
        with torch.no_grad():
            in_order = [(param, self._masters[param]) for group in self.param_groups for param in group["params"]]
            for index, (parameter, master) in enumerate(in_order):  # state_dict numbers parameters in this order
                master.copy_(state_dict["state"][index][MASTER])
                parameter.copy_(master)
                self._versions[parameter] = parameter._version
        self._take_options()
        self._show_state()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_masters", "_versions", "inner", "_shown")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._round_in_update()
        # The versions of copied parameters start again at zero.
        self._versions = {parameter: parameter._version for parameter in self._masters}

    @property
    def _rounds(self) -> bool:
        """Whether the inner optimizer is ours: it takes narrow gradients, and its update writes the parameters too."""
        return isinstance(self.inner, AdamW)

    def _round_in_update(self) -> None:
        if isinstance(self.inner, AdamW):
            self.inner.rounded = {master: parameter for parameter, master in self._masters.items()}

    def _take_changes(self, params: Iterable[Tensor]) -> None:
        """Give masters the values that were written to their parameters since the last step.

        A master of which the value is the rounding stays: so module and optimizer load from a checkpoint in either order.
        """
        for parameter in params:
            if parameter._version != self._versions[parameter]:
                master = self._masters[parameter]
                kept = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(kept, master, parameter.to(master.dtype)))

    def _take_options(self, first: int = 0) -> None:
        """Copy the options of the inner groups from `first` on, with the class's defaults, into this optimizer's groups."""
        for group, inner in zip(self.param_groups[first:], self.inner.param_groups[first:], strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})

    def _show_state(self) -> None:
        """Copy the inner optimizer's state, with the masters, into this optimizer's state."""
        for parameter, master in self._masters.items():
            self.state[parameter] = {MASTER: master.detach(), **self.inner.state.get(master, {})}
        self._shown = len(self.inner.state)
