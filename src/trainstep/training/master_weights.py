"""An optimizer over fp32 copies of narrow parameters (Micikevicius 2018, "Mixed Precision Training", section 3.1).

A bf16 weight has 8 bits: an update smaller than 1/256 of it is lost, and most are. So the optimizer keeps each weight in fp32,
updates that, and the model computes with its rounding. AdamW then costs 2 (weight) + 2 (gradient) + 4 + 4 + 4 (master, two moments)
= 16 bytes a parameter, as fp32 does, but what autograd keeps and matmuls read is half as large, without autocast's casts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.ops.adamw import AdamW

MASTER = "master"
"""The weight's name in a parameter's state."""


class MasterWeights(torch.optim.Optimizer):
    """`optimizer_cls(params, **options)`, but it updates fp32 copies; `params` become their rounding after each step.

    Groups and their options are this optimizer's: schedulers change them here. Gradients have the parameters' dtype; trainstep's
    AdamW takes them as they are, for other classes each is copied to fp32 during `step` (4 bytes a parameter more, for as long).
    Values that are copied into a parameter between steps (a checkpoint's) become its master's. A parameter's state holds
    `master` beside what the class keeps; `state_dict` has both, and `load_state_dict` gives the parameters their masters' values.
    ValueError for a parameter that is not fp16 or bf16.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_cls: Callable[..., torch.optim.Optimizer] = AdamW, **options: Any
    ) -> None:
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._versions: dict[Tensor, int] = {}
        """Of parameters, when they were last their masters' rounding."""
        super().__init__(params, options)
        groups = [
            {**group, "params": [self._masters[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        self._inner = optimizer_cls(groups, **options)
        self._take_options()
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Further parameters."""
        params = param_group["params"]
        added: list[Tensor] = [params] if isinstance(params, Tensor) else list(params)
        for parameter in added:
            if parameter.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"params: a {parameter.dtype} parameter needs no master weight; take the optimizer itself"
                )
        super().add_param_group({**param_group, "params": added})
        for parameter in added:
            self._masters[parameter] = nn.Parameter(parameter.detach().float())
            self._versions[parameter] = parameter._version
        if hasattr(self, "_inner"):
            self._inner.add_param_group({**param_group, "params": [self._masters[parameter] for parameter in added]})
            self._take_options()
            self._show_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters, round them into the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        for parameter, master in self._masters.items():
            if parameter._version != self._versions[parameter]:  # loaded since
                master.copy_(parameter)
        updated = [parameter for parameter in self._masters if parameter.grad is not None]
        takes_narrow = isinstance(self._inner, AdamW)
        for parameter in updated:
            gradient = parameter.grad
            assert gradient is not None
            self._masters[parameter].grad_dtype = None  # a narrow gradient is taken as it is
            self._masters[parameter].grad = gradient if takes_narrow else gradient.float()
        self._inner.step()
        masters: list[Tensor] = [self._masters[parameter] for parameter in updated]
        for each in masters:
            each.grad = None
        if updated:
            torch._foreach_copy_(updated, masters)
        self._versions = {parameter: parameter._version for parameter in self._masters}
        if len(self._inner.state) != self._shown:
            self._show_state()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's: state by number of the parameter, groups with their options."""
        self._show_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A `state_dict` of this class, else ValueError. The base class would round what it loads to the parameters' dtype."""
        if any(MASTER not in state_dict["state"].get(index, {}) for index in range(len(self._masters))):
            raise ValueError("state_dict: has no master weights; it is another optimizer's")
        inner_state = {
            index: {name: value for name, value in held.items() if name != MASTER}
            for index, held in state_dict["state"].items()
        }
        self._inner.load_state_dict(
            {**state_dict, "state": {index: held for index, held in inner_state.items() if held}}
        )
        with torch.no_grad():
            for index, (parameter, master) in enumerate(self._in_order()):
                master.copy_(state_dict["state"][index][MASTER])
                parameter.copy_(master)
                self._versions[parameter] = parameter._version
        self._take_options()
        self._show_state()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_masters", "_versions", "_inner", "_shown")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions = {parameter: parameter._version for parameter in self._masters}  # a copy's begin anew

    def _take_options(self) -> None:
        """The inner groups' options, defaults included."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})

    def _in_order(self) -> list[tuple[Tensor, nn.Parameter]]:
        """As state_dict numbers them."""
        return [(parameter, self._masters[parameter]) for group in self.param_groups for parameter in group["params"]]

    def _show_state(self) -> None:
        for parameter, master in self._masters.items():
            self.state[parameter] = {MASTER: master.detach(), **self._inner.state.get(master, {})}
        self._shown = len(self._inner.state)
