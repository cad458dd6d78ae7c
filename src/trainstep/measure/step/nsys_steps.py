"""Runs a config's profiled steps in the process that nsys records.

`python -m trainstep.measure.step.nsys_steps CONFIG` takes a ProfileConfig as JSON. It builds and warms up like a cell, then
opens the capture range and, inside it, runs the profiled steps with our spans as NVTX ranges. It times nothing, because
nsys slows the steps that it records.
"""

import json
import sys

import torch

from trainstep.config.import_path import make_children_safe, search_current_folder
from trainstep.config.model import UserModel
from trainstep.config.parsing import from_plain
from trainstep.config.profile import ProfileConfig
from trainstep.measure.harness.failures import failure_of
from trainstep.measure.step.nsys import CAPTURE_RANGE, SAID
from trainstep.measure.step.workload import prepare_step
from trainstep.spans import nvtx_spans, span


def run_steps(config: ProfileConfig) -> None:
    """Warm up, then run the profiled steps, each synchronised at its end."""
    measurement = prepare_step(config, lambda _stage: None)
    measurement.take(1)  # the profiled steps repeat the last step's batches, and a run may have no warm-up
    # Not one of our spans: while nsys annotates torch, they are record_function ranges, whose names end in numbers.
    with torch.cuda.nvtx.range(CAPTURE_RANGE), nvtx_spans():
        for number in range(config.profiled_steps):
            with span(f"step {number}"):
                measurement.settle()


def main(text: str) -> int:
    """Run a config's steps and return the exit code. A failure is printed as one line that begins with SAID."""
    make_children_safe()
    try:
        config = from_plain(ProfileConfig, json.loads(text))
        if isinstance(config.model, UserModel):
            search_current_folder()
        run_steps(config)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's model may raise anything)
        message = failure_of(error, "steps").message
        print(f"{SAID}{' '.join(message.split())}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
