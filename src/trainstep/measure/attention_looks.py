"""What is looked at once behind the timed passes of the workload `attention`: memory, and what ran on the device."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention_inputs import Tensors
from trainstep.measure.device_time import DeviceEvent, device_events
from trainstep.ops.flash_attention.choice import describe_choice
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.intervals import union_s
from trainstep.traces.launch_bound import is_launch_bound
from trainstep.training.attention import Attention

Before = Callable[[], Tensor | None]
Run = Callable[[Tensor | None], tuple[Tensor, ...]]
"""The timed part of a pass, on what the untimed part before it made."""

_KERNELS_NAMED, _NAME_LENGTH = 3, 80
_ON_A_CPU = {
    "trainstep": "algorithm.py (tiled PyTorch)",
    "plain": "reference.py (plain PyTorch)",
    "plain_compiled": "reference.py, compiled",
}


def peak_facts(run: Run, before: Before, base_bytes: int) -> dict[str, Fact]:
    """The most that was allocated on the GPU during a pass, above `base_bytes`."""
    torch.cuda.reset_peak_memory_stats()
    run(before())
    return facts_of(peak_bytes=torch.cuda.max_memory_allocated() - base_bytes)


def held_bytes(tensors: Tensors, attend: Attention) -> int:
    """What a forward pass leaves allocated; on a CPU, storages that autograd saved, and the output's."""
    if tensors.q.is_cuda:
        before_bytes = torch.cuda.memory_allocated()
        output = attend(*tensors.leaves)
        held = torch.cuda.memory_allocated() - before_bytes
        del output
        return held
    inputs = {x.untyped_storage().data_ptr() for x in tensors.leaves}
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in inputs:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = attend(*tensors.leaves)
    note(output)
    return sum(storages.values())


def device_facts(
    config: AttentionConfig, run: Run, *, before: Before, times: Sequence[tuple[float, float]], chosen: str = ""
) -> dict[str, Fact]:
    """What ran, and whether the device waited for the host. `times`: (device, host) seconds of the timed passes.

    `chosen`: kernels_chosen's words, to stand behind the kernels' names.
    """
    if config.device == "cpu":
        name = config.implementation
        return facts_of(which_ran=_ON_A_CPU.get(name, f"torch's {name} backend"))
    events = device_events(run, before)
    words = "; ".join(filter(None, (main_kernels(events), chosen)))
    facts = facts_of(which_ran=words) if events else {}
    busy_s = union_s((event.start_ns, event.end_ns) for event in events)
    if busy_s and times:
        facts |= facts_of(device_busy_s=busy_s)
        time_s, host_s = (median(seconds) for seconds in zip(*times, strict=True))
        launch_bound = is_launch_bound(busy_s=busy_s, enqueue_s=host_s, step_s=time_s)
        facts |= facts_of(launch_bound=launch_bound)
    return facts


def kernels_chosen(config: AttentionConfig, tensors: Tensors) -> str:
    """Which of its kernels trainstep's attention chose and why; nothing of others."""
    if config.implementation != "trainstep":
        return ""
    by_head = {"BHSD": lambda x: x, "BSHD": lambda x: x.transpose(1, 2), "BSD": lambda x: x.unsqueeze(1)}[config.layout]
    return describe_choice(*map(by_head, tensors.leaves), backward=config.direction != "forward")


def main_kernels(events: Sequence[DeviceEvent]) -> str:
    """The names of the kernels that took the longest, without the types of what they take: a template's arguments, or what
    CuTe's DSL writes behind the object that a kernel is a method of."""
    total_ns: dict[str, int] = {}
    for event in events:
        name = event.name.removeprefix("void ")
        for types_begin in ("(", "<", "_object_at_"):
            name = name.partition(types_begin)[0]
        name = name.strip() or event.name
        total_ns[name] = total_ns.get(name, 0) + event.end_ns - event.start_ns
    ranked = sorted(total_ns, key=lambda name: -total_ns[name])
    return ", ".join(name[:_NAME_LENGTH] for name in ranked[:_KERNELS_NAMED])
