"""Times the three matmuls of the head with a vocabulary that is no multiple of 8: whole, in two parts, and with 50,304 words.

    python results/h200/odd_vocabulary.py runs/odd_vocabulary.csv      # one GPU; ten seconds

bf16, a chunk of tokens, rows of logits aligned to 32 bytes, as ops/linear_cross_entropy.py has them. Each design has a
turn of five calls in each of nine rounds; a sample is the mean of its calls.
"""

import argparse
import csv
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

WORDS, SPLIT, MORE = 50_257, 50_256, 50_304
CALLS, ROUNDS = 5, 9
Products = dict[str, Callable[[], object]]


def logits_of(tokens: int, words: int) -> Tensor:
    """(tokens, words), random, with rows padded to a multiple of 16."""
    return torch.randn(tokens, -(-words // 16) * 16, device="cuda").bfloat16()[:, :words]


def products(tokens: int, width: int, words: int, split: int) -> Products:
    """z = x W^T, dx = z W and dW = z^T x, of the words before `split` and of those behind it."""
    x, weight = (torch.randn(size, width, device="cuda").bfloat16() for size in (tokens, words))
    z, dx, dweight = logits_of(tokens, words), torch.empty_like(x), torch.zeros_like(weight)
    parts = [part for part in (slice(split, words), slice(0, split)) if part.start < part.stop]

    def forward() -> None:
        for part in parts:
            torch.mm(x, weight[part].T, out=z[:, part])

    def hidden() -> None:
        for part in parts:
            dx.addmm_(z[:, part], weight[part], beta=0 if part is parts[0] else 1)

    def of_weight() -> None:
        for part in parts:
            dweight[part].addmm_(z[:, part].T, x)

    return {"z": forward, "dx": hidden, "dW": of_weight}


def turn_ms(run: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(CALLS):
        run()
    ended.record()
    torch.cuda.synchronize()
    ms: float = began.elapsed_time(ended) / CALLS
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the samples")
    parser.add_argument("--sizes", default="2048x4096,8192x4096,8192x768", help="tokens x width")
    asked = parser.parse_args()
    try:
        sizes = [(int(tokens), int(width)) for tokens, width in (size.split("x") for size in asked.sizes.split(","))]
    except ValueError:
        parser.error(f"--sizes: must be tokens x width, as 2048x4096,8192x768, not {asked.sizes}")
    with open(asked.file, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["tokens", "width", "design", "product", "ms"])
        for tokens, width in sizes:
            designs = {
                "whole": products(tokens, width, WORDS, WORDS),
                "in two": products(tokens, width, WORDS, SPLIT),
                f"{MORE} words": products(tokens, width, MORE, MORE),
            }
            samples: dict[tuple[str, str], list[float]] = {}
            for turn in range(-1, ROUNDS):  # the first is a warm-up
                for design, by_product in designs.items():
                    for product, run in by_product.items():
                        ms = turn_ms(run)
                        if turn >= 0:
                            samples.setdefault((design, product), []).append(ms)
                            rows.writerow([tokens, width, design, product, f"{ms:.4f}"])
            for (design, product), each in samples.items():
                print(f"{tokens} x {width}  {design:12} {product:3} {statistics.median(each):8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
