"""Records training steps with NVIDIA's nsys: builds the command lines and runs them.

    record(steps_command(config, report), report, timeout_s=600)

Unverified: nobody has run this with nsys yet. The options come from its user guide; the tests run a substitute for nsys.

[Note: the capture range] nsys records from the start of the NVTX range CAPTURE_RANGE to its end, so that neither building
nor warming up fills the report. Ranges with plain strings as names, such as torch's, need
NSYS_NVTX_PROFILER_REGISTER_ONLY=0.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainstep.config.import_path import python_command
from trainstep.config.parsing import to_plain
from trainstep.config.profile import ProfileConfig

CAPTURE_RANGE = "profiled_steps"
SAID = "trainstep: "
"""Prefix of the line in which the recorded process says how it failed; nsys prints other lines around it."""
_EXPORT_TIMEOUT_S = 600.0


class NsysFailed(Exception):
    """nsys, or the process that it recorded, failed; the message is one sentence."""


def steps_command(
    config: ProfileConfig, report: Path, *, pytorch: str = "none", python_backtrace: bool = False
) -> list[str]:
    """The command line that records a config's profiled steps into `report`, a .nsys-rep file.

    `pytorch`: the value of nsys's option --pytorch, which annotates torch's functions.
    """
    return [
        *("nsys", "profile", "--trace=cuda,nvtx"),  # not osrt, which slows the host, and which no table of ours reads
        *("--capture-range=nvtx", f"--nvtx-capture={CAPTURE_RANGE}", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"),
        *("--capture-range-end=stop", "--kill=none"),  # the process ends by itself
        "--cuda-graph-trace=node",
        *([] if pytorch == "none" else [f"--pytorch={pytorch}"]),
        # nsys takes Python's stacks together with those of CUDA calls, and these need sampling.
        *(
            ["--python-backtrace=cuda", "--cudabacktrace=all"]
            if python_backtrace
            else ["--sample=none", "--cpuctxsw=none"]
        ),
        # nsys replaces %p and the like in names: so a plain % is written %%.
        *("--force-overwrite=true", f"--output={str(report.with_suffix('')).replace('%', '%%')}"),
        *python_command("trainstep.measure.step.nsys_steps", json.dumps(to_plain(config))),
    ]


def export_command(report: Path) -> list[str]:
    """The command line that exports a report to an SQLite file beside it."""
    table = report.with_suffix(".sqlite")
    return ["nsys", "export", "--type=sqlite", "--force-overwrite=true", f"--output={table}", str(report)]


def record(command: Sequence[str], report: Path, *, timeout_s: float) -> Path:
    """Run the command, export its report, and return the SQLite file.

    Neither file may exist before: nsys would overwrite it, or an old file would be read as the result of this run.
    Raises NsysFailed if a command fails or leaves no file.
    """
    report.parent.mkdir(parents=True, exist_ok=True)
    exported = report.with_suffix(".sqlite")
    _run(command, report, timeout_s)
    _run(export_command(report), exported, _EXPORT_TIMEOUT_S)
    return exported


def _run(command: Sequence[str], result: Path, timeout_s: float) -> None:
    what = " ".join(command[:2])
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NsysFailed(f"{what}: killed at its time limit of {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with everything that it started
            process.wait()
    if process.returncode:
        raise NsysFailed(f"{what}: exit code {process.returncode}: {_reason(printed)}")
    if not result.exists():
        raise NsysFailed(f"{what}: left no {result}: {_reason(printed)}")


def _reason(printed: str) -> str:
    """The recorded process's own line about its failure, or the last line of all."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    own_lines = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    return (own_lines or lines or ["it printed nothing"])[-1]
