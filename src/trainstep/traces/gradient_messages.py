"""Counts the all-reduces of gradients in a step, with their elements: `gradient_messages(read_work(trace))`.

The trace must have shapes, from which a message's elements are counted. DDP sends one bucket per message, and each gradient once in
every backward pass that synchronises. So sent elements over trained elements is the number of such passes. All-reduces in the
forward phase do not count.
"""

import math
import statistics

from trainstep.traces.communication import read_communication
from trainstep.traces.kineto import Range
from trainstep.traces.work import TraceWork

_ALL_REDUCES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")
_FEW = 8
"""The fewest messages from which a fixed time per message is estimated."""


def gradient_messages(work: TraceWork) -> dict[str, float]:
    """The facts gradient_messages, gradient_message_elements, gradient_messages_asked_s (per step) and gradient_message_fixed_s.

    The fixed time of a message is the median duration of the shorter half of the trace's messages, if there are at least 8. The
    time of asking is the host's. Empty if no message was sent.
    """
    attribution = work.attribution
    asked = [opened for opened in attribution.trace.ranges if opened.name in _ALL_REDUCES and opened.shapes]
    asked = [opened for opened in asked if attribution.place_at(opened.thread, opened.start_ns).phase != "forward"]
    if not asked:
        return {}
    steps = len(work.steps)
    elements = sorted(_elements(opened) for opened in asked)
    asked_s = sum(opened.duration_ns for opened in asked) / 1e9
    facts = {"gradient_messages": len(asked) / steps, "gradient_message_elements": sum(elements) / steps}
    facts["gradient_messages_asked_s"] = asked_s / steps
    times_s = sorted(message.duration_s for message in read_communication(work).messages)
    if len(times_s) >= _FEW:
        facts["gradient_message_fixed_s"] = statistics.median(times_s[: len(times_s) // 2])
    return facts


def _elements(opened: Range) -> int:
    """The number of elements of the tensors in an op's first argument, a list."""
    listed = opened.shapes[0] if opened.shapes else ()
    return sum(math.prod(shape) for shape in listed if isinstance(shape, tuple) and shape)
