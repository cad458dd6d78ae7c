"""Run command lines of trainstep without measuring, each in a process forked from one that has imported the verbs.

    with Readers() as readers:
        end = readers.run(["report", "a.jsonl"], folder)        # exit code, output, seconds, peak memory

Nothing is measured: a replacement of the executors returns a record that says so for each of at most 20 groups; the checks
before and the tables, pages and files after are the real ones. Run as a program, this module is the process that forks. A reader
may take 2 GB and 60 s, in addition to the memory of Python with pandas and the start of a process.
"""

import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attacks.attack import Outcome
from cell_maker import MARK, import_path, marked, wait_until

LARGEST_BYTES = 2_000_000_000 + 400_000_000
LONGEST_S = 60.0 + 10.0
_STOP_BYTES = 2 * LARGEST_BYTES
"""The limit that the kernel enforces, so that an attack cannot exhaust the machine that runs it."""
_MOST_GROUPS = 20
_CODES = (0, 2, 3, 130)
_LEFT_S = 15.0
_NOT_FOR_A_PERSON = ("[Errno", "PosixPath(", "Exception ignored")


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a command line. `code`: negative for a signal."""

    code: int
    out: bytes
    err: str
    seconds: float
    peak_bytes: int
    timed_out: bool


class Readers:
    """The process that forks one for each command line; it starts with the first one."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._started: subprocess.Popen[str] | None = None

    def _process(self) -> subprocess.Popen[str]:
        if self._started is None:
            self._started = self._start()
        return self._started

    def _start(self) -> subprocess.Popen[str]:
        self._scratch = tempfile.TemporaryDirectory(prefix="trainstep-readers-")
        inherited = {name: value for name, value in os.environ.items() if name not in ("TRAINSTEP_TEST", "RANK")}
        return subprocess.Popen(
            [sys.executable, "-m", "attacks.reader"],
            env={**inherited, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": "", MARK: self._mark},
            cwd=self._scratch.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Kill the process. Closing its input is not enough, since ranks that other tests forked also hold that pipe open."""
        if self._started is not None:
            self._started.kill()
            self._started.wait()
            self._scratch.cleanup()
            self._started = None

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        environ: dict[str, str] | None = None,
        largest_file_bytes: int | None = None,
        stdout: str = "read",
    ) -> End:
        """Run a command line in a folder. `largest_file_bytes`: writing beyond this size fails. `stdout`: `read`, or `closed`
        or `full` for a new Python, which has the real executors."""
        process = self._process()
        out, err = (Path(self._scratch.name) / name for name in ("out", "err"))
        request = {
            "arguments": list(arguments),
            "folder": str(folder),
            "stdout": stdout,
            "out": str(out),
            "err": str(err),
            "environ": environ or {},
            "largest_file_bytes": largest_file_bytes,
        }
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return End(**answer, out=out.read_bytes(), err=err.read_text(errors="replace"))

    def left(self) -> Iterator[Outcome]:
        """An outcome if processes still run 15 s after the last command line ended."""

        def others() -> list[int]:
            return [pid for pid in marked(self._mark) if pid != self._process().pid]

        if not wait_until(lambda: not others(), _LEFT_S):
            yield Outcome(case="all command lines", left=f"processes {others()}")


def judged(case: str, ends: Iterable[End], **breaches: str) -> Outcome:
    """The outcome of a case from the ends of its command lines and from breaches that the caller found."""
    all_breaches = {name: text for name, text in breaches.items() if text}
    for end in ends:
        if traceback_text := _traceback(end):
            all_breaches.setdefault("traceback", traceback_text)
        elif words := _unfit_words(end):
            all_breaches.setdefault("other", words)
        if end.peak_bytes > LARGEST_BYTES:
            all_breaches.setdefault("memory", f"{end.peak_bytes / 1e9:.1f} GB")
        if end.seconds > LONGEST_S or end.timed_out:
            all_breaches.setdefault("time", f"{end.seconds:.0f} s")
    return Outcome(case=case, **all_breaches)


def _traceback(end: End) -> str:
    """The last frame and error of a traceback, or an unexpected exit code; empty without either."""
    if "Traceback (most recent call last)" in end.err:
        return f"{last_frame(end.err)}: {ascii(end.err.strip().splitlines()[-1])[:200]}"
    if end.timed_out or end.code in _CODES:
        return ""
    return f"exit code {end.code}: {ascii(end.err)[-200:]}"


def last_frame(text: str) -> str:
    """The innermost named function of ours in a traceback, as `report/kit/tables.py:64 in_ms`."""
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith('File "')]
    ours = [line for line in frames if "/trainstep/" in line and ", in <" not in line] or frames or ["?"]
    path, _, rest = ours[-1].removeprefix('File "').partition('", line ')
    line, _, function = rest.partition(", in ")
    return f"{path.rpartition('/trainstep/')[2]}:{line} {function}"


def _unfit_words(end: End) -> str:
    """Output that a user should not see: no sentence, Python's own error texts, or escape codes; empty without it."""
    lines = end.err.strip().splitlines()
    if end.code == 2 and not (lines and lines[-1].startswith("trainstep: ")):
        return f"exit code 2 without a sentence: {ascii(end.err)[-200:]}"
    if word := next((word for word in _NOT_FOR_A_PERSON if lines and word in lines[-1]), None):
        return f"{word} in {ascii(lines[-1])[:200]}"
    shown = end.out.decode(errors="replace") + end.err
    controls = sorted(
        {letter for letter in shown if not letter.isprintable() and letter not in "\n \t\r" and ord(letter) < 160}
    )
    return f"control characters {controls!a} are shown" if controls else ""


def _serve() -> None:
    """Fork one process for each request on stdin."""
    _import_and_replace()
    for line in sys.stdin:
        request = json.loads(line)
        started_s = time.monotonic()
        pipes = {name: os.pipe() for name in ("out", "err")}  # pipes, since the size of files may be limited
        pid = os.fork()
        if pid == 0:
            _become_trainstep(request, out=pipes["out"][1], err=pipes["err"][1])
        for _, writing_end in pipes.values():
            os.close(writing_end)
        outputs = {reading_end: bytearray() for reading_end, _ in pipes.values()}
        timed_out = not _listen(outputs, pid, started_s + LONGEST_S)
        if timed_out:
            os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        for name, (reading_end, _) in pipes.items():
            os.close(reading_end)
            Path(request[name]).write_bytes(outputs[reading_end])
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started_s,
            "peak_bytes": usage.ru_maxrss * 1024,
            "timed_out": timed_out,
        }
        print(json.dumps(answer), flush=True)


def _listen(outputs: dict[int, bytearray], pid: int, until_s: float) -> bool:
    """Read the output of a process until it has ended and its pipes are empty; False if that takes too long.

    A process that it started may keep the pipes open, so their ends do not show that it has ended.
    """
    ended = os.pidfd_open(pid)
    waited = [ended, *outputs]
    while waited:
        left_s = max(0.0, until_s - time.monotonic()) if ended in waited else 0.0
        ready, _, _ = select.select(waited, [], [], left_s)
        if not ready:
            break
        for descriptor in ready:
            piece = b"" if descriptor == ended else os.read(descriptor, 2**20)
            if piece:
                outputs[descriptor] += piece
            else:
                waited.remove(descriptor)
    os.close(ended)
    return ended not in waited


def _import_and_replace() -> None:
    """Import all modules of the verbs, replace the executors, and cache facts about the machine that do not change."""
    from trainstep.measure.harness import local as executor_local
    from trainstep.measure.harness import slurm as executor_slurm
    from trainstep.measure.machine import device, environment, inspection
    from trainstep.records.record import Failure, Record

    state, source = environment.git_state(environment.PACKAGE), environment.source_hash(environment.PACKAGE)
    environment.git_state = lambda package: state
    environment.source_hash = lambda package: source
    inspection.probe_device = lambda timeout_s=0.0: device.Probe(threads=1, cpu_capability="AVX2")
    here = environment.environment()

    def measure_nothing(groups: Any, *_: Any, **__: Any) -> Iterator[list[Record]]:
        for group in groups[:_MOST_GROUPS]:
            yield [
                Record(
                    workload=cell.workload,
                    key=cell.key,
                    config=cell.config,
                    environment=here,
                    started_at="2026-11-01T00:00:00+00:00",
                    duration_s=0.0,
                    failure=Failure(kind="unsupported", phase="build", message="nothing is measured here"),
                )
                for cell in group[:_MOST_GROUPS]
            ]

    executor_local.run_groups = executor_slurm.run_groups_on_slurm = measure_nothing

    import plotly.graph_objects  # noqa: F401

    from trainstep.cli import app
    from trainstep.traces import nsys, profile, snapshot  # noqa: F401

    for verb in app._VERBS:
        __import__(f"trainstep.cli.{verb}")
    assert "torch" not in sys.modules
    gc.freeze()  # a collection would copy the memory it touches in every fork


def _become_trainstep(request: dict[str, Any], *, out: int, err: int) -> NoReturn:
    """Run the command line in this forked process."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_STOP_BYTES, _STOP_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(request["environ"])
    os.dup2(err, 2)
    os.dup2(os.open("/dev/full", os.O_WRONLY) if request["stdout"] == "full" else out, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    if request["largest_file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file_bytes"],) * 2)
    if request["stdout"] != "read":
        if request["stdout"] == "closed":
            os.close(1)
        os.execv(sys.executable, [sys.executable, "-m", "trainstep", *request["arguments"]])
    _run_and_leave(request["arguments"])


def _run_and_leave(arguments: list[str]) -> NoReturn:
    """Run the command line as `python -m trainstep` does, and leave without Python's own shutdown."""
    from trainstep.cli import app

    sys.argv = ["trainstep", *arguments]
    code: Any = 1
    try:
        app.main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001  (an uncaught error is the breach that is searched for)
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve()
