"""A training loop by Lightning: `python lightning_loop.py --plant small_kernels`, or under torchrun with its DDP."""

import contextlib
import logging
import os
import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from model import GPT, Sizes
from options import options
from plants import TINY_BUCKET_MB, Samples, TooLarge, optimizer

asked = options()
plants, device = asked.plants, asked.device
sizes = Sizes.of(device, plants, plain=asked.plain)
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Trains the GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(sizes, plants, device)
        if asked.compile:
            self.model.compile()
        self.losses: list[float] = []
        self.too_large = TooLarge(device) if "fragmenting" in plants else None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)
        if "item" in plants:
            self.losses.append(loss.item())
        if self.too_large is not None:
            self.too_large.ask()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.parameters(), plants, plain=asked.plain)


class Sending(DDPStrategy):  # type: ignore[misc]
    """Sends gradients after each micro-batch."""

    def block_backward_sync(self) -> Any:
        return contextlib.nullcontext()


def strategy() -> Any:
    """DDP where there are ranks."""
    if ranks == 1:
        return "auto"
    kind = Sending if "accumulation_sync" in plants else DDPStrategy
    tiny = {"bucket_cap_mb": TINY_BUCKET_MB} if "tiny_buckets" in plants else {}
    return kind(process_group_backend="nccl" if device == "cuda" else "gloo", **tiny)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
samples = Samples(
    plants, context=sizes.context, vocabulary=sizes.vocabulary, features=sizes.features, batch=sizes.batch
)
loader = torch.utils.data.DataLoader(samples, batch_size=sizes.batch, **asked.loader)
with tempfile.TemporaryDirectory() as folder:
    lightning.Trainer(
        max_steps=asked.steps,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=ranks,
        strategy=strategy(),
        precision="bf16-mixed" if device == "cuda" and "fp32" not in plants else "32-true",
        accumulate_grad_batches=asked.micro_batches,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)
