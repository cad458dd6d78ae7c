"""The command line that the three loops share: `--plant NAME[,NAME] --steps N --device cpu|cuda`; `--help` has the rest."""

import argparse

import torch
from plants import MICRO_BATCHES, planted, start_other_process


def options() -> argparse.Namespace:
    """What was asked, with `plants` as a set, and `micro_batches`. One thread computes on a CPU, so that a core stays free."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", default="", help="slowdowns, separated by commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--accumulate", action="store_true", help="four micro-batches a step, of which the last sends")
    parser.add_argument("--compile", action="store_true", help="the model is compiled whole, as a careful author would")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="as an author writes who chooses nothing: torch's AdamW and DataLoader by their defaults, batches of tokens alone",
    )
    asked = parser.parse_args()
    asked.plants = planted(asked.plant.split(","))
    on_gpu = asked.device == "cuda" and not asked.plain
    asked.loader = {
        "pin_memory": on_gpu and "unpinned" not in asked.plants,
        "num_workers": 2 if on_gpu and "slow_loader" not in asked.plants else 0,
    }
    asked.micro_batches = MICRO_BATCHES if asked.accumulate or "accumulation_sync" in asked.plants else 1
    torch.manual_seed(0)
    if asked.device == "cpu":
        torch.set_num_threads(1)
    elif "fp32" not in asked.plants and not asked.plain:
        torch.set_float32_matmul_precision("high")
    if "second_process" in asked.plants:
        start_other_process(asked.device)
    return asked
