"""A pass by itself: the kernels that ran are named, it is launch-bound where the device waits, and its error is relative."""

from collections.abc import Sequence

import pytest
import torch

from trainstep.measure.step import lone_pass
from trainstep.measure.step.device_trace import DeviceEvent
from trainstep.measure.step.lone_pass import LonePass, device_facts, held_bytes, main_kernels, relative_error


class NoPass(LonePass):
    """A pass that does nothing, on whose device events are made up."""

    def before(self) -> None:
        return None

    def run(self, prepared: object) -> None:
        return None

    def why_refused(self, error: Exception, warned: Sequence[str]) -> str | None:
        return None


def test_main_kernels_are_the_longest_by_their_short_names():
    events = [
        DeviceEvent("void at::native::softmax<float, 4>(int)", 0, 50),
        DeviceEvent("forward_kernel", 50, 500),
        DeviceEvent("void at::native::softmax<float, 8>(int)", 500, 520),
        DeviceEvent("a", 520, 530),
        DeviceEvent("b", 530, 531),
    ]
    assert main_kernels(events) == "forward_kernel, at::native::softmax, a"
    cutlass_event = DeviceEvent("kernel_cutlass_kernel_flash_fwd_sm90ForwardSm90_object_at__tensor0000o1_None_0", 0, 9)
    assert main_kernels([cutlass_event]) == "kernel_cutlass_kernel_flash_fwd_sm90ForwardSm90"


@pytest.mark.parametrize(
    ("busy_s", "host_s", "launch_bound"), [(0.5, 0.95, True), (0.8, 0.94, False), (0.5, 0.5, True), (0.7, 0.5, False)]
)
def test_a_pass_is_launch_bound_where_the_device_waits_for_the_host(
    busy_s: float, host_s: float, launch_bound: bool, monkeypatch: pytest.MonkeyPatch
):
    events = [DeviceEvent("kernel", 0, round(busy_s * 1e9)), DeviceEvent("another", 0, 10)]
    monkeypatch.setattr(lone_pass, "device_events", lambda run, before: events)
    facts = device_facts(NoPass(device=torch.device("cuda")), [(1.0, host_s), (1.0, host_s)])
    assert {name: fact.value for name, fact in facts.items()} == {
        "which_ran": "kernel, another",
        "device_busy_s": busy_s,
        "launch_bound": launch_bound,
    }


def test_an_error_is_relative_to_the_largest_value_and_none_where_it_is_not_finite():
    exact = torch.tensor([float("-inf"), -4.0, 1.0], dtype=torch.float64)
    assert relative_error(torch.tensor([0.0, -4.0, 1.5]), exact) == 0.125
    assert relative_error(torch.tensor([0.0, float("nan"), 1.0]), exact) is None
    assert relative_error(torch.tensor([0.0]), exact[:1]) is None


def test_held_bytes_are_what_autograd_saves_beside_the_inputs():
    x = torch.randn(8, 4, requires_grad=True)
    assert held_bytes([x], lambda: (x.exp(),)) == 8 * 4 * 4, "the output, which exp keeps"
    assert held_bytes([x], lambda: (x * 2,)) == 8 * 4 * 4
    assert held_bytes([x], lambda: (x.exp().sin(),)) == 2 * 8 * 4 * 4
