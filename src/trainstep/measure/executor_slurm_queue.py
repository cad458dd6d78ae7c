"""Slurm's side of a sweep: submit groups as one job array through submitit, ask for the jobs' states, cancel them.

States come from squeue, which answers on clusters that keep no accounts too; a job that squeue has forgotten is looked up
with sacct.
"""

import importlib
import io
import json
import math
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainstep.config.cell import Cell, group_name
from trainstep.config.import_path import python
from trainstep.measure.executor_slurm_job import part_path, run_group
from trainstep.measure.runner import Limits
from trainstep.records.whole_file import whole_file

GONE = "GONE"
"""No state of Slurm's: squeue no longer knows the job."""
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
    """What each job asks Slurm for. `minutes`: None: the cells' own limits and five minutes more.

    `arguments`: further options of sbatch, without their dashes. `at_once`: how many jobs may run at the same time.
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

    def minutes_for(self, groups: Sequence[Sequence[Cell]], limits: Limits) -> int:
        """Whole minutes a job may take: one limit holds for a whole array."""
        if self.minutes is not None:
            return math.ceil(self.minutes)
        return math.ceil(limits.timeout_s * max(map(len, groups)) * (limits.rounds or 1) / 60) + _MARGIN_MINUTES


@dataclass(frozen=True, kw_only=True)
class Job:
    """A group on Slurm. `name`: what all jobs of its submission are called in the queue."""

    group: Sequence[Cell]
    id: str
    name: str
    part: Path
    node: Path
    stderr: Path


class Submission:
    """One array of jobs: a fresh folder, and its name in the queue.

    Job numbers start again on a new cluster, so the name, which holds a random part, says whose a job is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"trainstep-{folder.name}"

    def submit(self, groups: Sequence[Sequence[Cell]], limits: Limits, request: JobRequest) -> list[Job]:
        """Submit every group. ValueError in Slurm's words if it refuses."""
        submitit = _submitit()
        self.folder.mkdir(parents=True)
        executor = submitit.SlurmExecutor(self.folder, python=shlex.join(python()))
        executor.update_parameters(
            job_name=self.name,
            partition=request.partition,
            time=request.minutes_for(groups, limits),
            array_parallelism=request.at_once,
            use_srun=False,  # a step of srun's would get one core of the job's, and signals that mean requeue
            **({"gres": f"gpu:{request.gpus}"} if request.gpus else {}),
            additional_parameters={name: value == "true" or value for name, value in request.arguments.items()},
        )
        files = [(part_path(self.folder.parent, group), self._node(group)) for group in groups]
        try:
            with redirect_stderr(io.StringIO()):  # where submitit repeats what its error says
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
        """The jobs of these groups that a driver which is no more submitted and that are queued or running still."""
        jobs = self._jobs(groups, json.loads((self.folder / _LEDGER).read_text(encoding="utf-8")))
        states = job_states([self.name])
        if states is None:
            raise ValueError("slurm: squeue does not answer; try again when the cluster's controller is up")
        if all(map(has_ended, states.values())):
            self.close()
        return [job for job in jobs if not has_ended(states.get(job.id, GONE))]

    def close(self) -> None:
        """Nothing of it is in the queue any more; its logs stay."""
        (self.folder / _LEDGER).unlink(missing_ok=True)

    def _jobs(self, groups: Iterable[Sequence[Cell]], ledger: Mapping[str, Mapping[str, str]]) -> list[Job]:
        known = [(group, ledger[group_name(group)]) for group in groups if group_name(group) in ledger]
        return [
            Job(
                group=group,
                id=entry["id"],
                name=self.name,
                part=part_path(self.folder.parent, group),
                node=self._node(group),
                stderr=Path(entry["stderr"]),
            )
            for group, entry in known
        ]

    def _node(self, group: Sequence[Cell]) -> Path:
        return self.folder / f"{group_name(group)}.node"


def new_submission(folder: Path) -> Submission:
    """A submission below this folder, unlike any before."""
    return Submission(folder / f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}")


def open_submissions(folder: Path) -> list[Submission]:
    """Those below this folder that no driver saw to their end, oldest first."""
    return [Submission(ledger.parent) for ledger in sorted(folder.glob(f"*/{_LEDGER}"))]


def check_slurm() -> None:
    """ValueError if jobs cannot be submitted from here at all."""
    _submitit()
    for program in ("sbatch", "squeue", "srun"):
        if shutil.which(program) is None:
            raise ValueError(f"slurm: there is no {program} here; run this on a login node of a Slurm cluster")


def job_states(names: Iterable[str]) -> dict[str, str] | None:
    """Job -> state of all jobs with these names, ended ones too for some minutes; None if Slurm does not answer.

    A state that waits has its reason with it: `PENDING (Resources)`.
    """
    said = _ask("squeue", "--noheader", "--states=all", "--array", f"--name={','.join(names)}", "--format=%i|%T|%r")
    if said is None:
        return None
    lines = [line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2]
    return {
        job: f"{state} ({reason})" if state == "PENDING" and reason != "None" else state for job, state, reason in lines
    }


def accounted_state(job: str) -> str:
    """The state of a job that squeue has forgotten, where the cluster keeps accounts; else GONE."""
    said = _ask("sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job}") or ""
    return next((word for word in said.split() if word in _ENDED), GONE)


def has_ended(state: str) -> bool:
    return state == GONE or state in _ENDED


def cancel(*arguments: str) -> None:
    """scancel, without waiting until the jobs are gone."""
    _ask("scancel", *arguments)


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise ValueError("slurm: needs submitit; pip install 'trainstep[slurm]'") from None


def _ask(*command: str) -> str | None:
    """What a command prints; None where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _refusal(said: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines() if line.strip()]
    reason = next((line for line in lines if "Try " not in line), "sbatch failed")
    partitions = sorted(set((_ask("sinfo", "--noheader", "--all", "--format=%R") or "").split()))
    known = f"; partitions here: {', '.join(partitions)}" if partitions and "partition" in reason else ""
    return f"slurm: sbatch refused: {reason}{known}"
