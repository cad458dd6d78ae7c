"""Runs one cell in a process of its own: requests come as JSON lines on stdin, events go out on stdout.

The process is `python -m trainstep.measure.harness.cell`, or a fork from fork_server.py that calls `main` here.

    {"do": "prepare", "workload": …, "config": …, "memory_limit_bytes": …, "compile_cache": folder or null}
                                              -> ready, or finished with a failure; `again`: the process can
                                                 measure another cell after this one
    {"do": "take", "steps": 5, "settle": true}   -> taken; `settle`: run one step before them that is not timed
    {"do": "finish", "inspect": true}            -> finished, with the record's parts; `inspect`: run also the extra
                                                 steps that follow the timed steps (memory peaks, a profiled step)

`{"event": "stage", …}` comes between, so that the driver knows in which stage a process died. What the workload itself
prints goes to stderr. When stdin closes, the process ends its group and itself at once: no orphan holds a GPU.

[Note: the guard]
The kernel kills this process when its driver is killed, too fast for it to end the processes that it started. A second
process of its group, forked before anything else, notices that stdin hangs up and ends the group.
"""

import ctypes
import json
import os
import queue
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from trainstep.config.import_path import make_children_safe, search_current_folder
from trainstep.measure.harness.failures import CellFailed, failure_of, storable
from trainstep.measure.harness.workload import (
    Findings,
    Measurement,
    Sampling,
    Settling,
    load_workload,
    runs_user_code,
    use_compile_cache,
)
from trainstep.measure.machine.environment import environment
from trainstep.records.facts import Fact, facts_of

_KILL_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""


class Conversation:
    """Reads requests from the driver and writes events to it."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._lines = requests
        self._answers = answers
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next_request(self) -> dict[str, Any]:
        return self._requests.get()

    def tell(self, event: str, **fields: Any) -> None:
        """Send an event. Raises ValueError or TypeError, and sends nothing, if JSON cannot hold the fields."""
        self._answers.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._answers.flush()

    def _listen(self) -> None:
        for line in self._lines:
            self._requests.put(json.loads(line))
        # stdin is closed: end this process and, as the leader of its group, all that it started.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


class CellProcess:
    """Answers requests about one measurement at a time."""

    def __init__(self, conversation: Conversation, visible_devices: str | None, *, forked: bool) -> None:
        self.conversation = conversation
        self._visible_devices = visible_devices
        self._forked = forked
        self._environment: dict[str, Any] = {}
        self._measurement: Measurement | None = None
        self._stage = "start"
        self._again = False
        self._extra_facts: dict[str, Fact] = {}

    def answer(self, request: Mapping[str, Any]) -> None:
        """Do what the request says; any exception becomes the answer."""
        try:
            if request["do"] == "prepare":
                self._prepare(request)
                self.conversation.tell("ready", again=self._again)
            elif self._measurement is None:
                raise RuntimeError(f"request {request['do']} came before anything was prepared")
            elif request["do"] == "take":
                if request.get("settle") and isinstance(self._measurement, Settling):
                    self._measurement.settle()
                self._measurement.take(request["steps"])
                self.conversation.tell("taken")
            else:
                measurement = self._measurement
                if isinstance(measurement, Sampling) and not request.get("inspect", True):
                    findings = measurement.finish_uninspected()
                else:
                    findings = measurement.finish()
                self._measurement = None
                self._finished(findings=_plain_findings(findings, self._extra_facts), again=self._again)
        except BaseException as error:  # noqa: BLE001  (any failure of a workload is a result, sys.exit included)
            self._measurement = None
            failure = failure_of(error, self._stage)
            facts = error.facts if isinstance(error, CellFailed) else {}
            self._finished(
                failure=asdict(failure),
                # An unsupported cell ran nothing that could disturb the next cell.
                again=self._again and failure.kind == "unsupported",
                **({"findings": _plain_findings(Findings(samples={}, facts=facts), {})} if facts else {}),
            )

    def _prepare(self, request: Mapping[str, Any]) -> None:
        self._tell_stage("start")
        # Before memory is limited: inspecting the machine needs memory.
        self._environment = self._environment or asdict(environment(visible_devices=self._visible_devices))
        _limit_memory(request.get("memory_limit_bytes"))
        if request.get("compile_cache"):
            use_compile_cache(request["compile_cache"])
        started_s = time.perf_counter()
        if runs_user_code(request["workload"], request["config"]):
            search_current_folder()
        workload = load_workload(request["workload"])
        self._extra_facts = facts_of(import_s=time.perf_counter() - started_s, forked=self._forked)
        self._again = workload.shares_worker
        self._measurement = workload.prepare(request["config"], self._tell_stage)

    def _tell_stage(self, stage: str) -> None:
        self._stage = storable(stage)
        self.conversation.tell("stage", stage=self._stage)

    def _finished(self, **fields: Any) -> None:
        self.conversation.tell("finished", environment=self._environment, **fields)


def _plain_findings(findings: Findings, extra_facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {
        "samples": {name: asdict(samples) for name, samples in findings.samples.items()},
        "facts": {name: asdict(fact) for name, fact in {**extra_facts, **findings.facts}.items()},
        "tables": {name: dict(columns) for name, columns in findings.tables.items()},
    }


def _limit_memory(limit_bytes: int | None) -> None:
    """Limit what this process may allocate on a CPU, and make it the first that the kernel ends if memory runs out."""
    if limit_bytes is None:
        return
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit == resource.RLIM_INFINITY or limit_bytes < hard_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    with suppress(OSError):  # the file is missing on some systems, and read-only in some containers
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with_parent() -> None:
    """On Linux, have the kernel end this process together with the thread that started it.

    This works even while native code hangs and nothing reads stdin. A cell's parent is the driver, or the server that
    forked the cell.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)


def _guard_group() -> None:
    """Leave a process in this group that ends the group when stdin hangs up. [Note: the guard]"""
    if os.getpgrp() != os.getpid() or os.fork():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(1, 3)
    stdin = select.poll()
    stdin.register(0, 0)  # poll always reports a hang-up; with no event asked for, no request is read from the pipe
    stdin.poll()
    os.killpg(0, signal.SIGKILL)


def main(*, forked: bool = False) -> None:
    """Serve requests until stdin closes. `forked`: this process comes from one that has imported torch (fork_server.py).

    Requests and answers keep the real stdin and stdout. For the workload itself stdin is empty, and what it prints goes
    to stderr.
    """
    _guard_group()
    die_with_parent()
    # The order of NVML, so that the GPU in the environment's record is the GPU that CUDA takes.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    make_children_safe()
    process = CellProcess(Conversation(requests, answers), os.environ.get("CUDA_VISIBLE_DEVICES"), forked=forked)
    while True:
        process.answer(process.conversation.next_request())


if __name__ == "__main__":
    main()
