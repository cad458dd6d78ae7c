"""A trace that anyone recorded, as a record of a profile: the page shows it as it shows our own."""

import shlex
import statistics
from datetime import UTC, datetime
from pathlib import Path

import trainstep
from trainstep.records.facts import facts_of
from trainstep.records.record import Environment, Record, Samples
from trainstep.traces.profile import Profile

_UNKNOWN_CPU = "an unnamed CPU"
_UNKNOWN_GPU = "an unnamed GPU"


def trace_record(found: Profile, path: Path, gpu: str | None) -> Record:
    """What the trace says, under the file's name. What no trace says, its machine above all, is empty."""
    return Record(
        workload="profile",
        key=path.name,
        config={"model": {"name": path.name}, "device": "cuda" if found.on_device else "cpu"},
        environment=Environment(
            hostname="",
            os="",
            cpu="" if found.on_device else _UNKNOWN_CPU,
            cores=0,
            memory_bytes=0,
            python="",
            trainstep=trainstep.__version__,
            source="",
            gpu=(gpu or _UNKNOWN_GPU) if found.on_device else None,
        ),
        started_at=datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=sum(found.steps_s),
        samples={
            "busy": Samples(unit="s", values=found.busy_s),
            "profiled_step": Samples(unit="s", values=found.steps_s),
        },
        facts=facts_of(
            command=shlex.join(["trainstep", "profile", "--from", str(path)]),
            verdict=found.verdict.kind,
            idle_s=statistics.median(found.idle_s),
            kernels_s=found.total_s,
            pieces=found.pieces,
            launches=found.launches,
            assigned_share=found.assigned_share,
            fallback_share=found.fallback_share,
            trace_split=found.split or None,
        ),
        tables=found.tables,
    )
