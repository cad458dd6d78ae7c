"""Messages are sent while backward still runs, and nothing waits for them before it ends.

Messages are delayed: one completes only when backward has reached the first layer, and an earlier wait for it fails. So the order
of events proves what times would only suggest.
"""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_strategies import STRATEGIES
from ranks import run_ranks
from trainstep.parallel.ranks import Ranks

LAYERS = 4


class LogsBackward(torch.autograd.Function):
    """An identity that logs when backward reaches it."""

    @staticmethod
    def forward(context: Any, x: Tensor, log: "Log", layer: int) -> Tensor:
        context.log, context.layer = log, layer
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context.log.add(f"backward {context.layer}")
        if context.layer == 0:
            context.log.reached_first.set()
        return gradient, None, None


class Log:
    """The events of a step, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reached_first = threading.Event()

    def add(self, line: str) -> None:
        self.lines.append(line)


class Delayed:
    """A message that is pending until backward has reached the first layer."""

    def __init__(self, log: Log, pending: Any) -> None:
        self._log, self._pending = log, pending

    def wait(self) -> None:
        assert self._log.reached_first.is_set(), "waited for a message during backward"
        self._log.add("waited")
        self._pending.wait()


class Layers(nn.Module):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(LogsBackward.apply(x, self.log, number))
        return x.square().mean()


def log_of_a_step(ranks: Ranks, strategy: str) -> list[str]:
    log = Log()
    torch.manual_seed(0)
    model = Layers(log)
    sync = STRATEGIES[strategy](model, ranks, partial(torch.optim.SGD, lr=0.1)).sync
    send = sync.collectives.all_reduce

    def delayed(tensor: Tensor, *, label: str = "", **how: Any) -> Delayed:
        log.add(f"sent {label}")
        return Delayed(log, send(tensor, label=label, **how))

    sync.collectives.all_reduce = delayed
    model(torch.randn(2, 8).requires_grad_()).backward()
    log.add("backward over")
    sync.finish_gradient_synchronization()
    return log.lines


@pytest.mark.parametrize("strategy", ["overlapped", "bucketed", "bucketed_ends"])
def test_messages_are_sent_while_backward_runs(strategy: str):
    for lines in run_ranks(2, log_of_a_step, strategy):
        first_sent = next(number for number, line in enumerate(lines) if line.startswith("sent"))
        assert first_sent < lines.index("backward 1")
        assert lines.index("waited") > lines.index("backward over")
        assert sum(line.startswith("sent") for line in lines[: lines.index("backward 0")]) >= LAYERS - 1


@pytest.mark.parametrize("strategy", ["naive", "flat"])
def test_messages_are_sent_after_backward(strategy: str):
    for lines in run_ranks(2, log_of_a_step, strategy):
        assert not any(line.startswith("sent") for line in lines[: lines.index("backward over")])
