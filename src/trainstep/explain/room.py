"""Finds whether a change to recompute less has room on the step's GPU, by plan's memory.

change, why = with_room(evidence, {"recompute": "none"})    # ({}, "; without it the step would need 163 GiB of ...")
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainstep.config.run import RECOMPUTES, RunConfig
from trainstep.explain.evidence import Evidence
from trainstep.plan.prediction import Prediction, predict


def with_room(evidence: Evidence, change: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The change, or if plan says that it does not fit, the least recomputation below the step's own that does (empty: none).

    With the words that say so, empty for a change that fits, that recomputes as much, or whose memory plan does not know. A step
    whose allocator would have to return cached memory and ask again does not count as one that fits: that takes time.
    """
    if evidence.config is None or evidence.gpu_memory_bytes is None or "recompute" not in change:
        return dict(change), ""
    without = _predicted(evidence, change)
    if without is None or without.spare_bytes >= 0:
        return dict(change), ""
    needed, memory = (nbytes / 2**30 for nbytes in (without.needed_bytes, evidence.gpu_memory_bytes))
    words = f"; without it the step would need {needed:,.0f} GiB of the GPU's {memory:,.0f}"
    for less in _less(evidence.config.run):
        after = _predicted(evidence, less)
        if after is not None and after.spare_bytes >= 0:
            return less, words
    return {}, words


def _less(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Changes that recompute something, but less than the run does, the least first."""
    modes = RECOMPUTES[1 : RECOMPUTES.index(run.recompute)] if run.recompute in RECOMPUTES else ()
    yield from ({"recompute": mode} for mode in modes)
    if run.narrow_blocks:
        yield {"narrow_blocks": 0}


def _predicted(evidence: Evidence, change: Mapping[str, Any]) -> Prediction | None:
    """The memory of the changed step; None if a config refuses it, or plan does not know it."""
    assert evidence.config is not None
    try:
        config = replace(evidence.config, run=replace(evidence.config.run, **change))
        return predict(config, gpu_memory_bytes=evidence.gpu_memory_bytes)
    except ValueError:
        return None
