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
    A parameter's state holds `master` beside what the class keeps; `state_dict` has both, and `load_state_dict` gives the
    parameters their masters' values. ValueError for a parameter that is not fp16 or bf16.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_cls: Callable[..., torch.optim.Optimizer] = AdamW, **options: Any
    ) -> None:
        self._masters: dict[Tensor, nn.Parameter] = {}
        super().__init__(params, options)
        groups = [
            {**group, "params": [self._masters[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        self._inner = optimizer_cls(groups, **options)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Further parameters."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for parameter in added["params"]:
            if parameter.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"params: a {parameter.dtype} parameter needs no master weight; take the optimizer itself"
                )
            self._masters[parameter] = nn.Parameter(parameter.detach().float())
            self._masters[parameter].grad_dtype = None  # a narrow gradient is taken as it is
        if hasattr(self, "_inner"):
            masters = [self._masters[parameter] for parameter in added["params"]]
            self._inner.add_param_group({**added, "params": masters})
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
        updated = [parameter for parameter in self._masters if parameter.grad is not None]
        takes_narrow = isinstance(self._inner, AdamW)
        for parameter in updated:
            gradient = parameter.grad
            assert gradient is not None
            self._masters[parameter].grad = gradient if takes_narrow else gradient.float()
        self._inner.step()
        masters: list[Tensor] = [self._masters[parameter] for parameter in updated]
        for master in masters:
            master.grad = None
        if updated:
            torch._foreach_copy_(updated, masters)
        if len(self._inner.state) != self._shown:
            self._show_state()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's: state by number of the parameter, groups with their options."""
        self._show_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A `state_dict` of this class. The base class would round what it loads to the parameters' dtype."""
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
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        self._show_state()

    def _in_order(self) -> list[tuple[Tensor, nn.Parameter]]:
        """As state_dict numbers them."""
        return [(parameter, self._masters[parameter]) for group in self.param_groups for parameter in group["params"]]

    def _show_state(self) -> None:
        for parameter, master in self._masters.items():
            self.state[parameter] = {MASTER: master.detach(), **self._inner.state.get(master, {})}
        self._shown = len(self._inner.state)
