"""Kills of verbs that run long: SIGKILL to the driver or its process group, or Ctrl-C, at a moment drawn at random.

Afterwards no process is left within 15 s, what was announced as finished is in the file, the file reads, and the next start, as
the last one of a subject, leaves nothing in the temporary folder and no part of a file beside the records.
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
"""Of a whole run, on a machine that has much else to do."""
_ANNOUNCED = re.compile(r"^\[\d+/\d+\] .*\n", re.MULTILINE)
COMMANDS = {
    "bench": "--device cpu --model tiny --context 16,32,48 --steps 2 --page page.html",
    "sweep": "s.toml --rounds 2",
    "parallel": "--device cpu --model tiny --context 16 --ranks 2 --sync none,flat --steps 2",
    "memory": "--device cpu --model tiny --context 16,32 --keep-snapshot kept",
    "profile": "--device cpu --model tiny --context 16,32 --steps 2 --keep-trace kept",
    "numerics": "--device cpu --model toy --precision fp32,bf16",
    "attention": "--device cpu --seq 16,32 --implementation plain,trainstep --steps 2",
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
_WAYS = ("driver", "driver", "group", "interrupt")


class VerbKills:
    """60 of them for each verb at full size. The records of all its runs are in one file, which is to outlive every kill."""

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
        """A sweep that is whole gives way to another one; one that was killed goes on."""

    def attack(self, draw: random.Random, folder: Path) -> Outcome:
        """One kill; the empty folder is not used."""
        if self._whole_run_s is None:
            self._whole_run_s, problem = self._first_run()
            if problem:
                return Outcome(case=f"a run that nobody kills: {' '.join(self._command)}", other=problem)
        way, after_s = draw.choice(_WAYS), draw.uniform(0.0, 1.0) ** 1.5 * self._whole_run_s
        before, mark = self._records(), uuid.uuid4().hex
        process = self._start(mark)
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            _kill(process, way)
        ended, err = _last_words(process)
        self._whole_runs += process.returncode == 0
        left = [] if wait_until(lambda: not marked(mark), _LEFT_S) else marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return Outcome(
            case=f"{way} killed after {after_s:.2f} of {self._whole_run_s:.1f} s: {' '.join(self._command)}",
            traceback=_own_traceback(err) if way == "interrupt" else "",
            lost=self._lost(before, len(_ANNOUNCED.findall(err))),
            left=f"{len(left)} processes" if left else "",
            time="" if ended else "it did not end",
            other=f"exit code {process.returncode} of {way}" if process.returncode not in (0, -9, -2, 130) else "",
        )

    def afterwards(self) -> Iterator[Outcome]:
        """The next start, which is let run to its end, and what is left behind it."""
        if self._whole_run_s is not None:
            process = self._start(uuid.uuid4().hex)
            ended, err = _last_words(process)
            there = [path.name for path in self._temporary.iterdir()]
            parts = [path.name for path in self._folder.rglob("*") if re.search(r"\.(partial|tmp|rounds)$", path.name)]
            yield Outcome(
                case="the start after all kills",
                traceback="" if process.returncode == 0 else f"exit code {process.returncode}: {err[-300:]!a}",
                folders=f"{len(there)} in the temporary folder, such as {there[:3]}; {parts}" if there or parts else "",
                time="" if ended else "it did not end",
            )
        self._home.cleanup()

    def _first_run(self) -> tuple[float, str]:
        """The seconds of a run that nobody kills, and what is wrong with it."""
        for path in (self._folder, self._temporary):
            path.mkdir()
        started_s = time.monotonic()
        process = self._start(uuid.uuid4().hex)
        _, err = _last_words(process)
        self._whole_runs += 1
        wrong = f"exit code {process.returncode}: {err[-300:]!a}" if process.returncode else ""
        return time.monotonic() - started_s, wrong

    def _start(self, mark: str) -> subprocess.Popen[str]:
        (self._folder / "s.toml").write_text(_SWEEP.replace("0.05", f"{0.05 + self._whole_runs / 10**6}"))
        environ = {
            **os.environ,
            "PYTHONPATH": import_path(),
            "CUDA_VISIBLE_DEVICES": "",
            **({"TRITON_INTERPRET": "1"} if self._verb == "tune" else {}),
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(
                Path(self._home.name, "torchs_cache")
            ),  # torch would keep it in TMPDIR, for good
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
        """The key and time of each record in the file."""
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
    """Whoever runs us may ignore it (nohup, a background job), and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill(process: subprocess.Popen[str], way: str) -> None:
    if way == "group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if way == "interrupt" else signal.SIGKILL)


def _last_words(process: subprocess.Popen[str]) -> tuple[bool, str]:
    """Whether it ended by itself in time, and what it said on stderr."""
    try:
        return True, process.communicate(timeout=_LONGEST_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return False, process.communicate()[1]


def _own_traceback(err: str) -> str:
    """A traceback that goes through our code: that of an interpreter which has not come so far is not ours to prevent."""
    ours = "Traceback (most recent call last)" in err and "/trainstep/" in err
    return f"{last_frame(err)}: {err.strip().splitlines()[-1]!a}" if ours else ""
