"""Records of a script's run, made up for reports, and watches of real loops, for tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from record_maker import ENVIRONMENT, seconds
from trainstep.config.parsing import config_hash, to_plain
from trainstep.config.script import Part, ScriptConfig
from trainstep.measure.run.recording import Ending, Recording
from trainstep.measure.run.watch import Schedule, Watch
from trainstep.records.facts import facts_of
from trainstep.records.record import Record
from trainstep.records.store import Store

PARTS_MS = {
    Part.DATA: 2.0,
    Part.FORWARD: 3.0,
    Part.BACKWARD: 4.0,
    Part.OPTIMIZER: 0.5,
    Part.EVALUATION: 0.0,
    Part.OTHER: 0.5,
}


def a_run(
    *,
    parts_ms: dict[Part, float] = PARTS_MS,
    steps: int = 20,
    first_step: int = 1,
    tables: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    collection_ms: float = 0.0,
    device_ms: dict[Part, float] | None = None,
    **config: Any,
) -> Record:
    """A record of `steps` equal steps on a CPU, which finished; `facts` replace its facts (None: left out).

    `device_ms`: what parts of each step take by the GPU's clock.
    """
    identity = ScriptConfig(**{"script": "train.py", "run": "run-1", "first_step": first_step, **config})
    whole_ms = sum(parts_ms.values())
    samples = {part.value: seconds([ms / 1e3] * steps) for part, ms in parts_ms.items()}
    known = {"steps_seen": first_step + steps - 1, "backward_passes": steps, "ending": "finished", "optimizers": 1}
    return Record(
        workload="run",
        key=config_hash("run", to_plain(identity)),
        config=to_plain(identity),
        environment=ENVIRONMENT,
        started_at="2026-11-01T00:00:00Z",
        duration_s=1.5,
        samples={
            "step": seconds([whole_ms / 1e3] * steps),
            **samples,
            "garbage_collection": seconds([collection_ms / 1e3] * steps),
            **{f"device_{part.value}": seconds([ms / 1e3] * steps) for part, ms in (device_ms or {}).items()},
        },
        facts=facts_of(**{**known, **(facts or {})}),
        tables=tables or {},
    )


WAITS = {
    "file": ["/x/project/train.py"],
    "line": [12],
    "source": ["total += loss.item()"],
    "why": ["a tensor's value is read by the host"],
    "calls": [1],
    "time_s": [0.004],
}
CLASSES = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.003], "share": [1.0]}
COMPILED = {
    "step": [1, 7],
    "function": ["f", "f"],
    "file": ["/x/project/train.py"] * 2,
    "line": [3, 3],
    "time_s": [1.0, 1.0],
    "reason": ["", "size mismatch"],
}
BREAKS = {"file": ["/x/project/train.py"], "line": [5], "reason": ["print"], "count": [2]}


def a_full_run() -> Record:
    """A record of a run on one of two ranks in which everything was noted that can be."""
    return a_run(
        tables={"waits": WAITS, "classes": CLASSES, "compilations": COMPILED, "graph_breaks": BREAKS},
        facts={
            "inspected_step": 5,
            "profiled_step_s": 0.02,
            "exposed_s": 0.001,
            "communication_s": 0.002,
            "forward_passes": 20,
            "skipped_updates": 1,
            "watching_s": 0.2,
            "own_profiler": True,
            "compiled_graphs": 2,
            "recompilations": 1,
            "graph_breaks": 2,
            "allocation_retries": 1,
            "peak_allocated_bytes": 2**30,
            "ending": "interrupted",
            "ending_part": "backward",
        },
        collection_ms=0.1,
        rank=0,
        ranks=2,
    )


def a_watch(folder: Path, *, every: int | None = 0, **options: Any) -> Watch:
    """A watch that is not started, with records in `folder`/run.jsonl."""
    recording = Recording(
        ScriptConfig(script="train.py", run="run"), ENVIRONMENT, Store(folder / "run.jsonl"), "command"
    )
    return Watch(recording, schedule=Schedule(every=every), **options)


@contextmanager
def watched(folder: Path, *, every: int | None = 0, **options: Any) -> Iterator[Watch]:
    """Watch the block, which finishes."""
    watch = a_watch(folder, every=every, **options)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop(Ending(words="finished"))


def records_of(watch: Watch) -> list[Record]:
    """What the watch has written, read again."""
    return watch.recording.store.finished()


def same_with_and_without(train: Callable[[], list[float]], folder: Path, **options: Any) -> None:
    """Assert that a training loop gives the same losses, to the bit, watched and not watched."""
    alone = train()
    with watched(folder, **options) as watch:
        seen = train()
    assert not watch.trouble
    assert watch.steps == len(alone)
    assert seen == alone
    assert pytest.approx(seen) == seen  # no NaN, of which nothing equals anything
