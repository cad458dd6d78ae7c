"""Runs groups of cells as jobs on a Slurm cluster and yields each group's records as its job ends, in any order.

[Note: what is never lost]
A job writes its records to a part beside the store before it ends, and the part is removed only after the store has its
records. A driver that is killed therefore loses nothing: its jobs go on, and the next driver takes the parts that are
there, waits for the jobs that are still in the queue, and submits the rest. A driver that is interrupted, or that stops
with an error, cancels its jobs; the parts of ended jobs stay. A job that is lost between the rounds of its variants is
run again from the first round.

The nodes must see the store's folder, the current folder, this Python and this package, as on a shared file system.
"""

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainstep.config.grid import Cell, group_name
from trainstep.measure.harness.connection import Tell
from trainstep.measure.harness.failures import last_lines_of
from trainstep.measure.harness.runner import Limits
from trainstep.measure.harness.slurm_queue import (
    GONE,
    Job,
    JobRequest,
    accounted_state,
    cancel,
    check_slurm,
    drop_stored_parts,
    has_ended,
    job_states,
    new_submission,
    open_submissions,
    part_path,
    read_part,
)
from trainstep.measure.harness.sweep import QUEUED
from trainstep.measure.machine.environment import environment
from trainstep.records.record import Environment, Failure, Record
from trainstep.records.store import Store

_POLL_S = 1.0
_ASK_EVERY = 5
"""Every fifth time that the driver looks for parts, it also asks Slurm for the jobs' states."""
_ENDED_ANSWERS = 2
"""After this many consecutive answers that a job has ended, its part is given up: network file systems show files late."""
_KINDS = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "out_of_memory",
    "NODE_FAIL": "node_lost",
    "BOOT_FAIL": "node_lost",
}
_HOW = {
    "TIMEOUT": "was ended by Slurm at its time limit; --slurm-time gives it more",
    "DEADLINE": "was ended by Slurm at its deadline",
    "OUT_OF_MEMORY": "took more memory than Slurm gave it; --slurm-args mem=... gives it more",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "was lost: its node failed",
    "BOOT_FAIL": "was lost: its node did not boot",
    "PREEMPTED": "was preempted",
    "COMPLETED": "ended, but its records are not here; check that its node sees this folder",
    GONE: "left Slurm's queue without records; it may have been cancelled",
}


def run_groups_on_slurm(
    groups: Sequence[Sequence[Cell]], limits: Limits, tell: Tell, *, request: JobRequest, store: Store
) -> Iterator[list[Record]]:
    """Run each group as one job: first yield the records that earlier jobs left for this store, then new jobs' records.

    Closing the iterator cancels the jobs. Raises ValueError if Slurm or submitit is missing, or if Slurm refuses a job.
    """
    folder = store.path.with_suffix(".slurm").absolute()
    drop_stored_parts(folder, store.latest())
    submission = new_submission(folder)
    # Ask for running jobs before looking for parts: a job that ends in between would else be in neither list.
    watch = _Watch([job for earlier in open_submissions(folder) for job in earlier.jobs_left(groups)], tell)
    underway = {group_name(job.group) for job in watch.left}
    fresh = []
    try:
        for group in groups:
            part = part_path(folder, group)
            if group_name(group) in underway:
                continue
            if records := read_part(part):
                yield records
                part.unlink(missing_ok=True)
            else:
                fresh.append(group)
        if fresh:
            check_slurm()
            watch.left += submission.submit(fresh, limits, request)
        yield from watch.records()
        submission.close()
    finally:
        watch.cancel(submission.name)


class _Watch:
    """Waits for jobs to write their parts. `left`: the jobs without records so far."""

    def __init__(self, jobs: Iterable[Job], tell: Tell) -> None:
        self.left = list(jobs)
        self._tell = tell
        self._reported_stages: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._ended_answers: Counter[str] = Counter()
        self._over = False

    def records(self) -> Iterator[list[Record]]:
        """Yield each job's records as it ends."""
        for poll in itertools.count():
            if not self.left:
                break
            time.sleep(_POLL_S)
            if poll % _ASK_EVERY == 0:
                self._ask()
            for job, records in self._ended():
                yield records
                job.part.unlink(missing_ok=True)  # the caller has stored the records when it asks for the next ones
                self.left.remove(job)
        self._over = True

    def cancel(self, name: str) -> None:
        """Cancel the jobs that are left, unless all records have come; `name`: the submission of this driver."""
        if not self._over:
            # By name: while jobs are being submitted, their numbers are unknown.
            cancel(f"--name={name}")
            cancel(*(job.id for job in self.left if job.name != name))

    def _ask(self) -> None:
        states = job_states(sorted({job.name for job in self.left}))
        if states is None:
            return
        for job in self.left:
            state = self._states[job.id] = states.get(job.id, GONE)
            self._ended_answers[job.id] = self._ended_answers[job.id] + 1 if has_ended(state) else 0
            stage = "running" if state == "RUNNING" else state.replace("PENDING", "queued")
            if not has_ended(state) and self._reported_stages.get(job.id) != stage:
                self._reported_stages[job.id] = stage
                self._tell(job.group[0], stage)

    def _ended(self) -> Iterator[tuple[Job, list[Record]]]:
        files = _files_in({job.part.parent for job in self.left})
        for job in list(self.left):
            records = read_part(job.part) if job.part in files else []
            if not records and self._ended_answers[job.id] >= _ENDED_ANSWERS:
                records = _lost(job, self._states[job.id])
            if records:
                yield job, records


def _files_in(folders: set[Path]) -> set[Path]:
    for folder in folders:
        os.utime(folder)  # has a network file system drop its cached list of the folder's files
    return {path for folder in folders for path in folder.iterdir()}


def _lost(job: Job, state: str) -> list[Record]:
    """The records of a job that ended without a part: every cell of its group failed the same way."""
    state = accounted_state(job.id) if state == GONE else state
    place, started_at = _node(job)
    failure = Failure(
        kind=_KINDS.get(state, "crash"),
        phase=QUEUED if started_at is None else "running",
        message=f"job {job.id} {_HOW.get(state, f'ended as {state} without records')}",
        last_lines=_last_lines(job.stderr),
    )
    now = datetime.now(UTC)
    began = now if started_at is None else datetime.fromisoformat(started_at)
    return [
        Record(
            workload=cell.workload,
            key=cell.key,
            config=cell.config,
            environment=place,
            started_at=began.isoformat(timespec="seconds"),
            duration_s=max((now - began).total_seconds(), 0.0),
            failure=failure,
        )
        for cell in job.group
    ]


def _node(job: Job) -> tuple[Environment, str | None]:
    """The environment in which the job ran and when it started; the driver's environment and None if it never ran."""
    try:
        plain = json.loads(job.node.read_text(encoding="utf-8"))
    except OSError:
        return environment(), None
    return Environment(**plain["environment"]), plain["started_at"]


def _last_lines(stderr: Path) -> tuple[str, ...]:
    try:
        with open(stderr, "rb") as file:
            return last_lines_of(file)
    except OSError:
        return ()
