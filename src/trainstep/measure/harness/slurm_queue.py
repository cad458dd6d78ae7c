"""Submits groups to Slurm as one job array, asks for job states, cancels jobs, and runs a group on its node.

States come from squeue, which also answers on clusters that keep no accounts; sacct tells the state of a job that squeue
has forgotten. Jobs are submitted through submitit. The driver and the nodes share these files:

    NAME.slurm/GROUP.jsonl              a part: the records of a group that ended, there whole or not at all
    NAME.slurm/SUBMISSION/              submitit's own files and each job's logs
    NAME.slurm/SUBMISSION/GROUP.node    where and since when the group's job runs
"""

import importlib
import io
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainstep.config.grid import Cell, group_name
from trainstep.config.import_path import python
from trainstep.measure.harness.connection import tell_nobody
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.nodes import NodeLost, Nodes
from trainstep.measure.harness.rank_connection import nodes_of
from trainstep.measure.harness.runner import Limits
from trainstep.measure.machine.environment import environment
from trainstep.records.record import FORMAT, Failure, Record, record_from_plain, record_to_plain
from trainstep.records.whole_file import whole_file

GONE = "GONE"
"""Our own state, for a job that squeue no longer knows."""
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
_OURS = ("array", "error", "job-name", "output", "parsable", "partition", "wait")
_MARGIN_MINUTES = 5
_COMMAND_TIMEOUT_S = 60
_LEDGER = "jobs.json"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What each job requests from Slurm.

    `minutes`: the time limit; None: the cells' own limits and five minutes more. `at_once`: how many jobs may run at the
    same time. `arguments`: further options of sbatch, without their dashes.
    """

    partition: str
    gpus: int = 1
    minutes: float | None = None
    at_once: int = 16
    arguments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.partition.strip():
            raise ValueError("slurm: needs the name of a partition; `sinfo` lists them")
        if self.gpus < 0:
            raise ValueError(f"slurm_gpus: must be 0 (run on CPUs) or more, not {self.gpus}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"slurm_time: must be a positive number of minutes, not {self.minutes}")
        if self.at_once < 1:
            raise ValueError(f"slurm_jobs: must be at least 1, not {self.at_once}")
        for name in self.arguments:
            if name in _OURS:
                raise ValueError(f"slurm_args: {name} is set by trainstep itself")

    def check(self, groups: Sequence[Sequence[Cell]]) -> None:
        """ValueError for groups that cannot be the jobs of one request."""
        job_nodes(groups)

    def minutes_for(self, groups: Sequence[Sequence[Cell]], limits: Limits) -> int:
        """Whole minutes that a job may take; all jobs of an array have the same limit."""
        if self.minutes is not None:
            return math.ceil(self.minutes)
        return math.ceil(limits.timeout_s * max(map(len, groups)) * (limits.rounds or 1) / 60) + _MARGIN_MINUTES


@dataclass(frozen=True, kw_only=True)
class Job:
    """A group on Slurm. `name`: the name in the queue of all jobs of its submission."""

    group: Sequence[Cell]
    id: str
    name: str
    part: Path
    node: Path
    stderr: Path


class Submission:
    """One array of jobs, with a folder and a name in the queue of its own.

    The name holds a random part, because job numbers start again on a new cluster and do not identify a job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"trainstep-{folder.name}"

    def submit(self, groups: Sequence[Sequence[Cell]], limits: Limits, request: JobRequest) -> list[Job]:
        """Submit every group. Raises ValueError with Slurm's message if Slurm refuses."""
        submitit = _submitit()
        self.folder.mkdir(parents=True)
        executor = submitit.SlurmExecutor(self.folder, python=shlex.join(python()))
        executor.update_parameters(
            job_name=self.name,
            partition=request.partition,
            time=request.minutes_for(groups, limits),
            nodes=job_nodes(groups),
            ntasks_per_node=1,
            array_parallelism=request.at_once,
            use_srun=False,  # srun would give its step one core of the job, and send it signals that mean requeue
            **({"gres": f"gpu:{request.gpus}"} if request.gpus else {}),
            additional_parameters={name: value == "true" or value for name, value in request.arguments.items()},
        )
        files = [(part_path(self.folder.parent, group), self._node(group)) for group in groups]
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints there what its exception says too
                submitted = executor.map_array(run_group, groups, [limits] * len(groups), *zip(*files, strict=True))
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            raise ValueError(_refusal(str(error))) from None
        ledger = {
            group_name(group): {"id": job.job_id, "stderr": str(job.paths.stderr)}
            for group, job in zip(groups, submitted, strict=True)
        }
        with whole_file(self.folder / _LEDGER) as file:
            file.write(json.dumps(ledger).encode())
        return self._jobs(groups, ledger)

    def jobs_left(self, groups: Iterable[Sequence[Cell]]) -> list[Job]:
        """The jobs of these groups, submitted by an earlier driver, that are still queued or running."""
        jobs = self._jobs(groups, json.loads((self.folder / _LEDGER).read_text(encoding="utf-8")))
        states = job_states([self.name])
        if states is None:
            raise ValueError("slurm: squeue does not answer; try again when the cluster's controller is up")
        if all(map(has_ended, states.values())):
            self.close()
        return [job for job in jobs if not has_ended(states.get(job.id, GONE))]

    def close(self) -> None:
        """Mark the submission as finished: none of its jobs is in the queue any more. The logs stay."""
        (self.folder / _LEDGER).unlink(missing_ok=True)

    def _jobs(self, groups: Iterable[Sequence[Cell]], ledger: Mapping[str, Mapping[str, str]]) -> list[Job]:
        return [
            Job(
                group=group,
                id=ledger[group_name(group)]["id"],
                name=self.name,
                part=part_path(self.folder.parent, group),
                node=self._node(group),
                stderr=Path(ledger[group_name(group)]["stderr"]),
            )
            for group in groups
            if group_name(group) in ledger
        ]

    def _node(self, group: Sequence[Cell]) -> Path:
        return self.folder / f"{group_name(group)}.node"


