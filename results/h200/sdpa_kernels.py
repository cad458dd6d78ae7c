"""Which kernels torch's attention runs in the built-in model's step, and how long each takes.

    python results/h200/sdpa_kernels.py runs/sdpa_kernels.csv      # one GPU; two minutes

Two blocks with the heads of each size and a vocabulary of 1,000 words, causal, batch 4 (fewer where four sequences would have
more than 32,768 tokens), with the attention that torch chooses (sdpa), and with flash's and cuDNN's alone. Three steps are profiled
after three others. A row is a kernel of attention: its calls in a block, and the median of its times in microseconds.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainstep.config.parsing import build_run
from trainstep.training.build import build_step

HEADS = {"small": (12, 64), "medium": (16, 64), "large": (20, 64), "2.7B": (32, 80), "8B": (32, 128)}
"""Size -> heads and their width."""
CONTEXTS = (256, 1024, 2048, 4096, 32_768)
ATTENTIONS = ("sdpa", "sdpa_flash", "sdpa_cudnn")
TOKENS, BATCH, BLOCKS, WARMUPS, STEPS = 32_768, 4, 2, 3, 3
WORDS = ("flash", "cudnn", "fmha", "sdpa")
"""What the names of attention's kernels have in them."""
Case = dict[str, Any]


def cases() -> Iterator[Case]:
    """All sizes in bf16 autocast; medium also in compiled blocks, in bf16 weights and captured."""
    for size in HEADS:
        for context in CONTEXTS:
            yield {"size": size, "context": context, "precision": "bf16_autocast", "compile": "none", "capture": "none"}
    start = {"size": "medium", "precision": "bf16_autocast", "compile": "none", "capture": "none"}
    for context in (256, 1024, 2048):
        for options in ({"compile": "block"}, {"precision": "bf16_master"}, {"capture": "step"}):
            yield {**start, "context": context, **options}


def batch_of(case: Case) -> int:
    return min(BATCH, max(1, TOKENS // int(case["context"])))


def kernels_us(case: Case, attention: str) -> dict[str, list[float]]:
    """Kernel of attention -> the microseconds of each of its calls in the profiled steps."""
    heads, width = HEADS[case["size"]]
    options = {name: value for name, value in case.items() if name != "size"}
    shape = {"d_model": heads * width, "d_ff": 4 * heads * width, "heads": heads, "layers": BLOCKS, "vocab_size": 1000}
    run = build_run({**shape, **options, "batch_size": batch_of(case), "attention": attention, "device": "cuda"})
    torch.compiler.reset()  # blocks of other shapes are no recompilations of these
    assembly = build_step(run)
    for index in range(WARMUPS):
        assembly.take(assembly.micro_batches(index))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for index in range(WARMUPS, WARMUPS + STEPS):
            assembly.take(assembly.micro_batches(index))
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiled.events() or []:
        if event.device_type.name == "CUDA" and any(word in event.name.lower() for word in WORDS):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the rows")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    with open(asked.file, "w", newline="") as file:
        rows = csv.writer(file)
        names = ["context", "precision", "compile", "capture"]
        rows.writerow(["size", "batch", "heads", "head_dim", *names, "attention", "kernel", "calls", "us"])
        for case in cases():
            for attention in ATTENTIONS:
                size = case["size"]
                label = [size, batch_of(case), *HEADS[size], *(case[name] for name in names), attention]
                try:
                    found = kernels_us(case, attention)
                except (RuntimeError, ValueError) as error:  # a kernel that does not take this shape
                    print(*label, "does not run:", str(error).splitlines()[0][:100], flush=True)
                    continue
                for kernel, each in sorted(found.items()):
                    rows.writerow([*label, kernel[:90], len(each) // STEPS // BLOCKS, f"{statistics.median(each):.1f}"])
                print(
                    *label,
                    {kernel[:40]: f"{statistics.median(each):.1f} us" for kernel, each in found.items()},
                    flush=True,
                )
                file.flush()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
