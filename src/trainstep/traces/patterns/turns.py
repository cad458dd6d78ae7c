"""The share of a GPU's time in a step that other processes had: `interrupted_share(ops)`.

Processes share a GPU by taking turns, and the time of an interrupted kernel goes on counting. Ops with the same name, shapes and
dtypes, such as those of each layer, should take equally long, and a turn of a millisecond or two rarely hits a short one. So
whatever they take beyond their lower quartile was another process's turn. Left out are copies, which may go to different places,
messages, which wait for other ranks, and ops without recorded shapes.
"""

import statistics

from trainstep.traces.patterns.step_ops import NOTHING, StepOps, tensors

_LEAST_CALLS = 8
"""The fewest calls of an op, in all steps of the trace, from which a lower quartile is taken."""
_LEAST_SHARE = 0.2
"""The least share of the step's time in such ops from which they represent the others."""
_LONGEST_NS = 1_000_000
"""Longer ops are interrupted every time, so no call shows its time alone."""
_LEFT_OUT = ("copy_", "c10d::", "record_param_comms", "nccl")


def interrupted_share(ops: StepOps) -> float | None:
    """The share of the device's time in which it worked for others; None on a CPU, or if too few ops are alike."""
    if not ops.on_device:
        return None
    whole_ns, alike = 0, dict[tuple[object, ...], list[int]]()
    for opened in ops.all:
        time_ns = ops.own.get(id(opened), NOTHING).time_ns
        whole_ns += time_ns
        if time_ns and tensors(opened) and not any(word in opened.name for word in _LEFT_OUT):
            alike.setdefault((opened.name, str(opened.shapes), opened.dtypes), []).append(time_ns)
    quartiles = {key: statistics.quantiles(times, n=4)[0] for key, times in alike.items() if len(times) >= _LEAST_CALLS}
    alone_ns = {key: time_ns for key, time_ns in quartiles.items() if time_ns <= _LONGEST_NS}
    taken_ns = sum(sum(alike[key]) for key in alone_ns)
    if not taken_ns or taken_ns < _LEAST_SHARE * whole_ns:
        return None
    return max(0.0, 1 - sum(len(alike[key]) * time_ns for key, time_ns in alone_ns.items()) / taken_ns)
