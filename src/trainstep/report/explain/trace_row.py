"""Makes a profiler's trace a row that `explain` can use: `rows_of_traces([Path("trace.json.gz")], limits)`."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainstep.config.script import Part
from trainstep.reading import ReadLimits, read_within
from trainstep.records.facts import facts_of
from trainstep.records.record import Record, Samples
from trainstep.report.kit.rows import Row, rows_of
from trainstep.report.profile.tables import trace_record
from trainstep.traces.kineto import Trace
from trainstep.traces.patterns.matmuls import MatmulWork
from trainstep.traces.patterns.table import find_patterns, has_shapes
from trainstep.traces.profile import Profile, profile_of
from trainstep.traces.tables import Columns
from trainstep.traces.trace_file import read_trace_file
from trainstep.traces.work import TraceWork, is_wait_for_data, read_work

_ENDINGS = (".json", ".json.gz", ".sqlite", ".nsys-rep", ".qdrep")


def is_trace(path: Path) -> bool:
    """Whether a file is named like a profiler's trace; records end in .jsonl."""
    return path.name.endswith(_ENDINGS)


def rows_of_traces(paths: Sequence[Path], limits: ReadLimits) -> list[Row]:
    """A row for each trace, read in a process with these limits. ValueError, in one sentence, for a file that is no trace."""
    traces = [(path, read_within(limits, path, functools.partial(_seen, path, limits))) for path in paths]
    return rows_of([(str(path), _record(path, trace)) for path, trace in traces])


class _Seen(NamedTuple):
    """The contents of a trace. `data_s`: each step's wait for data. `patterns`: None for a trace without shapes."""

    profile: Profile
    gpu: str | None
    patterns: Columns | None
    data_s: tuple[float, ...]
    matmuls: MatmulWork


def _seen(path: Path, limits: ReadLimits) -> _Seen:
    return read_trace_file(path, limits.file_bytes, _seen_in)


def _seen_in(trace: Trace) -> _Seen:
    work = read_work(trace)
    step_patterns = find_patterns(work)
    patterns = step_patterns.table() if has_shapes(work) else None
    return _Seen(profile_of(trace), trace.gpu, patterns, _data_s(work), step_patterns.sixteen_bit)


def _record(path: Path, seen: _Seen) -> Record:
    """The record of a trace, with its patterns and its waits for data."""
    record = trace_record(seen.profile, path, seen.gpu)
    tables = {**record.tables, **({} if seen.patterns is None else {"patterns": seen.patterns})}
    data = Samples(unit="s", values=seen.data_s)
    facts = {**record.facts, **facts_of(**seen.matmuls.numbers())}
    return dataclasses.replace(record, samples={**record.samples, Part.DATA.value: data}, tables=tables, facts=facts)


def _data_s(work: TraceWork) -> tuple[float, ...]:
    """Seconds that each step waits for its batch."""
    waits = [
        opened
        for opened in work.attribution.trace.ranges
        if opened.thread == work.attribution.main and is_wait_for_data(opened)
    ]

    def within_s(start_ns: int, end_ns: int) -> float:
        return sum(opened.duration_ns for opened in waits if start_ns <= opened.start_ns < end_ns) / 1e9

    return tuple(within_s(step.start_ns, step.start_ns + step.window_ns) for step in work.steps)
