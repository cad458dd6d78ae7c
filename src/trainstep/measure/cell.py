"""A cell's own process, spoken to in JSON lines on stdin, answering on stdout.

It is `python -m trainstep.measure.cell`, or a process forked by fork_server.py that goes on with `main` here.

    {"do": "prepare", "workload": …, "config": …, "memory_limit_bytes": …, "compile_cache": folder or null}
                                              -> ready, or finished with a failure; `again`: the process can
                                                 measure another cell after this one
    {"do": "take", "steps": 5, "settle": true}   -> taken; `settle`: after a step that is not timed
    {"do": "finish"}                             -> finished, with the record's parts

`{"event": "stage", …}` comes between, so that the other side knows where a process was that died. What the workload itself
prints goes to stderr. When stdin closes, the process ends its group and so itself at once: no orphan holds a GPU.

[Note: the guard]
A driver that is killed takes the process with it by the kernel's hand, too fast for the process to end what it started
itself. A second process of its group, forked before anything else, sees stdin hang up and ends the group.
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
from trainstep.measure.compilation import use_compile_cache
from trainstep.measure.environment import environment
from trainstep.measure.failures import CellFailed, failure_of, storable
from trainstep.measure.workload import Findings, Measurement, Sampling, Settling, load_workload, runs_user_code
from trainstep.records.facts import Fact, facts_of

_KILL_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""


class Conversation:
    """Requests in, events out."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._lines = requests
        self._answers = answers
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next_request(self) -> dict[str, Any]:
        return self._requests.get()

    def tell(self, event: str, **fields: Any) -> None:
        """ValueError or TypeError, and nothing sent, for what JSON cannot hold."""
        self._answers.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._answers.flush()

    def _listen(self) -> None:
        for line in self._lines:
            self._requests.put(json.loads(line))
        _leave()


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
        """Do what is asked; whatever goes wrong becomes the answer."""
        try:
            if request["do"] == "prepare":
                self._prepare(request)
                self.conversation.tell("ready", again=self._again)
            elif self._measurement is None:
                raise RuntimeError(f"asked to {request['do']} with nothing prepared")
            elif request["do"] == "take":
                if request.get("settle") and isinstance(self._measurement, Settling):
                    self._measurement.settle()
                self._measurement.take(request["steps"])
                self.conversation.tell("taken")
            else:
                measurement = self._measurement
                if isinstance(measurement, Sampling) and not request.get("looks", True):
                    findings = measurement.finish_unseen()
                else:
                    findings = measurement.finish()
                self._measurement = None
                self._finished(findings=_plain_findings(findings, self._extra_facts), again=self._again)
        except BaseException as error:  # noqa: BLE001  (any failure of a workload is a result, sys.exit included)
            self._measurement = None
            failure = failure_of(error, self._stage)
            told = error.facts if isinstance(error, CellFailed) else {}
            self._finished(
                failure=asdict(failure),
                again=self._again and failure.kind == "unsupported",  # nothing of it ran, so nothing is spoiled
                **({"findings": _plain_findings(Findings(samples={}, facts=told), {})} if told else {}),
            )

    def _prepare(self, request: Mapping[str, Any]) -> None:
        self._tell_stage("start")
        # Now, while there is memory to look around with.
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
    """On a CPU: cap what this process may allocate, and offer it to the kernel first should memory run out all the same."""
    if limit_bytes is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    with suppress(OSError):  # not on every system, and read-only in some containers
        Path("/proc/self/oom_score_adj").write_text("1000")


def _leave() -> None:
    """End this process and all it started, at once; as leader of its group it can."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def die_with_parent() -> None:
    """Linux: have the kernel end this process with the thread that started it, even while native code hangs and nothing
    reads stdin. For a cell that is the driver, or the server that forked it."""
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
    stdin.register(0, 0)  # hanging up is always told; no request is taken from the pipe
    stdin.poll()
    os.killpg(0, signal.SIGKILL)


def main(*, forked: bool = False) -> None:
    """Serve requests until stdin closes. They and the answers keep the real stdin and stdout; what the workload itself
    reads is empty, and what it prints goes to stderr. `forked`: from a process that has imported torch (fork_server.py)."""
    _guard_group()
    die_with_parent()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's: the environment's GPU is the one that CUDA takes
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
