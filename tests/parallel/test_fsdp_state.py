"""FSDP's state dict: what another module's lacks, what is of another shape, what is no tensor, what no_sync() has kept."""

from typing import Any

import pytest
import torch
from torch import nn

from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import alone


class Counted(nn.Module):
    """With a buffer, and an extra state."""

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
    there, here = wrapped(1), wrapped()
    there.module.count = 5
    there.module.scale.fill_(2)
    state = there.state_dict()
    assert here.load_state_dict(state) == nn.Module().load_state_dict({})
    assert here.module.count == 5
    assert all(torch.equal(value, state[name]) for name, value in here.state_dict().items() if name != "_extra_state")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("scale", torch.tensor(9.0), r"scale is \(\), and the module's \(3,\)"),
        ("outer.weight", torch.ones(3, 1), r"outer.weight is \(3, 1\), and the module's \(1, 3\)"),
        ("outer.weight", 3, "outer.weight is a int, and the module's a tensor"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_changed(name: str, value: Any, sentence: str):
    sync = wrapped()
    before = sync.state_dict()
    with pytest.raises(ValueError, match=sentence):
        sync.load_state_dict({**wrapped(1).state_dict(), name: value})
    assert all(torch.equal(value, before[name]) for name, value in sync.state_dict().items() if name != "_extra_state")


def test_a_part_of_a_state_loads_where_that_is_asked_for():
    sync, given = wrapped(), wrapped(1).state_dict()
    found = sync.load_state_dict({"inner.weight": given["inner.weight"], "other": torch.ones(1)}, strict=False)
    assert (found.unexpected_keys, "inner.bias" in found.missing_keys) == (["other"], True)
    assert torch.equal(sync.state_dict()["inner.weight"], given["inner.weight"])
    holder = nn.ModuleDict({"part": sync, "head": nn.Linear(2, 2)})
    holder.load_state_dict({"head.weight": torch.zeros(2, 2)}, strict=False)
    assert holder["head"].weight.abs().sum() == 0


def test_zero_grad_drops_what_no_sync_has_kept():
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
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str):
    with pytest.raises(ValueError, match=f"device: '{device}' is not to be had here"):
        wrapped().full_state_dict(device=device)
