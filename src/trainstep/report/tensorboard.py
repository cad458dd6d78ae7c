"""Writes records as scalars for TensorBoard, a run for each cell; it needs the package tensorboard and no torch.

    runs/SIZE, CONTEXT ...    time (ms)/step      each timed step, in order; warm-ups are under `warm-up (ms)`
                              summary/...         rates, memory and medians of the cell, once

A cell that failed has no scalars.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trainstep.records.record import Record
from trainstep.report.kit.rows import Row, quantities

_NO_PACKAGE = "format: tensorboard needs the package of that name: pip install 'trainstep[tensorboard]'"
_SUMMARY = re.compile(r"_(median_s|per_s|ratio|bytes)$")
"""The ends of names of quantities that get a chart."""


def check_folder(folder: Path | None) -> Path:
    """The folder to write into. ValueError if none is given, or if it has files: TensorBoard would mix them with ours."""
    if folder is None:
        raise ValueError("out: TensorBoard reads a folder; name a new one, as --out runs/tensorboard")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"out: {folder} is a file, or a folder with files in it; name a new folder for TensorBoard")
    return folder


def write_runs(rows: Sequence[Row], folder: Path) -> int:
    """Write a run for each cell that did not fail, and return their number.

    ValueError if the package is missing or a file cannot be written.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise ValueError(_NO_PACKAGE) from None
    done = [row for row in rows if row.record.failure is None]
    try:
        for row, name in zip(done, _names(done), strict=True):
            start_s = datetime.fromisoformat(row.record.started_at).timestamp()
            writer = EventFileWriter(str(folder / name))
            for tag, step, value in [*_samples(row.record), *_summary(row)]:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(wall_time=start_s, step=step, summary=summary))
            writer.close()
    except OSError as error:
        raise ValueError(f"out: {folder} cannot be written: {error.strerror}; name another folder") from None
    return len(done)


def _names(rows: Sequence[Row]) -> list[str]:
    """A folder name for each cell: its label, with a number if two labels are equal."""
    labels = [re.sub(r"[^\w.,=+ -]", "_", row.label())[:120].strip(". ") or "cell" for row in rows]
    return [label if labels.count(label) == 1 else f"{label} ({number})" for number, label in enumerate(labels, 1)]


def _samples(record: Record) -> Iterator[tuple[str, int, float]]:
    """(tag, index, value) of every raw sample; seconds become milliseconds."""
    for name, samples in record.samples.items():
        unit, scale = ("ms", 1e3) if samples.unit == "s" else (samples.unit, 1.0)
        kind = "time" if samples.unit == "s" else "sample"
        for group, values in ((kind, samples.values), ("warm-up", samples.warmups)):
            yield from ((f"{group} ({unit})/{name}", index, value * scale) for index, value in enumerate(values))


def _summary(row: Row) -> Iterator[tuple[str, int, float]]:
    """(tag, 0, value) of the cell's rates, shares, bytes and medians in SI units."""
    values: dict[str, Any] = quantities(row)
    for name, value in values.items():
        if _SUMMARY.search(name) and isinstance(value, int | float) and name not in row.point:
            yield f"summary/{name}", 0, float(value)
