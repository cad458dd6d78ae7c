"""How much of a GPU's time in a step belonged to other processes: `interrupted_share(ops)`.

Processes on one GPU have it in turn, and a kernel that is interrupted counts as running all the while. Ops of the same name, shapes
and dtypes, such as a layer's in each layer, take equally long, and turns of a millisecond or two interrupt few that are shorter. So
what they take longer than their lower quartile was another process's turn. Copies are left out, which may go anywhere, messages,
which wait for other ranks, and ops whose shapes nobody noted.
"""

import statistics

from trainstep.traces.patterns.step_ops import NOTHING, StepOps, tensors

_LEAST_CALLS = 8
_LEAST_SHARE = 0.2
"""The share of the step's time that must be in such ops, to speak for the others."""
_LONGEST_NS = 1_000_000
"""Longer ones are interrupted each time, so that none shows what it takes alone."""
_LEFT_OUT = ("copy_", "c10d::", "record_param_comms", "nccl")


def interrupted_share(ops: StepOps) -> float | None:
    """The share of the device's time in which it worked for others; None on a CPU, or if too few ops are alike."""
    if not ops.on_device:
        return None
    whole, alike = 0, dict[tuple[object, ...], list[int]]()
    for opened in ops.all:
        time_ns = ops.own.get(id(opened), NOTHING).time_ns
        whole += time_ns
        if time_ns and tensors(opened) and not any(word in opened.name for word in _LEFT_OUT):
            alike.setdefault((opened.name, str(opened.shapes), opened.dtypes), []).append(time_ns)
    alone = {key: statistics.quantiles(times, n=4)[0] for key, times in alike.items() if len(times) >= _LEAST_CALLS}
    alone = {key: time_ns for key, time_ns in alone.items() if time_ns <= _LONGEST_NS}
    taken = sum(sum(alike[key]) for key in alone)
    if not taken or taken < _LEAST_SHARE * whole:
        return None
    return 1 - sum(len(alike[key]) * time_ns for key, time_ns in alone.items()) / taken
