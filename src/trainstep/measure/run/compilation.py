"""Sees what torch.compile does while a script trains: compilations with their reasons, and graph breaks, with their lines.

`Compilations.poll(step)` reads counters that torch keeps anyway; where nothing has been compiled it is a look into `sys.modules`.
"""

import sys
from collections.abc import Mapping
from typing import Any

_MOST_ROWS = 200
_LONGEST_REASON = 300


class Compilations:
    """What was compiled since the watch began. Everything that a script compiled before counts as seen."""

    def __init__(self) -> None:
        self._frames = self._breaks = 0
        self._known: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self.recompilations = 0

    def poll(self, step: int) -> bool:
        """Whether anything was compiled since the last call, in step `step`, whose rows are then noted."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return False
        frames = utils.counters["frames"]["total"]
        if frames == self._frames:
            return False
        self._frames = frames
        for metrics in utils.get_compilation_metrics():
            key = str(metrics.compile_id)
            if key in self._known or metrics.co_name is None:
                continue
            self._known.add(key)
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
        """The graph breaks since the last call, by reason and line."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return []
        reasons = utils.graph_break_reasons
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
        """compiled_graphs and graph_breaks so far, None where nothing is compiled."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None or not self._frames:
            return {}
        return {
            "compiled_graphs": utils.counters["stats"]["unique_graphs"],
            "graph_breaks": sum(utils.counters["graph_break"].values()),
            "recompilations": self.recompilations,
        }


def _brief(reason: str) -> str:
    """The reason on one line, without the advice that follows an empty line."""
    return " ".join(reason.split("\n\n")[0].split())[:_LONGEST_REASON]
