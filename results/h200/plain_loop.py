"""The same step as a plain PyTorch loop: what `trainstep bench` is held against, to show what its harness adds.

A workload like any other (trainstep.measure.workload), so that the two take turns in live processes:

    trainstep sweep results/h200/harness_overhead.toml --out results/h200/harness_overhead.jsonl
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from trainstep.config.model import ModelConfig
from trainstep.config.parsing import build_run
from trainstep.measure.workload import Findings, Stage
from trainstep.records.record import Samples
from trainstep.training.attention import attention_named
from trainstep.training.transformer import Transformer


class PlainLoop:
    """forward, backward, optimizer, synchronise; the host's clock around them and nothing else."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "PlainLoop":
        run = build_run(config)
        assert isinstance(run.model, ModelConfig)
        torch.manual_seed(run.seed)
        device = torch.device(run.device)
        attention = attention_named(run.attention, run.context, device)
        with device:
            self.model = Transformer(run.model, attention=attention, context=run.context)
        if run.compile == "model":
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        self.autocast = run.precision == "bf16_autocast"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.learning_rate, fused=True)
        self.vocab_size, self.shape, self.device = run.model.vocab_size, (run.batch_size, run.context), device
        self.times: list[float] = []
        stage("warmup")
        self.take(run.warmups)
        self.warmups, self.times = self.times, []
        return self

    def take(self, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(self.vocab_size, self.shape, device=self.device)
            targets = torch.randint(self.vocab_size, self.shape, device=self.device)
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
                loss = self.model(tokens, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            self.times.append(time.perf_counter() - started_s)

    def finish(self) -> Findings:
        return Findings(samples={"step": Samples(unit="s", values=tuple(self.times), warmups=tuple(self.warmups))}, facts={})


WORKLOAD = PlainLoop()
