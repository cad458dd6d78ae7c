"""How much of a GPU's time in a step belonged to other processes: `interrupted_share(ops)`.

Processes on one GPU have it in turn, and a kernel that is interrupted counts as running all the while. Ops of the same name, shapes
and dtypes, such as a layer's in each layer, take equally long, and turns of a millisecond or two interrupt few of them. So what
they take longer than their lower quartile was another process's turn.
"""

import statistics

from trainstep.traces.patterns.step_ops import NOTHING, StepOps

_LEAST_CALLS = 8
_LEAST_SHARE = 0.2
"""The share of the step's time that must be in such ops, to speak for the others."""


def interrupted_share(ops: StepOps) -> float | None:
    """The share of the device's time in which it worked for others; None on a CPU, or if too few ops are alike."""
    if not ops.on_device:
        return None
    alike: dict[tuple[object, ...], list[int]] = {}
    for opened in ops.all:
        if time_ns := ops.own.get(id(opened), NOTHING).time_ns:
            alike.setdefault((opened.name, str(opened.shapes), opened.dtypes), []).append(time_ns)
    groups = [times for times in alike.values() if len(times) >= _LEAST_CALLS]
    taken = sum(map(sum, groups))
    if not taken or taken < _LEAST_SHARE * sum(map(sum, alike.values())):
        return None
    return 1 - sum(len(times) * statistics.quantiles(times, n=4)[0] for times in groups) / taken
