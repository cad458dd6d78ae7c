"""Sees what torch.compile does while a script trains: compilations with their reasons, and graph breaks, with their lines.

`Compilations.poll(step)` reads counters that torch keeps anyway; where nothing has been compiled it is a look into `sys.modules`.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_ROWS = 200
_LONGEST_REASON = 300
_OWN = str(Path(__file__).parents[2]) + os.sep
"""The folder of this package."""


class Compilations:
    """What was compiled since the watch began. Everything that a script compiled before counts as seen."""

    def __init__(self) -> None:
        self._utils = utils = sys.modules.get("torch._dynamo.utils")
        """torch's module that counts, once it is imported: looking it up at each step takes longer than the rest of a poll."""
        self._frames: int = utils.counters["frames"]["total"] if utils else 0
        self._breaks = len(utils.graph_break_reasons) if utils else 0
        self._before = _counted(utils) if utils else (0, 0)
        self._known = {_key(metrics) for metrics in utils.get_compilation_metrics()} if utils else set()
        self._rows: list[dict[str, Any]] = []
        self._compiled = False
        self.recompilations = 0

    def poll(self, step: int) -> bool:
        """Whether anything was compiled since the last call, in step `step`, whose rows are then noted."""
        utils = self._utils = self._utils or sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return False
        frames = utils.counters["frames"]["total"]
        if frames == self._frames:
            return False
        self._frames = frames
        self._compiled = True
        for metrics in utils.get_compilation_metrics():
            key = _key(metrics)
            if key in self._known or metrics.co_name is None:
                continue
            self._known.add(key)
            if str(metrics.co_filename).startswith(_OWN):  # hooks of ours, which a graph break leads into
                continue
            self.recompilations += metrics.recompile_reason is not None
            self._rows.append(
                {
                    "step": step,
                    "function": metrics.co_name,
                    "file": metrics.co_filename or "",
                    "line": metrics.co_firstlineno or 0,
                    "time_s": metrics.entire_frame_compile_time_s or 0.0,
                    "reason": _brief(metrics.recompile_reason or metrics.fail_reason or ""),
                }
            )
        return True

    def take(self) -> list[dict[str, Any]]:
        """The compilations since the last call, at most 200."""
        rows, self._rows = self._rows[:_MOST_ROWS], []
        return rows

    def take_breaks(self) -> list[dict[str, Any]]:
        """The graph breaks until the last poll that this has not returned yet, by reason and line."""
        if self._utils is None:
            return []
        reasons = self._utils.graph_break_reasons
        if len(reasons) < self._breaks:  # torch._dynamo.reset() has emptied the list
            self._breaks = 0
        counted: dict[tuple[str, str, int], int] = {}
        for reason in reasons[self._breaks :]:
            frame = reason.user_stack[-1] if reason.user_stack else None
            key = (_brief(reason.reason), frame.filename if frame else "", (frame.lineno or 0) if frame else 0)
            counted[key] = counted.get(key, 0) + 1
        self._breaks = len(reasons)
        return [
            {"file": file, "line": line, "reason": reason, "count": count}
            for (reason, file, line), count in list(counted.items())[:_MOST_ROWS]
        ]

    @property
    def facts(self) -> Mapping[str, int | None]:
        """compiled_graphs and graph_breaks since the watch began; none of them where nothing was compiled."""
        if self._utils is None or not self._compiled:
            return {}
        # A script may clear torch's counters.
        graphs, breaks = (max(now - then, 0) for now, then in zip(_counted(self._utils), self._before, strict=True))
        return {"compiled_graphs": graphs, "graph_breaks": breaks, "recompilations": self.recompilations}


def _counted(utils: Any) -> tuple[int, int]:
    """Graphs and graph breaks of this process so far."""
    return utils.counters["stats"]["unique_graphs"], sum(utils.counters["graph_break"].values())


def _key(metrics: Any) -> tuple[str, int | None]:
    """The key of a compilation. Its number alone is not enough: torch counts from 0/0 again after torch._dynamo.reset()."""
    return str(metrics.compile_id), metrics.start_time_us


def _brief(reason: str) -> str:
    """The reason on one line, without the advice that follows an empty line."""
    return " ".join(reason.split("\n\n")[0].split())[:_LONGEST_REASON]
