"""The protocol that a workload satisfies, and the one place where a workload's name becomes an object.

A cell's process calls `prepare` (build, warm up), `take` once or more often (the timed steps; several calls where variants
are interleaved), and `finish`. A user's own workload is any importable object with `shares_worker` and `prepare`, named
package.module:object.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from trainstep.config.import_path import check_not_hidden
from trainstep.config.instruments import INSTRUMENTS
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples

_FORWARD, _BACKWARD = "_compile.compile_inner", "backward._backward_impl"
"""Timers of torch.compile that cover a whole graph; the backward graph is compiled in the first backward."""

Stage = Callable[[str], None]
"""Called with `build`, `warmup`, a phase...: a failure belongs to the last stage that was reported."""


class Stages:
    """Reports the stage of a measurement to the process that started it; the first stage is `build`."""

    def __init__(self, tell: Stage) -> None:
        self._tell = tell
        self.enter("build")

    def enter(self, stage: str) -> None:
        self.current = stage
        self._reported_s = time.monotonic()
        self._tell(stage)

    def count(self, done: int, of: int) -> None:
        """Report how many steps are done, at most once a second; called between windows."""
        if time.monotonic() - self._reported_s > 1:
            self._reported_s = time.monotonic()
            self._tell(f"{self.current} {done}/{of}")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The results of a measurement: the fields that it gives to its record."""

    samples: Mapping[str, Samples]
    facts: Mapping[str, Fact]
    tables: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


class Measurement(Protocol):
    """A prepared workload."""

    def take(self, steps: int) -> None:
        """Time this many more steps."""

    def finish(self) -> Findings:
        """Measure what needs a step of its own (memory peaks, one profiled step), and return all results."""


@runtime_checkable
class Settling(Protocol):
    """A Measurement with this method runs a step that is not timed before each turn (interleave.py)."""

    def settle(self) -> None:
        """Run one step that is not timed, because another variant's turn has left the caches cold."""


@runtime_checkable
class Sampling(Protocol):
    """A Measurement with this method can end without its extra steps: of several processes of a cell only the last needs them."""

    def finish_uninspected(self) -> Findings:
        """Return the samples and the tables made from them, without measuring anything else."""


class Workload(Protocol):
    """Anything that can be measured. `shares_worker`: whether its process may measure another cell afterwards."""

    shares_worker: bool

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        """Build what the plain config describes and run its warm-ups."""


def runs_user_code(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the user names the module of the workload or of its model."""
    return not _is_ours(name) or "function" in (config.get("model") or {})


def load_workload(name: str) -> Workload:
    """Import the workload with this name. Raises ImportError if its module has no such object."""
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


def use_compile_cache(folder: str) -> None:
    """Have Inductor and Triton cache in this folder; call it before either is imported. The caller removes the folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")


def compilation_facts() -> dict[str, Fact]:
    """What torch.compile has cost this process so far.

    `compile_s`: seconds. `compile_cache`: 'warm' if every graph came from the cache on disk. `compiled_graphs`: a count.
    """
    import torch._dynamo.utils as dynamo  # this import takes 1.5 s, which only compiled cells should pay

    seconds = sum(sum(dynamo.compilation_time_metrics.get(timer, ())) for timer in (_FORWARD, _BACKWARD))
    counts = dynamo.counters["inductor"]
    missed = counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    warm = not missed and (counts["fxgraph_cache_hit"] or dynamo.counters["aot_autograd"]["autograd_cache_hit"])
    return facts_of(
        compile_s=seconds,
        compile_cache="warm" if warm else "cold",
        compiled_graphs=dynamo.counters["stats"]["unique_graphs"],
    )
