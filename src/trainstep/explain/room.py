"""Finds whether a change to recompute less has room on the step's GPU, by plan's memory.

change, why = what_fits(config, gpu_bytes, {"recompute": "none"})   # ({}, "without recomputation the step would need 163 GiB ...")
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import RECOMPUTES, RunConfig
from trainstep.plan.prediction import Prediction, predict


def what_fits(
    config: RanksConfig | None, gpu_memory_bytes: int | None, change: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The change, or if plan says that it does not fit, the least recomputation below the step's own that does (empty: none).

    With the words that say so, empty for a change that fits, that recomputes as much, or whose memory plan does not know. A step
    whose allocator would have to return cached memory and ask again does not count as one that fits: that takes time.
    """
    if config is None or gpu_memory_bytes is None or "recompute" not in change:
        return dict(change), ""
    without = _predicted(config, gpu_memory_bytes, change)
    if without is None or without.spare_bytes >= 0:
        return dict(change), ""
    needed, memory = (nbytes / 2**30 for nbytes in (without.needed_bytes, gpu_memory_bytes))
    words = f"without recomputation the step would need {needed:,.0f} GiB of the GPU's {memory:,.0f}"
    for less in _less(config.run):
        after = _predicted(config, gpu_memory_bytes, less)
        if after is not None and after.spare_bytes >= 0:
            return less, words
    return {}, words


def _less(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Changes that recompute something, but less than the run does, the least first."""
    modes = RECOMPUTES[1 : RECOMPUTES.index(run.recompute)] if run.recompute in RECOMPUTES else ()
    yield from ({"recompute": mode} for mode in modes)
    if run.narrow_blocks:
        yield {"narrow_blocks": 0}


def _predicted(config: RanksConfig, gpu_memory_bytes: int, change: Mapping[str, Any]) -> Prediction | None:
    """The memory of the changed step; None if a config refuses it, or plan does not know it."""
    try:
        changed = replace(config, run=replace(config.run, **change))
        return predict(changed, gpu_memory_bytes=gpu_memory_bytes)
    except ValueError:
        return None
