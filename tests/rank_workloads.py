"""Workloads without torch for cells of several ranks: `rank_workloads:RANKED` and so on.

Config: `ranks`, `steps`, `act` (one of workloads.ACTS) of the rank `victim` in `where` (prepare, take, finish); `wait`: the other
ranks then sleep in their `take`, as in a collective, or with `out` all leave; `said`: a text that all write to stderr before;
`others`: how the others fail before. The recorded seconds of step i are i + rank on even steps and i - rank on odd ones.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.parallel.liveness.watch import LEFT
from trainstep.records.record import Fact, Failure, Samples
from workloads import ACTS, memory_limit

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TRAINSTEP_TOKEN", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


class Ranked:
    def __init__(self, *, shares_worker: bool = False) -> None:
        self.shares_worker = shares_worker

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "RankedMeasurement":
        stage("build")
        if config.get("unsupported"):
            raise CellFailed(Failure(kind="unsupported", phase="build", message="not here"))
        return RankedMeasurement(config, stage)


class RankedMeasurement:
    def __init__(self, config: Mapping[str, Any], stage: Stage) -> None:
        self._config = config
        self._stage = stage
        self._rank = int(os.environ["RANK"])
        self._steps = 0
        self._called("prepare")

    def take(self, steps: int) -> None:
        self._stage("steps")
        self._steps += steps
        self._follow(self._config.get("others"))
        self._called("take")
        if self._config.get("said"):
            os.write(2, self._config["said"].format(rank=self._rank).encode())
        if self._config.get("wait") == "out":
            os._exit(LEFT)
        if self._config.get("wait") and self._rank != self._config.get("victim"):
            time.sleep(600)

    def finish(self) -> Findings:
        self._called("finish")
        # Even steps are slower on high ranks, odd ones on low ranks.
        values = tuple(float(abs(step + (self._rank if step % 2 == 0 else -self._rank))) for step in range(self._steps))
        rank_0_samples = {"only_rank_0": Samples(unit="s", values=(1.0,))} if self._rank == 0 else {}
        facts = {name: os.environ[name] for name in VARIABLES}
        facts |= {"pid": os.getpid(), **memory_limit()}
        if "source" in self._config:
            facts["model_source"] = self._config["source"][self._rank]
        return Findings(
            samples={
                "step": Samples(unit="s", values=values, warmups=(9.0 + self._rank,)),
                "clock": Samples(unit="Hz", values=(100.0 + self._rank,)),
                **rank_0_samples,
            },
            facts={name.lower(): Fact(value=value) for name, value in facts.items()},
            tables={"own": {"rank": [self._rank]}},
        )

    def _follow(self, how: str | None) -> None:
        """Let the other ranks fail before the death of the victim is noticed."""
        if how is None:
            return
        if self._rank == self._config["victim"]:
            time.sleep(0.5)
        elif how == "raise":
            raise RuntimeError("Connection closed by peer")
        else:
            os.write(2, f"trainstep: rank 1 (host, pid 7) died; rank {self._rank} leaves\n".encode())
            os._exit(LEFT)

    def _called(self, what: str) -> None:
        config = self._config
        if self._rank == config.get("victim") and config.get("where", "take") == what:
            ACTS[config["act"]](config)


RANKED = Ranked()
SHARED = Ranked(shares_worker=True)
