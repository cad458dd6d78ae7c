"""Shows a run that has ended: its answer, its tables and its page, made by `trainstep report` in a process of its own.

A process of its own, because the script may have left this one in any state: modules of its own names, no memory, another folder.
This file imports no torch.
"""

import glob
import hashlib
import os
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO

from trainstep.config.import_path import python_command
from trainstep.records.store import Store

_LONGEST_S = 300.0
_LONGEST_WAIT_S = 5.0
_LAUNCH = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")


def shared_name(environ: Mapping[str, str]) -> str:
    """A name for a run that all ranks on a machine agree on without asking each other: from the process that started them.

    What the launcher says in `environ` tells two runs of that process apart, and a launch from one that torchrun started again.
    """
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat")
    # Its start in ticks since the machine's: the number of a process that has ended may be given again
    started = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    digest = hashlib.sha256(
        "\0".join((str(parent), started, *(environ.get(name, "") for name in _LAUNCH))).encode()
    ).hexdigest()
    return f"{datetime.now():%Y%m%d}-{digest[:6]}"


def files_of(path: Path) -> list[Path]:
    """The records of this run: this file, then those of its other ranks that exist."""
    beside = sorted(
        path.parent.glob(f"{glob.escape(path.stem)}.rank*{path.suffix}"), key=lambda file: (len(file.name), file.name)
    )
    return [path, *beside]


def wait_for_ranks(path: Path, ranks: int, longest_s: float = _LONGEST_WAIT_S) -> None:
    """Wait until the other `ranks` of this machine have written how their scripts ended, which they do at about the same time.

    A rank that was killed writes nothing: after `longest_s` the run is shown without the rest of it. The ending of an earlier run
    in the same file does not count.
    """
    latest_s = time.monotonic() + longest_s
    run = next((record.config.get("run") for record in reversed(Store(path).finished())), None)
    missing = [rank_path(path, rank) for rank in range(1, ranks)]
    while missing and time.monotonic() < latest_s:
        missing = [file for file in missing if not _has_ended(file, run)]
        if missing:
            time.sleep(0.05)


def _has_ended(file: Path, run: str | None) -> bool:
    records = Store(file).finished()
    return bool(records) and records[-1].fact("ending") is not None and records[-1].config.get("run") == run


def rank_path(path: Path, rank: int) -> Path:
    """The file of a rank: rank 0 has the file itself, the others have their number in the name."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def show_run(path: Path, page: Path | None, stream: IO[str] | None) -> str:
    """Write the page, and the answer with its tables to the stream, unless it is None. Returns what failed, or an empty text."""
    files = [str(file) for file in files_of(path)]
    commands = [] if stream is None else [python_command("trainstep", "report", *files)]
    if page is not None:
        commands.append(python_command("trainstep", "report", *files, "--format", "html", "--out", str(page)))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes: list[subprocess.Popen[str]] = []
    failed = ""
    for command in commands:
        try:
            processes.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
        except OSError as error:  # no memory or no process number is left, which must not end a user's training
            failed = f"the report could not be started: {error.strerror}"
            break
    for process in processes:
        try:
            text, errors = process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text, errors = process.communicate()
        except KeyboardInterrupt:
            for other in processes:
                other.kill()
            raise
        if process.returncode:
            failed = next(iter(errors.strip().splitlines()), f"exit code {process.returncode}").removeprefix(
                "trainstep: "
            )
        elif process is processes[0] and stream is not None:
            stream.write(text)
            stream.flush()
    return failed
