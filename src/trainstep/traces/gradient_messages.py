"""Counts the all-reduces that backward starts in a step, with their elements: `gradient_messages(read_work(trace))`.

The trace must have shapes, of which a message's elements are counted. DDP sends a bucket a message; in each backward pass that
synchronises, it sends each gradient once. So elements over trained elements are the passes that did.
"""

import math
import statistics

from trainstep.traces.communication import read_communication
from trainstep.traces.kineto import Range
from trainstep.traces.work import TraceWork

_ALL_REDUCES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")
_FEW = 8
"""Messages below which the time of a small one is not told from that of a large one."""


def gradient_messages(work: TraceWork) -> dict[str, float]:
    """gradient_messages, gradient_message_elements, gradient_messages_asked_s and gradient_message_fixed_s per step.

    The fixed time of a message is the median time of the smaller half of them, of which there must be 8; the time of asking is the
    host's. Nothing where no message is sent.
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
    """The elements of the tensors of its first argument, which is a list."""
    listed = opened.shapes[0] if opened.shapes else ()
    return sum(math.prod(shape) for shape in listed if isinstance(shape, tuple) and shape)
