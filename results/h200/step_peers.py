"""Times our fastest captured steps beside stock parts: torch.compile, its CUDA graphs, and a Hugging Face Llama, also with Liger.

    python results/h200/step_peers.py runs/step_peers.csv small medium large      # one GPU; two or three minutes a size

All variants of a size live in one process and take turns in rounds, forwards and backwards. The unit `step` is one step between
two synchronisations, in seconds, `window` a tenth of ten steps between two, `host` the host's part of a step; `peak` is the most
that a variant allocates while it is built and warmed up, less what the others hold, in bytes; `clock` (Hz) and `power` (W) are
the GPU's, read behind each window while further steps run; power is the mean of the last second, in which several variants may
have run. Batch 4, AdamW on every parameter, the same number of tokens; the Llama has the built-in model's shape (grouped heads
none, an untied head).
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from captured_peers import SHOWN, Rows, Take, in_rounds  # beside this script
from torch import Tensor

from trainstep.config.model import size as size_of
from trainstep.config.parsing import build_run
from trainstep.training.build import build_step

OURS = {"adamw": "trainstep", "attention": "trainstep", "capture": "step", "compile": "block"}
STOCK = {"adamw": "fused", "attention": "sdpa", "capture": "none", "precision": "bf16_autocast"}
FASTEST = "ours: captured, fused ops, bf16 weights with fp32 masters"
VARIANTS: dict[str, dict[str, str]] = {
    FASTEST: OURS | {"ops": "fused", "precision": "bf16_master"},
    "ours: the same, compiled whole": OURS | {"ops": "fused", "precision": "bf16_master", "compile": "model"},
    "ours: captured, fused ops, bf16 autocast": OURS | {"ops": "fused", "precision": "bf16_autocast"},
    "torch.compile": STOCK | {"compile": "model"},
    "torch.compile reduce-overhead": STOCK | {"compile": "none"},  # `built` compiles it
}
LLAMA, LIGER = "Hugging Face Llama, torch.compile", "Hugging Face Llama, blocks compiled, Liger"
BATCH, ROUNDS, WARMUPS = 4, 7, 8


def built(name: str, size: str, context: int) -> Take:
    """A function that takes the step of that index."""
    reduced = name.endswith("reduce-overhead")
    assembly = build_step(build_run({"model": size, "context": context, "device": "cuda", **VARIANTS[name]}))
    if reduced:
        assembly.module.compile(mode="reduce-overhead", fullgraph=True)

    def take(index: int) -> Tensor:
        if reduced:
            torch.compiler.cudagraph_mark_step_begin()
        loss: Tensor = assembly.take(assembly.micro_batches(index))
        return loss

    return take


def llama(size: str, context: int, *, liger: bool) -> Take:
    """The same of transformers' Llama in bf16 autocast, SDPA and fused AdamW.

    With Liger its blocks are compiled: torch 2.11 cannot compile Liger 0.8.5's loss, whose sums read a number on the host.
    """
    # Imported here: whoever compares ours with torch.compile alone needs neither.
    import transformers
    from transformers.models.llama import LlamaForCausalLM

    shape: Any = size_of(size)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.train()
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
        for block in model.model.layers:
            block.compile()
    else:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocab_size, (4, BATCH, context), device="cuda")

    def take(index: int) -> Tensor:
        batch = tokens[index % 4]
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return take


def warm(name: str, size: str, context: int) -> tuple[Take, int]:
    """A variant, warmed up, and its peak in bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    take = llama(size, context, liger=name == LIGER) if name in (LLAMA, LIGER) else built(name, size, context)
    for index in range(WARMUPS):
        take(index)
    torch.cuda.synchronize()
    return take, torch.cuda.max_memory_allocated() - held


def steps_of(size: str, context: int, names: list[str], write: Callable[[Rows], None]) -> Rows:
    """Time every variant of a size. Rows are written as they come, so that a run that is cut off keeps its rounds."""
    what = f"{size} {context}"
    rows: Rows = []
    variants: dict[str, Take] = {}
    for name in names:
        began = time.perf_counter()
        try:
            variants[name], peak = warm(name, size, context)
        except Exception as error:  # noqa: BLE001  (the other variants go on without it)
            print(f"{what}: {name}: left out, {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        rows.append((what, name, "peak", peak))
        print(f"{what}: {name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
    write(rows)
    for index in range(ROUNDS):
        of_round: Rows = []
        in_rounds(what, variants, of_round, rounds=[index])
        write(of_round)
        rows += of_round
    variants.clear()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the raw samples; a new one")
    parser.add_argument("sizes", nargs="+", help="the models, such as small or 2.7B")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--only", nargs="+", help="variants whose names have one of these words, beside our fastest")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    names = [*VARIANTS, LLAMA, LIGER]
    if asked.only is not None:
        names = [name for name in names if name == FASTEST or any(word in name for word in asked.only)]
    with open(asked.file, "x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "variant", "unit", "value"))

        def write(rows: Rows) -> None:
            writer.writerows((*row[:3], f"{row[3]:.9g}") for row in rows)
            file.flush()

        for size in asked.sizes:
            tell(steps_of(size, asked.context, names, write))


def tell(rows: Rows) -> None:
    """Print medians, and how long each variant takes in terms of our fastest."""
    samples: dict[tuple[str, str, str], list[float]] = {}
    for *key, value in rows:
        samples.setdefault((key[0], key[2], key[1]), []).append(value)
    for (what, unit, variant), values in samples.items():
        middle = statistics.median(values)
        factor, shown = SHOWN.get(unit, (1e3, "ms"))
        ours = statistics.median(samples.get((what, unit, FASTEST), values))
        of_ours = "" if unit in ("clock", "power") else f"{middle / ours:6.3f} of ours, "
        print(
            f"{what:12s} {variant:58s} {unit:7s} {factor * middle:9.3f} {shown:3s} {of_ours}n = {len(values)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
