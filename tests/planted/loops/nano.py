"""A training loop by hand, in nanoGPT's manner: `python nano.py --plant slow_loader,adamw_loop`, or under torchrun with DDP."""

import contextlib
import os

import torch
import torch.distributed as dist
from model import GPT, Sizes
from options import options
from plants import TINY_BUCKET_MB, Samples, TooLarge, optimizer

asked = options()
plants, device = asked.plants, asked.device
sizes = Sizes.of(device, plants, plain=asked.plain)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

model: torch.nn.Module = GPT(sizes, plants, device).to(device)
if asked.compile:
    model.compile()
updates = optimizer(model.parameters(), plants, plain=asked.plain)
if ranks > 1:
    tiny = {"bucket_cap_mb": TINY_BUCKET_MB} if "tiny_buckets" in plants else {}
    model = torch.nn.parallel.DistributedDataParallel(model, **tiny)
pins = asked.loader["pin_memory"]
samples = Samples(
    plants, context=sizes.context, vocabulary=sizes.vocabulary, features=sizes.features, batch=sizes.batch
)
loader = torch.utils.data.DataLoader(samples, batch_size=sizes.batch, **asked.loader)
half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and "fp32" not in plants)
too_large = TooLarge(device) if "fragmenting" in plants else None
losses: list[float] = []
batches = iter(loader)
total = torch.zeros((), device=device)
for _ in range(asked.steps):
    for micro_batch in range(asked.micro_batches):
        batch = {name: tensor.to(device, non_blocking=pins) for name, tensor in next(batches).items()}
        waits = ranks > 1 and micro_batch + 1 < asked.micro_batches and "accumulation_sync" not in plants
        with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            with half:
                loss = model(**batch) / asked.micro_batches
            loss.backward()
        total += loss.detach()
    if "item" in plants:
        losses.append(loss.item())
    if too_large is not None:
        too_large.ask()
    updates.step()
    updates.zero_grad()
print(f"mean loss {total.item() / asked.steps:.4f}")
if ranks > 1:
    dist.destroy_process_group()
