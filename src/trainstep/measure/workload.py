"""What can be measured: the protocol a workload satisfies, and the one place its name becomes an object.

A cell's process calls `prepare` (build, warm up), `take` one or more times (the timed steps, in turns where variants
interleave), and `finish`. One's own workload is any importable object with these two attributes, named package.module:object.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from trainstep.config.import_path import check_not_hidden
from trainstep.config.instruments import INSTRUMENTS
from trainstep.records.facts import Fact
from trainstep.records.record import Samples

Stage = Callable[[str], None]
"""Called with `build`, `warmup`, a phase...: where a failure happened is the last stage told."""


class Stages:
    """The stage a measurement is in, told to whoever started it: first `build`."""

    def __init__(self, tell: Stage) -> None:
        self._tell = tell
        self.enter("build")

    def enter(self, stage: str) -> None:
        self.current = stage
        self._told_s = time.monotonic()
        self._tell(stage)

    def count(self, done: int, of: int) -> None:
        """Between windows, at most once a second."""
        if time.monotonic() - self._told_s > 1:
            self._told_s = time.monotonic()
            self._tell(f"{self.current} {done}/{of}")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a measurement hands over: the record's own fields."""

    samples: Mapping[str, Samples]
    facts: Mapping[str, Fact]
    tables: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


class Measurement(Protocol):
    """A prepared workload."""

    def take(self, steps: int) -> None:
        """Time this many more steps."""

    def finish(self) -> Findings:
        """Look once at what is only seen afterwards (memory peaks, one profiled step) and hand everything over."""


@runtime_checkable
class Settling(Protocol):
    """A Measurement that has this method too settles down before its turns; one without is timed at once."""

    def settle(self) -> None:
        """Run one step that is not timed; called before each turn when variants take turns: another's left caches cold."""


@runtime_checkable
class Sampling(Protocol):
    """A Measurement that has this method too may be spared its looks: of several rounds of whole processes only the last needs
    them."""

    def finish_unseen(self) -> Findings:
        """Hand the samples over, and what tables are made of them."""


class Workload(Protocol):
    """`shares_worker`: whether the process may measure another cell after this one."""

    shares_worker: bool

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        """Build what the plain config says and run its warm-ups."""


def runs_user_code(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the user names the workload's module, or that of its model."""
    return not _is_ours(name) or "function" in (config.get("model") or {})


def load_workload(name: str) -> Workload:
    """The workload of that name, imported now."""
    place = INSTRUMENTS[name].measured if name in INSTRUMENTS else name
    module, _, attribute = place.partition(":")
    if not _is_ours(name):
        check_not_hidden("workload", module)
    workload: Workload | None = getattr(importlib.import_module(module), attribute, None)
    if workload is None:
        raise ImportError(f"workload: {module} has no {attribute!r}")
    return workload


def _is_ours(name: str) -> bool:
    return name in INSTRUMENTS or name.startswith("trainstep.")
