"""The cost of messages to a script's step: `messages_of(records, inspected, measured_s, on_device=False)`.

Exposed time is the median of the inspected steps, because inspected ranks wait for each other more or less by chance.

[Note: cores] A CPU's messages are sent by threads. If the ranks have fewer than two cores each, a sending thread takes its core
from computing, so half of the hidden time counts as exposed, too. Measured with two ranks on two cores, gradients sent in each of
four passes (docs/log.md, 2026-11-27): one loop gained 36 ms of a step of 254 ms, another 37 ms of 283 ms. Messages were under way
for 60 and 51 ms, of which 34 and 31 ms were exposed. A small message also costs the host the time of asking for it.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from trainstep.records.record import Record

_GRADIENT_BYTES = 4
"""Assumed bytes of an element, because a record has the elements of gradients without their dtype."""
_MOST_SENT_AGAIN = 0.75
"""The least share of the trained elements that a further pass sends: a wrapper may leave out frozen or unused parameters."""
_CORES_PER_RANK = 2
_OF_HIDDEN = 0.5


class Messages(NamedTuple):
    """The messages of one step.

    `fixed_s`: the fixed time of a message, whatever its bytes; 0 if unknown. `passes`: how often all gradients were sent.
    """

    exposed_s: float
    messages: int
    nbytes: float
    fixed_s: float
    passes: int


def messages_of(
    records: Sequence[Record], inspected: Sequence[Record], measured_s: float, *, on_device: bool
) -> Messages:
    """The messages of one rank's run. `inspected`: those of its records that have an inspected step."""
    last = inspected[-1] if inspected else records[-1]
    fixed = [fixed_s for record in inspected if (fixed_s := record.fact("gradient_message_fixed_s"))]
    count = last.fact("gradient_messages") or 0.0
    asked = [asked_s for record in inspected if (asked_s := record.fact("gradient_messages_asked_s"))]
    asked_s = statistics.median(asked) / count if asked and count and not on_device else 0.0
    exposed = [_exposed_s(record, measured_s, on_device=on_device) for record in inspected]
    return Messages(
        exposed_s=statistics.median(exposed) if exposed else 0.0,
        messages=round(count),
        nbytes=_GRADIENT_BYTES * (last.fact("gradient_message_elements") or 0.0),
        fixed_s=min(fixed) + asked_s if fixed else 0.0,  # in other steps messages wait for a late rank
        passes=_passes(last, records),
    )


def _exposed_s(record: Record, measured_s: float, *, on_device: bool) -> float:
    """Exposed time of a step's messages. A profiler lengthens a CPU's step and its messages, which are scaled. [Note: cores]"""
    exposed_s = record.fact("exposed_s") or 0.0
    if on_device:
        return float(exposed_s)
    hidden_s = max(0.0, (record.fact("communication_s") or 0.0) - exposed_s)
    ranks = record.fact("local_ranks") or record.config.get("ranks", 1)
    is_crowded = record.environment.cores < _CORES_PER_RANK * ranks
    scale = min(1.0, measured_s / (record.fact("profiled_step_s") or measured_s))
    return float(scale * (exposed_s + is_crowded * _OF_HIDDEN * hidden_s))


def _passes(last: Record, records: Sequence[Record]) -> int:
    """How often a step sent its gradients, at most once per backward pass; 1 if each was sent once or it is unknown."""
    sent, trained = last.fact("gradient_message_elements"), last.fact("trained_elements")
    steps = sum(
        len(column.values) + len(column.warmups) for record in records if (column := record.samples.get("step"))
    )
    passes = sum(record.fact("backward_passes") or 0 for record in records) / max(steps, 1)
    if not sent or not trained or passes < 1 + _MOST_SENT_AGAIN:
        return 1
    return max(1, min(round(passes), int(sent / trained + 1 - _MOST_SENT_AGAIN)))