def job_nodes(groups: Iterable[Sequence[Cell]]) -> int:
    """The number of nodes of each job. ValueError unless all cells need the same: a job for two would idle one of them."""
    counts = sorted({nodes_of(cell) for group in groups for cell in group})
    if len(counts) > 1:
        raise ValueError(
            f"nodes: the jobs of a sweep have one size, and its cells need {' and '.join(map(str, counts))} nodes; run it once for "
            f"each: --set nodes={counts[0]}, then --set nodes={counts[-1]}"
        )
    return counts[0] if counts else 1


def new_submission(folder: Path) -> Submission:
    """A submission with a new folder below this folder."""
    return Submission(folder / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}")


def open_submissions(folder: Path) -> list[Submission]:
    """The submissions below this folder that no driver has closed, oldest first."""
    return [Submission(ledger.parent) for ledger in sorted(folder.glob(f"*/{_LEDGER}"))]


def check_slurm() -> None:
    """Raise ValueError if no job can be submitted from this machine."""
    _submitit()
    for program in ("sbatch", "squeue", "srun"):
        if shutil.which(program) is None:
            raise ValueError(f"slurm: there is no {program} here; run this on a login node of a Slurm cluster")


def srun_command(request: JobRequest, nodes: int) -> list[str]:
    """The beginning of a command line: srun, with one task on each of so many nodes. ValueError if there is no srun here."""
    if shutil.which("srun") is None:
        raise ValueError("slurm: there is no srun here; run this on a login node of a Slurm cluster")
    return [
        *("srun", f"--partition={request.partition}", f"--nodes={nodes}", "--ntasks-per-node=1"),
        *([f"--gres=gpu:{request.gpus}"] if request.gpus else []),
        *(f"--{name}" if value == "true" else f"--{name}={value}" for name, value in request.arguments.items()),
    ]


def job_states(names: Iterable[str]) -> dict[str, str] | None:
    """Job -> state of all jobs with these names, for some minutes also of ended jobs; None if Slurm does not answer.

    The state of a waiting job includes the reason: `PENDING (Resources)`.
    """
    answer = _ask("squeue", "--noheader", "--states=all", "--array", f"--name={','.join(names)}", "--format=%i|%T|%r")
    if answer is None:
        return None
    lines = [line.split("|", 2) for line in answer.splitlines() if line.count("|") >= 2]
    return {
        job: f"{state} ({reason})" if state == "PENDING" and reason != "None" else state for job, state, reason in lines
    }


