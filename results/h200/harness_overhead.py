"""What the harness adds to a step: trainstep's windows against a plain PyTorch loop over the same model, in one process.

Two processes of the same program differ by a few percent from their start (where memory lies, which core), so both loops
run here in turns of ten steps on the same weights and batches, the order reversed each turn.

    trainstep sweep results/h200/harness_overhead.toml --out results/h200/harness_overhead.jsonl
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from trainstep.config.parsing import build_run
from trainstep.measure.harness.workload import Findings, Stage
from trainstep.measure.step.workload import prepare_step
from trainstep.records.compare import compare_samples
from trainstep.records.record import Fact, Samples

TURN = 10


class HarnessOverhead:
    """Samples `plain` and `step`; facts `ratio` (step over plain, with its interval)."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "HarnessOverhead":
        run = build_run(config)
        self.harness = prepare_step(run, stage)
        self.assembly, self.optimizer = self.harness.assembly, self.harness.assembly.step.optimizer
        self.device, self.autocast = torch.device(run.device), run.precision == "bf16_autocast"
        self.times: dict[str, list[float]] = {"plain": [], "step": []}
        self.turns = 0
        return self

    def take(self, steps: int) -> None:
        for _ in range(steps // TURN):
            order = ("plain", "step") if self.turns % 2 else ("step", "plain")
            self.turns += 1
            for name in order:
                one = self.plain if name == "plain" else lambda: self.harness.time_window(1)
                one()  # the first of a turn follows the other loop
                self.times[name] += [one() for _ in range(TURN)]

    def plain(self) -> float:
        [batch] = self.assembly.micro_batches(0)
        self.synchronize()
        started_s = time.perf_counter()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.assembly.module(batch["tokens"], batch["targets"])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.synchronize()
        return time.perf_counter() - started_s

    def finish(self) -> Findings:
        samples = {name: Samples(unit="s", values=tuple(times)) for name, times in self.times.items()}
        found = compare_samples(samples["plain"], samples["step"], turn_steps=(TURN, TURN), minimum_effect=0.0)
        facts = {"ratio": found.ratio, "ratio_low": found.low, "ratio_high": found.high}
        return Findings(samples=samples, facts={name: Fact(value=value, unit="ratio") for name, value in facts.items()})

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


WORKLOAD = HarnessOverhead()
