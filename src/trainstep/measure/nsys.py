"""Steps under nsys: the command line, and running it: `record(steps_command(config, report), report, timeout_s=600)`.

Unverified: nobody has run this with nsys yet. The options are those of its user guide; tests run a stand-in of their own.

[Note: the capture range] nsys records from the NVTX range CAPTURE_RANGE to its end, so that neither building nor warm-up fill
the report. Ranges whose names are plain strings, as torch's are, count only with NSYS_NVTX_PROFILER_REGISTER_ONLY=0.
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
"""What the recorded process says of its failure begins so; nsys prints around it."""
_EXPORT_TIMEOUT_S = 600.0


class NsysFailed(Exception):
    """nsys, or what it recorded, failed; the message is one sentence."""


def steps_command(
    config: ProfileConfig, report: Path, *, pytorch: str = "none", python_backtrace: bool = False
) -> list[str]:
    """The command line that records a config's profiled steps into `report`, a .nsys-rep. `pytorch`: nsys's annotations."""
    return [
        *("nsys", "profile", "--trace=cuda,nvtx"),  # no osrt: it slows the host, and no table of ours reads it
        *("--capture-range=nvtx", f"--nvtx-capture={CAPTURE_RANGE}", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"),
        *("--capture-range-end=stop", "--kill=none"),  # the process ends by itself
        "--cuda-graph-trace=node",
        *([] if pytorch == "none" else [f"--pytorch={pytorch}"]),
        # Stacks of Python are taken with those of CUDA's calls, and these need sampling.
        *(
            ["--python-backtrace=cuda", "--cudabacktrace=all"]
            if python_backtrace
            else ["--sample=none", "--cpuctxsw=none"]
        ),
        *("--force-overwrite=true", f"--output={str(report.with_suffix('')).replace('%', '%%')}"),  # %p: its process id
        *python_command("trainstep.measure.nsys_steps", json.dumps(to_plain(config))),
    ]


def export_command(report: Path) -> list[str]:
    """The command line that makes an SQLite file of a report, beside it."""
    table = report.with_suffix(".sqlite")
    return ["nsys", "export", "--type=sqlite", "--force-overwrite=true", f"--output={table}", str(report)]


def record(command: Sequence[str], report: Path, *, timeout_s: float) -> Path:
    """Run the command and export its report; the SQLite file. Neither file may be there yet: nsys would write over them, and an
    old one be read as this run's. NsysFailed where either command fails or leaves no file.
    """
    report.parent.mkdir(parents=True, exist_ok=True)
    exported = report.with_suffix(".sqlite")
    _run(command, report, timeout_s)
    _run(export_command(report), exported, _EXPORT_TIMEOUT_S)
    return exported


def _run(command: Sequence[str], result: Path, timeout_s: float) -> None:
    """Run to the end, with all that it started ended at a time-out."""
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
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NsysFailed(f"{what}: not done after {timeout_s:g} s, and ended") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise NsysFailed(f"{what}: exit code {process.returncode}: {_reason(said)}")
    if not result.exists():
        raise NsysFailed(f"{what}: left no {result}: {_reason(said)}")


def _reason(said: str) -> str:
    """What the recorded process said of its failure, else the last line of all."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    return (own or lines or ["it printed nothing"])[-1]
