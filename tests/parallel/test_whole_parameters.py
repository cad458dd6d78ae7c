"""FSDP's state dict: buffers and extra state, wrong and partial states, gradients of no_sync(), and devices."""

from typing import Any

import pytest
import torch
from torch import nn

from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import alone


class Counted(nn.Module):
    """A module with a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(3))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x * self.scale))).sum()

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def wrapped(seed: int = 0) -> FSDP:
    torch.manual_seed(seed)
    model = Counted()
    return FSDP(model, alone("cpu"), units=[model.inner])


def test_extra_state_and_buffers_load():
    saved, loaded = wrapped(1), wrapped()
    saved.module.count = 5
    saved.module.scale.fill_(2)
    state = saved.state_dict()
    assert loaded.load_state_dict(state) == nn.Module().load_state_dict({})
    assert loaded.module.count == 5
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items() if name != "_extra_state")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("scale", torch.tensor(9.0), r"scale has shape \(\), but in the module \(3,\)"),
        ("outer.weight", torch.ones(3, 1), r"outer.weight has shape \(3, 1\), but in the module \(1, 3\)"),
        ("outer.weight", 3, "outer.weight is a int, but in the module it is a tensor"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_changed(name: str, value: Any, sentence: str):
    sync = wrapped()
    before = sync.state_dict()
    with pytest.raises(ValueError, match=sentence):
        sync.load_state_dict({**wrapped(1).state_dict(), name: value})
    assert all(torch.equal(value, before[name]) for name, value in sync.state_dict().items() if name != "_extra_state")


def test_a_part_of_a_state_loads_if_strict_is_false():
    sync, state = wrapped(), wrapped(1).state_dict()
    keys = sync.load_state_dict({"inner.weight": state["inner.weight"], "other": torch.ones(1)}, strict=False)
    assert (keys.unexpected_keys, "inner.bias" in keys.missing_keys) == (["other"], True)
    assert torch.equal(sync.state_dict()["inner.weight"], state["inner.weight"])
    holder = nn.ModuleDict({"part": sync, "head": nn.Linear(2, 2)})
    holder.load_state_dict({"head.weight": torch.zeros(2, 2)}, strict=False)
    assert holder["head"].weight.abs().sum() == 0


def test_zero_grad_drops_the_gradients_of_no_sync():
    gradients = []
    for broken_off in (False, True):
        sync, x = wrapped(), torch.ones(2, 3)
        if broken_off:
            with sync.no_sync():
                sync(3 * x).backward()
            sync.zero_grad()
        sync(x).backward()
        sync.finish_gradient_synchronization()
        gradients.append([parameter.grad for parameter in sync.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_an_absent_device_is_refused(device: str):
    with pytest.raises(ValueError, match=f"device: '{device}' is not available here"):
        wrapped().full_state_dict(device=device)
