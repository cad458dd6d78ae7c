"""How long a cell takes to start: from the driver's request for a process to the stage `build`, forked and as a new process.

    python results/cpu/start_times.py 20 > results/cpu/start_times.txt

What counts is all that stands before the model is built: the process itself, imports, the environment, the memory limit. Forked and
new processes alternate, so that a busy machine slows both. The first forked cell waits for its server's import of torch and is
printed apart.
"""

import argparse
import statistics
import time

from trainstep.config.grid import Cell
from trainstep.config.model import size
from trainstep.config.parsing import to_plain
from trainstep.config.run import RunConfig
from trainstep.measure.harness.runner import Limits, open_run, run_alone

LIMITS = {"forked": Limits(), "new": Limits(forks=False)}


def start_s(limits: Limits) -> float:
    """Seconds from the request for a process to the stage `build` of its cell."""
    config = RunConfig(model=size("tiny"), context=64, device="cpu", warmups=1, steps=1)
    reached_s: dict[str, float] = {}

    def tell(_cell: Cell, stage: str) -> None:
        reached_s.setdefault(stage, time.monotonic())

    asked_s = time.monotonic()
    run = open_run(Cell(workload="train_step", config=to_plain(config), point={}), limits, tell)
    try:
        record, _ = run_alone(run, inspect=False)
    finally:
        run.connection.close()
    if record.failure is not None:
        raise SystemExit(f"the cell failed: {record.failure.message}")
    return reached_s["build"] - asked_s


def main(count: int) -> None:
    """Print a line a start, then the medians."""
    print(f"first forked {start_s(LIMITS['forked']):.3f}", flush=True)
    times: dict[str, list[float]] = {kind: [] for kind in LIMITS}
    for index in range(count):
        for kind in LIMITS if index % 2 else reversed(LIMITS):
            times[kind].append(start_s(LIMITS[kind]))
            print(f"{kind} {times[kind][-1]:.3f}", flush=True)
    for kind, values in times.items():
        print(f"median {kind} {statistics.median(values):.3f} s, {min(values):.3f} to {max(values):.3f}, of {count}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="starts of each kind")
    main(parser.parse_args().count)
