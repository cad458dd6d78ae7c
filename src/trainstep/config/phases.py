"""The phases of a training step. One enum names the trace span, the record's field, the predicted term and the chart."""

from enum import StrEnum


class Phase(StrEnum):
    """A phase ends where the next begins; together they are the step."""

    FORWARD = "forward"
    """Batch on the device -> loss."""
    BACKWARD = "backward"
    """`loss.backward()`, with any communication that hides inside it."""
    GRAD_SYNC = "grad_sync"
    """End of backward -> last gradient ready: the exposed part of communication. Absent on one process."""
    OPTIMIZER = "optimizer"
    """Unscale, clip, step, zero_grad."""
