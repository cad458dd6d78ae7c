"""Kills of long-running verbs: SIGKILL to the driver or its process group, or Ctrl-C, at a random moment.

Afterwards all processes end within 15 s, every cell announced as finished is in the file, and the file can be read. The last
start of a subject runs to its end and leaves nothing in the temporary folder and no part of a file beside the records.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from attacks.attack import Outcome
from attacks.reader import last_frame
from cell_maker import MARK, import_path, marked, wait_until
from trainstep.records.store import Store

_LEFT_S = 15.0
_LONGEST_S = 900.0
"""Seconds that a whole run may take on a busy machine."""
_ANNOUNCED = re.compile(r"^\[\d+/\d+\] .*\n", re.MULTILINE)
COMMANDS = {
    "bench": "--device cpu --model tiny --context 16,32,48 --steps 2 --page page.html",
    "sweep": "s.toml --rounds 2",
    "parallel": "--device cpu --model tiny --context 16 --ranks 2 --sync none,flat --steps 2",
    "memory": "--device cpu --model tiny --context 16,32 --keep-snapshot kept",
    "profile": "--device cpu --model tiny --context 16,32 --steps 2 --keep-trace kept --page page.html",
    "numerics": "--device cpu --model toy --precision fp32,bf16",
    "attention": "--device cpu --seq 16,32 --implementation plain,trainstep --steps 2",
    "op": "rms_norm,swiglu --device cpu --implementation eager,trainstep --steps 2",
    "collectives": "--backend gloo --ranks 2 --mib 0.01,0.1,0.2",
    "tune": "--device cpu --shape 1x1x32,1x1x16 --arithmetic ieee --head-dim 16 --kernel forward --candidates 16x16x2x1,32x32x2x1",
}
_SWEEP = """
compare = "name"
[grid]
workload = "workloads:SLEEP"
index = [0, 1]
name = ["a", "b"]
seconds = 0.05
steps = 4
cold_compile = true
act = "compile"
"""
_KILLS = ("driver", "driver", "group", "interrupt")


class VerbKills:
    """Kills of one verb: 60 cases at full size. All runs write to one file of records, which must survive every kill."""

    full = 60

    def __init__(self, verb: str) -> None:
        self.name = f"kills_{verb}"
        self._verb = verb
        self._command = (verb, *COMMANDS[verb].split(), "--out", "records.jsonl")
        self._home = tempfile.TemporaryDirectory(prefix="trainstep-kills-", ignore_cleanup_errors=True)
        self._folder = Path(self._home.name, "user")
        self._temporary = Path(self._home.name, "temporary")
        self._whole_run_s: float | None = None
        self._whole_runs = 0
        """Finished runs so far: after each, the sweep gets other cells; a killed run is continued."""

    def attack(self, draw: random.Random, folder: Path) -> Outcome:
        """Kill the verb once; the empty folder is not used."""
        if self._whole_run_s is None:
            self._whole_run_s, problem = self._first_run()
            if problem:
                return Outcome(case=f"a run without a kill: {' '.join(self._command)}", other=problem)
        kill, after_s = draw.choice(_KILLS), draw.uniform(0.0, 1.0) ** 1.5 * self._whole_run_s
        before, mark = self._records(), uuid.uuid4().hex
        process = self._start(mark)
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            _kill(process, kill)
        ended, err = _last_words(process)
        self._whole_runs += process.returncode == 0
        left = [] if wait_until(lambda: not marked(mark), _LEFT_S) else marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return Outcome(
            case=f"{kill} killed after {after_s:.2f} of {self._whole_run_s:.1f} s: {' '.join(self._command)}",
            traceback=_own_traceback(err) if kill == "interrupt" else "",
            lost=self._lost(before, len(_ANNOUNCED.findall(err))),
            left=f"{len(left)} processes" if left else "",
            time="" if ended else "it did not end",
            other=f"exit code {process.returncode} of {kill}" if process.returncode not in (0, -9, -2, 130) else "",
        )

    def afterwards(self) -> Iterator[Outcome]:
        """Let the next start run to its end, and report what it leaves."""
        if self._whole_run_s is not None:
            process = self._start(uuid.uuid4().hex)
            ended, err = _last_words(process)
            leftovers = [path.name for path in self._temporary.iterdir()]
            parts = [path.name for path in self._folder.rglob("*") if re.search(r"\.(partial|tmp|rounds)$", path.name)]
            yield Outcome(
                case="the start after all kills",
                traceback="" if process.returncode == 0 else f"exit code {process.returncode}: {err[-300:]!a}",
                folders=f"{len(leftovers)} in the temporary folder, such as {leftovers[:3]}; {parts}"
                if leftovers or parts
                else "",
                time="" if ended else "it did not end",
            )
        self._home.cleanup()

    def _first_run(self) -> tuple[float, str]:
        """The seconds of a run without a kill, and its problem if it has one."""
        for path in (self._folder, self._temporary):
            path.mkdir()
        started_s = time.monotonic()
        process = self._start(uuid.uuid4().hex)
        _, err = _last_words(process)
        self._whole_runs += 1
        problem = f"exit code {process.returncode}: {err[-300:]!a}" if process.returncode else ""
        return time.monotonic() - started_s, problem

    def _start(self, mark: str) -> subprocess.Popen[str]:
        (self._folder / "s.toml").write_text(_SWEEP.replace("0.05", f"{0.05 + self._whole_runs / 10**6}"))
        environ = {
            **os.environ,
            "PYTHONPATH": import_path(),
            "CUDA_VISIBLE_DEVICES": "",
            **({"TRITON_INTERPRET": "1"} if self._verb == "tune" else {}),
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(self._home.name, "torchs_cache")),  # torch would keep it in TMPDIR
            MARK: mark,
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "trainstep", *self._command],
            cwd=self._folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_heed_ctrl_c,
        )

    def _records(self) -> list[str]:
        """Key and time of each record in the file."""
        return [f"{record.key} {record.started_at}" for record in Store(self._folder / "records.jsonl").finished()]

    def _lost(self, before: list[str], announced: int) -> str:
        try:
            after = self._records()
        except ValueError as error:
            return f"the file does not read: {error}"
        if after[: len(before)] != before:
            return "records of earlier runs"
        if len(after) - len(before) < announced:
            return f"{announced} announced, {len(after) - len(before)} in the file"
        page = self._folder / "page.html"
        if page.exists() and not page.read_text().rstrip().endswith("</html>"):
            return "the page of an earlier run is cut off"
        return ""


def _heed_ctrl_c() -> None:
    """Restore the default of SIGINT, which a child inherits as ignored under nohup or in a background job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill(process: subprocess.Popen[str], kill: str) -> None:
    if kill == "group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if kill == "interrupt" else signal.SIGKILL)


def _last_words(process: subprocess.Popen[str]) -> tuple[bool, str]:
    """Whether the process ended by itself in time, and its stderr."""
    try:
        return True, process.communicate(timeout=_LONGEST_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return False, process.communicate()[1]


def _own_traceback(err: str) -> str:
    """A traceback through our code, or an empty text; one before our code is imported is no breach."""
    has_our_frames = "Traceback (most recent call last)" in err and "/trainstep/" in err
    return f"{last_frame(err)}: {err.strip().splitlines()[-1]!a}" if has_our_frames else ""
