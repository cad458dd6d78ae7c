"""A small model trained on several ranks, and in one process on all of their data, for parity tests."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.ops.adamw import AdamW
from trainstep.parallel.ranks import Ranks
from trainstep.training.optimizer import with_masters

ROWS, WIDTH, CLASSES = 6, 8, 5
"""Rows of a rank's micro-batch."""
STEPS = 5
OPTIMIZERS: dict[str, partial[torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}
MASTERS: dict[str, partial[torch.optim.Optimizer]] = {
    "masters": partial(with_masters(AdamW), lr=1e-2),
    "masters of torch's": partial(with_masters(torch.optim.AdamW), lr=1e-2),
}
"""Optimizers of bf16 models."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The options of a model and its training."""

    tied: bool = False
    frozen: bool = False
    unused: str = "none"
    """`everywhere`: a layer that no rank uses; `somewhere`: one that only rank 0 uses."""
    accumulation: int = 1
    clip: float | None = None


class Model(nn.Module):
    """An embedding, two layers, a normalisation's buffer, and a head that may be tied to the embedding."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.register_buffer("offset", torch.randn(WIDTH))
        if case.tied:
            self.head.weight = self.embedding.weight
        if case.frozen:
            self.first.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, *, side: bool) -> Tensor:
        x = self.embedding(tokens) + self.offset
        x = x + self.second(torch.tanh(self.first(x)))
        return self.head(x + self.side(x) if side else x)


def built(case: Case, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(case)


def batches(case: Case, world_size: int) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """For each step, for each rank, its micro-batches: tokens and targets."""
    numbers = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield [
            [tuple(torch.randint(CLASSES, (2, ROWS), generator=numbers)) for _ in range(case.accumulation)]
            for _ in range(world_size)
        ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], case: Case, rank: int) -> Tensor:
    side = case.unused == "none" or (case.unused == "somewhere" and rank == 0)
    return nn.functional.cross_entropy(model(batch[0], side=side), batch[1]) / case.accumulation


@cache
def train_alone(
    case: Case, optimizer_name: str, world_size: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Train in one process: the mean of the ranks' losses is the loss of the concatenated batch.

    `reduce_dtype`: each rank's gradient is rounded to it, and so is their sum after each addition.
    """
    model = built(case).to(dtype)
    optimizer = _optimizer_of(optimizer_name, dtype)(model.parameters())
    for ranks_batches in batches(case, world_size):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank, micro_batches in enumerate(ranks_batches):
            optimizer.zero_grad()
            for batch in micro_batches:
                (loss_of(model, batch, case, rank) / world_size).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    share = parameter.grad.to(reduce_dtype or dtype)
                    sums[parameter] = sums[parameter] + share if parameter in sums else share
        for parameter, total in sums.items():
            parameter.grad = total.to(dtype)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _optimizer_of(name: str, dtype: torch.dtype) -> partial[torch.optim.Optimizer]:
    """The optimizer; of masters that of fp32 or fp64 parameters, which need none."""
    if name in MASTERS and dtype != torch.bfloat16:
        return OPTIMIZERS["adamw"]
    return {**OPTIMIZERS, **MASTERS}[name]


def train_together(ranks: Ranks, start: Callable[..., Any], case: Case, optimizer_name: str) -> list[Tensor]:
    """Train on this rank; its parameters after the same steps. Only rank 0 begins with the right ones."""
    run = started(ranks, start, case, optimizer_name)
    take_steps(ranks, run, case, range(STEPS))
    return [parameter.cpu() for parameter in run.parameters()]


def started(
    ranks: Ranks, start: Callable[..., Any], case: Case, optimizer_name: str, dtype: torch.dtype = torch.float32
) -> Any:
    """A strategy's Run of the model. Only rank 0 begins with the right parameters."""
    model = built(case, seed=ranks.rank).to(ranks.device, dtype)
    return start(model, ranks, _optimizer_of(optimizer_name, dtype))


def take_steps(ranks: Ranks, run: Any, case: Case, numbers: range) -> None:
    """Train on this rank for the steps with these numbers."""
    for ranks_batches in list(batches(case, ranks.world_size))[numbers.start : numbers.stop]:
        micro_batches = [tuple(tensor.to(ranks.device) for tensor in batch) for batch in ranks_batches[ranks.rank]]
        for number, batch in enumerate(micro_batches):
            with run.sync.no_sync() if number < len(micro_batches) - 1 else nullcontext():
                loss_of(run.sync.module, batch, case, ranks.rank).backward()
        run.sync.finish_gradient_synchronization()
        if case.clip is not None:
            run.sync.clip_grad_norm_(case.clip)
        run.optimizer.step()
        run.optimizer.zero_grad()


def distance(trained: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any element."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(trained, expected, strict=True))
