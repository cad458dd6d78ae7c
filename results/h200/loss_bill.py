"""Times the loss with its head's matmul beside the three matmuls that it needs, and beside Liger's.

    python results/h200/loss_bill.py runs/loss_bill.csv                           # one GPU; half a minute

32,768 tokens, 4,096 wide, 151,936 words, bf16, forward and backward, all in one process in turns. Units: `seconds` of a call, by
the device's events; `clock` of the SMs in Hz and `power` of the board in W (the mean of the last second), while it runs; `bytes`,
the most that torch's allocator held over inputs and gradients; `error` of the gradients of hidden and weight, relative to their
largest, for 4,096 tokens against fp64 (plain: the same of plain PyTorch in bf16; the 2x rule).
"""

import argparse
import csv
import statistics
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainstep.measure.machine.nvml import GpuState
from trainstep.ops.linear_cross_entropy import linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 32_768, 4_096, 151_936
ROUNDS = 7
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(chunk_tokens: int, sum_dtype: torch.dtype | None) -> Loss:
    return lambda x, w, t: linear_cross_entropy(x, w, t, chunk_tokens=chunk_tokens, sum_dtype=sum_dtype)


def liger(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # not needed by who leaves it out

    loss: Tensor = LigerFusedLinearCrossEntropyLoss()(w, x, t)
    return loss


def plain(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return cross_entropy((x @ w.T).float() if x.dtype != torch.float64 else x @ w.T, t)


LOSSES: dict[str, Loss] = {
    "ours, 768 tokens a chunk, summed in fp32": ours(768, torch.float32),
    "ours, 768 tokens a chunk, summed in bf16": ours(768, None),
    "ours, 2,048 tokens a chunk, summed in fp32": ours(2_048, torch.float32),
    "ours, 2,048 tokens a chunk, summed in bf16": ours(2_048, None),
    "ours, 3,072 tokens a chunk, summed in bf16": ours(3_072, None),
    "ours, 4,096 tokens a chunk, summed in bf16": ours(4_096, None),
    "ours, 8,192 tokens a chunk, summed in bf16": ours(8_192, None),
    "Liger": liger,
}


def inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(vocabulary, WIDTH, device="cuda") * WIDTH**-0.5).bfloat16().requires_grad_()
    return x, w, torch.randint(vocabulary, (tokens,), device="cuda")


def both_passes(loss: Loss, x: Tensor, w: Tensor, t: Tensor) -> None:
    x.grad = w.grad = None
    loss(x, w, t).backward()


def turn(run: Callable[[], object], gpu: GpuState) -> dict[str, float | None]:
    """Seconds of one call, and the GPU's state while it runs, by unit."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    state = {"clock": gpu.sm_clock_hz(), "power": gpu.power_w()}  # the GPU still works
    torch.cuda.synchronize()
    return {"seconds": begin.elapsed_time(end) / 1e3, **state}


def errors(loss: Loss, exact: tuple[Tensor, Tensor], x: Tensor, w: Tensor, t: Tensor) -> list[float]:
    both_passes(loss, x, w, t)
    return [
        float((tensor.grad - gradient).abs().max() / gradient.abs().max())  # type: ignore[operator]
        for tensor, gradient in zip((x, w), exact, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the raw samples")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    rows: list[tuple[str, str, float]] = []
    gpu = GpuState(str(torch.cuda.get_device_properties(0).uuid))
    small = inputs(4_096, 8_192)
    wide = [tensor.detach().double().requires_grad_() for tensor in small[:2]]
    plain(wide[0], wide[1], small[2]).backward()
    exact = tuple(tensor.grad for tensor in wide)
    chunked = {"ours, 16 chunks, summed in fp32": ours(256, torch.float32)}
    for tokens in (512, 384, 256):  # 32,768 tokens by 4,096, 3,072 and 2,048
        chunked[f"ours, {-(-4_096 // tokens)} chunks, summed in bf16"] = ours(tokens, None)
    for name, loss in {"plain": plain, **chunked, "Liger": liger}.items():
        rows += [(name, "error", error) for error in errors(loss, exact, *small)]  # type: ignore[arg-type]
    del small, wide, exact
    x, w, t = inputs(TOKENS, VOCABULARY)
    dz = torch.randn(TOKENS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        matmuls: dict[str, Callable[[], object]] = {
            "matmul x W^T": lambda: x @ w.T, "matmul dz W": lambda: dz @ w, "matmul dz^T x": lambda: dz.T @ x
        }  # fmt: skip
        for run in matmuls.values():
            run()
    losses = dict(LOSSES)
    for name, loss in LOSSES.items():
        try:
            both_passes(loss, x, w, t)
            x.grad = w.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() + x.nbytes + w.nbytes
            both_passes(loss, x, w, t)
            rows.append((name, "bytes", torch.cuda.max_memory_allocated() - before))
        except (ImportError, torch.OutOfMemoryError) as error:
            print(f"{name}: left out, {error}")
            del losses[name]
    for index in range(ROUNDS):
        turns = list(matmuls.items())
        turns += [(name, lambda loss=loss: both_passes(loss, x, w, t)) for name, loss in losses.items()]
        for name, run in turns[:: 1 if index % 2 else -1]:
            with torch.set_grad_enabled(name in losses):
                rows += [(name, unit, value) for unit, value in turn(run, gpu).items() if value is not None]
    with open(asked.file, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "unit", "value"))
        writer.writerows(rows)
    tell(rows, matmuls, losses)


def tell(rows: Sequence[tuple[str, str, float]], matmuls: Collection[str], losses: Collection[str]) -> None:
    """Print the GPU's state, peaks, errors, and each loss in terms of the three matmuls."""
    median = {
        name: statistics.median(value for what, unit, value in rows if what == name and unit == "seconds")
        for name in [*matmuls, *losses]
    }
    bill = sum(median[name] for name in matmuls)
    print(f"three matmuls {1e3 * bill:.1f} ms")
    for unit, factor, word in (("clock", 1e-6, "MHz"), ("power", 1.0, "W")):
        values = [value for _, read, value in rows if read == unit]
        if values:
            print(f"{unit} {factor * min(values):.0f} to {factor * max(values):.0f} {word}")
    for what, unit, value in rows:
        if unit in ("bytes", "error"):
            print(what, unit, f"{value / 2**30:.3f} GiB" if unit == "bytes" else f"{value:.2e}")
    for name in losses:
        print(f"{name}: {1e3 * median[name]:.1f} ms, {median[name] / bill:.3f} of the three matmuls")


if __name__ == "__main__":
    main()
