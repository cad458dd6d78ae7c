"""`tile_workloads:TUNER`: the workload attention_tiles with checks that fail for three tiles, as those of kernels can."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from trainstep.measure.attention.lone_kernel import TileCheck, TileCheckWorkload
from trainstep.measure.attention.tiles import AttentionTilesWorkload
from trainstep.measure.harness.workload import Stage
from trainstep.records.record import Fact

FAULTS, RAISES, IS_WRONG = 16, 32, 128
"""block_k of the tile that kills its process, of the one that does not compile, and of the one whose output is wrong."""


class FaultyCheck(TileCheckWorkload):
    def prepare(self, config: Mapping[str, Any], stage: Stage) -> TileCheck:
        stage("compile")
        match config["tile"]["block_k"]:
            case 16:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 32:
                raise RuntimeError("out of resource: shared memory")
            case 128:
                return TileCheck({"wrong": Fact(value="o is not finite")})
        return super().prepare(config, stage)


CHECK = FaultyCheck()
TUNER = AttentionTilesWorkload(check="tile_workloads:CHECK")
