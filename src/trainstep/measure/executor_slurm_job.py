"""A group's job on a node of a Slurm cluster, and the files in which it leaves its records; node and driver see one file system.

NAME.slurm/GROUP.jsonl            a part: the records of a group that ended, there whole or not at all
NAME.slurm/SUBMISSION/            submitit's own files and each job's logs
NAME.slurm/SUBMISSION/GROUP.node  where and since when the group's job runs
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from trainstep.config.cell import Cell, group_name
from trainstep.measure.environment import environment
from trainstep.measure.executor_local import run_groups
from trainstep.measure.runner import Limits
from trainstep.records.record import Record, record_from_plain, record_to_plain
from trainstep.records.whole_file import whole_file


def run_group(group: Sequence[Cell], limits: Limits, part: Path, node: Path) -> None:
    """What a job does: run one group as on any machine and leave its part.

    A job that is told to end (scancel, its time limit) leaves at once and without a part: how its cells then died says
    nothing about them.
    """
    signal.signal(signal.SIGTERM, _leave)
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")  # Slurm's choice on this node, not the driver's
    here = {
        "environment": asdict(environment(visible_devices=visible_devices)),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    _write_whole(node, json.dumps(here))
    # A variant may come a second time: in rounds, where it turned out that they do not fit.
    found = run_groups([group], replace(limits, visible_devices=visible_devices, forks=False), lambda cell, stage: None)
    latest = {record.key: record for records in found for record in records}
    _write_whole(part, "".join(json.dumps(record_to_plain(record)) + "\n" for record in latest.values()))


def part_path(folder: Path, group: Sequence[Cell]) -> Path:
    return folder / f"{group_name(group)}.jsonl"


def read_part(part: Path) -> list[Record]:
    """A part's records; none if it is not there or of a format not known here, so that the group is run again."""
    try:
        return [record_from_plain(json.loads(line)) for line in part.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def drop_stored_parts(folder: Path, stored: Mapping[str, Record]) -> None:
    """Remove the parts whose records the store has: a driver killed between the two left them."""
    for part in folder.glob("*.jsonl"):
        records = read_part(part)
        if records and all(record.key in stored and _same_run(record, stored[record.key]) for record in records):
            part.unlink(missing_ok=True)


def _same_run(one: Record, other: Record) -> bool:
    return (one.started_at, one.duration_s) == (other.started_at, other.duration_s)


def _write_whole(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
