"""Times recomputation chosen for a budget beside the fewest whole blocks, every k-th, that fit the same budget.

    python results/h200/budget_pairs.py runs/budget_pairs.csv 6 8 10              # one GPU; about a minute a budget
    python results/h200/budget_pairs.py runs/budget_pairs_compiled.csv 6 8 10 --capture none

A process for each budget (GiB) builds both steps (medium, batch 8 at 2,048 tokens, fused ops, bf16), and they take turns in
rounds. Units: `step`, one step between two synchronisations, in seconds; `host`, the host's part of it; `window`, a tenth of ten
steps between two; `clock` and `power`, the GPU's in Hz and W (captured_peers.py); `reserved`, the most that torch's allocator
reserved for a variant while it was built, warmed up and captured, in bytes. The every-k-th variants are tried from the one that
recomputes least, and the first whose reserved bytes are within the budget is the peer.
"""

import argparse
import csv
import gc
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from captured_peers import Rows, Take, in_rounds  # beside this script
from torch import Tensor

from trainstep.config.parsing import build_run
from trainstep.measure.step.recompute_budget import fit_budget
from trainstep.training.build import build_step

STEP = {
    "model": "medium", "batch_size": 8, "context": 2048, "device": "cuda", "precision": "bf16", "ops": "fused",
    "attention": "trainstep", "adamw": "trainstep",
}  # fmt: skip
ALLOCATED_GIB = {24: 14.3, 12: 14.07, 8: 13.6, 6: 13.13, 5: 12.66, 4: 12.19, 3: 11.25, 2: 9.37, 1: 4.89}
"""Every k-th block -> allocated GiB of such a step (budgets_whole.md; 5 and 24 by difference): what exceeds a budget is not tried.
5 was missing when budget_pairs.csv was measured."""
ROUNDS, WARMUPS = 7, 6


def warm(values: dict[str, object], *, fit: bool) -> tuple[Take, int]:
    """A step, warmed up, and the most that was reserved for it, in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assembly = build_step(build_run({**STEP, **values}))
    if fit:
        print(fit_budget(assembly).facts(), flush=True)

    def take(index: int) -> Tensor:
        return assembly.take(assembly.micro_batches(index))

    for index in range(WARMUPS):
        take(index)
    torch.cuda.synchronize()
    return take, torch.cuda.max_memory_reserved() - before


def pair(budget_gib: float, how: dict[str, object]) -> Rows:
    """Both variants of a budget, in turns."""
    what = f"{budget_gib:g} GiB, capture {how['capture']}, compile {how['compile']}"
    chosen, reserved = warm({**how, "recompute_budget_gib": budget_gib}, fit=True)
    torch.cuda.set_per_process_memory_fraction(1.0)  # from here on both are in this process
    variants: dict[str, Take] = {"budget": chosen}
    rows: Rows = [(what, "budget", "reserved", reserved)]
    for every, allocated_gib in ALLOCATED_GIB.items():
        if allocated_gib > budget_gib:
            continue
        whole, reserved = warm({**how, "recompute": "block", "recompute_every": every}, fit=False)
        name = f"every {every}"
        rows.append((what, name, "reserved", reserved))
        if reserved <= budget_gib * 2**30:
            variants[name] = whole
            break
        del whole
    in_rounds(what, variants, rows, rounds=range(ROUNDS))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the raw samples; they are added to it")
    parser.add_argument("budgets", nargs="+", type=float, help="budgets in GiB")
    parser.add_argument("--capture", choices=("step", "none"), default="step")
    parser.add_argument("--compile", choices=("block", "none"), default="block")
    asked = parser.parse_args()
    if len(asked.budgets) > 1:
        again: Callable[[float], list[str]] = lambda budget: [sys.executable, __file__, asked.file, str(budget)]  # noqa: E731
        for budget in asked.budgets:
            subprocess.run([*again(budget), "--capture", asked.capture, "--compile", asked.compile], check=False)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    rows = pair(asked.budgets[0], {"capture": asked.capture, "compile": asked.compile})
    with open(asked.file, "a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(("what", "variant", "unit", "value"))
        writer.writerows(rows)
    windows = {name: [s for _, of, unit, s in rows if (of, unit) == (name, "window")] for _, name, _, _ in rows}
    ours, *others = (samples for samples in windows.values() if samples)
    if not others:
        raise SystemExit(f"{rows[0][0]}: no variant of whole blocks fits the budget")
    whole = others[0]
    ratio = statistics.median(a / b for a, b in zip(ours, whole, strict=True))
    print(f"{rows[0][0]}: {1e3 * statistics.median(ours):.2f} ms, {ratio:.3f} of {[*windows][-1]}", flush=True)


if __name__ == "__main__":
    main()