def accounted_state(job: str) -> str:
    """The state of a job that squeue has forgotten, if the cluster keeps accounts; else GONE."""
    answer = _ask("sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job}") or ""
    return next((word for word in answer.split() if word in _ENDED), GONE)


def has_ended(state: str) -> bool:
    return state == GONE or state in _ENDED


def cancel(*arguments: str) -> None:
    """Call scancel, without waiting until the jobs are gone."""
    _ask("scancel", *arguments)


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise ValueError("slurm: needs submitit; pip install 'trainstep[slurm]'") from None


def _ask(*command: str) -> str | None:
    """What a command prints; None if it fails."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _refusal(printed: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in printed.splitlines() if line.strip()]
    reason = next((line for line in lines if "Try " not in line), "sbatch failed")
    partitions = sorted(set((_ask("sinfo", "--noheader", "--all", "--format=%R") or "").split()))
    known = f"; partitions here: {', '.join(partitions)}" if partitions and "partition" in reason else ""
    return f"slurm: sbatch refused: {reason}{known}"


def run_group(group: Sequence[Cell], limits: Limits, part: Path, node: Path) -> None:
    """Run one group, as a job on a node, and write its records to `part`.

    A job that is told to end (scancel, its time limit) ends at once and writes no part, because the deaths of its
    processes then say nothing about the cells.
    """
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")  # Slurm's choice on this node, not the driver's
    here = {
        "environment": asdict(environment(visible_devices=visible_devices)),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    _write_whole(node, json.dumps(here))
    with _nodes(group) as nodes:
        here_limits = replace(limits, visible_devices=visible_devices, forks=False, nodes=nodes)
        latest: dict[str, Record] = {}
        try:
            for records in run_groups([group], here_limits, tell_nobody):
                # A variant's record may come twice: the second from rounds, after the live variants did not fit into memory.
                latest |= {record.key: record for record in records}
        except NodeLost as error:
            failure = Failure(kind="node_lost", phase="running", message=str(error))
            latest |= {cell.key: _unmeasured(cell, here, failure) for cell in group if cell.key not in latest}
    _write_whole(part, "".join(json.dumps(record_to_plain(record)) + "\n" for record in latest.values()))


def _unmeasured(cell: Cell, here: Mapping[str, Any], failure: Failure) -> Record:
    """The record of a cell that this job did not come to. `here`: environment and start of the job."""
    plain = {"workload": cell.workload, "key": cell.key, "config": cell.config, "duration_s": 0.0, "format": FORMAT}
    return record_from_plain({**plain, **here, "failure": asdict(failure)})


def _nodes(group: Sequence[Cell]) -> AbstractContextManager[Nodes | None]:
    """The nodes of this job, if its cells need several."""
    count = job_nodes([group])
    if count == 1:
        return nullcontext()
    # Its store is torch's, which a driver of one node never imports.
    meeting = importlib.import_module("trainstep.measure.harness.node_meeting")
    nodes: AbstractContextManager[Nodes | None] = meeting.nodes_of_job(count)
    return nodes


def part_path(folder: Path, group: Sequence[Cell]) -> Path:
    return folder / f"{group_name(group)}.jsonl"


def read_part(part: Path) -> list[Record]:
    """The records of a part; none, so that the group is run again, if the part is missing or has an unknown format."""
    try:
        return [record_from_plain(json.loads(line)) for line in part.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def drop_stored_parts(folder: Path, stored: Mapping[str, Record]) -> None:
    """Remove parts with records that the store has: their driver was killed before it could remove them."""
    runs = {(record.key, record.started_at, record.duration_s) for record in stored.values()}
    for part in folder.glob("*.jsonl"):
        records = read_part(part)
        if records and all((record.key, record.started_at, record.duration_s) in runs for record in records):
            part.unlink(missing_ok=True)


def _write_whole(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())
