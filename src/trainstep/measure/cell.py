"""A cell's own process: `python -m trainstep.measure.cell`, spoken to in JSON lines on stdin, answering on stdout.

    {"do": "prepare", "workload": …, "config": …, "memory_limit_bytes": …}   -> ready, or finished with a failure
    {"do": "take", "steps": 5}                                                -> taken
    {"do": "finish"}                                                          -> finished, with the record's parts

`{"event": "stage", …}` comes between, so that the other side knows where a process was that died. What the workload itself
prints goes to stderr. When stdin closes, the process leaves at once: an orphan does not hold a GPU.
"""

import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from trainstep.measure.environment import environment
from trainstep.measure.failures import failure_of
from trainstep.measure.workload import Findings, Measurement, load_workload
from trainstep.records.record import Fact


class Conversation:
    """Requests in, events out, over this process's own stdin and stdout."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next_request(self) -> dict[str, Any]:
        return self._requests.get()

    def tell(self, event: str, **fields: Any) -> None:
        self._answers.write(json.dumps({"event": event, **fields}) + "\n")
        self._answers.flush()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._requests.put(json.loads(line))
        os._exit(0)


class CellProcess:
    """Answers requests about one measurement at a time."""

    def __init__(self, conversation: Conversation, visible_devices: str | None) -> None:
        self.conversation = conversation
        self._visible_devices = visible_devices
        self._measurement: Measurement | None = None
        self._stage = "start"
        self._again = False
        self._extra_facts: dict[str, Fact] = {}

    def answer(self, request: Mapping[str, Any]) -> None:
        """Do what is asked; whatever goes wrong becomes the answer."""
        try:
            if request["do"] == "prepare":
                self._prepare(request)
                self.conversation.tell("ready")
            elif self._measurement is None:
                raise RuntimeError(f"asked to {request['do']} with nothing prepared")
            elif request["do"] == "take":
                self._measurement.take(request["steps"])
                self.conversation.tell("taken")
            else:
                findings = self._measurement.finish()
                self._measurement = None
                self._finished(findings=_plain_findings(findings, self._extra_facts), again=self._again)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (any failure of a workload is a result)
            self._measurement = None
            self._finished(failure=asdict(failure_of(error, self._stage)), again=False)

    def _prepare(self, request: Mapping[str, Any]) -> None:
        self._tell_stage("start")
        _limit_memory(request.get("memory_limit_bytes"))
        started_s = time.perf_counter()
        workload = load_workload(request["workload"])
        self._extra_facts = {"import_s": Fact(value=time.perf_counter() - started_s, unit="s")}
        self._again = workload.shares_worker
        self._measurement = workload.prepare(request["config"], self._tell_stage)

    def _tell_stage(self, stage: str) -> None:
        self._stage = stage
        self.conversation.tell("stage", stage=stage)

    def _finished(self, **fields: Any) -> None:
        seen_from_here = asdict(environment(visible_devices=self._visible_devices))
        self.conversation.tell("finished", environment=seen_from_here, **fields)


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
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


def main() -> None:
    """Serve requests until stdin closes. The answers keep the real stdout; anything printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    process = CellProcess(Conversation(answers), os.environ.get("CUDA_VISIBLE_DEVICES"))
    while True:
        process.answer(process.conversation.next_request())


if __name__ == "__main__":
    main()
