"""Times captured steps beside what torch.compile offers: its default mode and reduce-overhead, with torch's attention and AdamW.

    python results/h200/captured_peers.py runs/captured_peers.csv small medium      # one GPU; a minute or two a size

All variants of a size live in one process and take turns in rounds. Raw samples go to the file: the unit `step` is one step
between two synchronisations, `window` is a tenth of ten steps between two, `host` is the host's part of a step, `replay` of that
the call that launches the graph, all in seconds; `clock` is the clock of the SMs in Hz and `power` the board's in W (the mean of
the last second, in which several variants may have run), read behind each window while further steps run. Short attention is
captured, too: forward and backward as one graph of ours and of each of SDPA's backends.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainstep import flash_attention
from trainstep.config.parsing import build_run
from trainstep.measure.machine.nvml import GpuState
from trainstep.training.build import build_step

OURS = {"adamw": "trainstep", "attention": "trainstep", "capture": "step"}
TORCH = {"adamw": "fused", "attention": "sdpa", "capture": "none", "compile": "model"}
VARIANTS = {
    "captured, compile block": OURS | {"compile": "block"},
    "captured, compile model": OURS | {"compile": "model"},
    "torch.compile": TORCH,
    "torch.compile reduce-overhead": TORCH | {"compile": "none"},  # `steps_of` compiles it
}
ROUNDS, WINDOW, WARMUPS = 5, 10, 8
SHOWN = {"peak": (2**-30, "GiB"), "clock": (1e-6, "MHz"), "power": (1.0, "W")}
"""Unit -> factor and what is printed; the others are seconds."""
Take = Callable[[int], Tensor]
Rows = list[tuple[str, str, str, float]]
"""(what is timed, variant, unit, value)"""


class Replays:
    """Sums up the host's seconds in torch.cuda.CUDAGraph.replay."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._replay = torch.cuda.CUDAGraph.replay
        torch.cuda.CUDAGraph.replay = lambda graph: self._timed(graph)

    def _timed(self, graph: torch.cuda.CUDAGraph) -> None:
        began = time.perf_counter()
        self._replay(graph)
        self.seconds += time.perf_counter() - began


def steps_of(size: str, replays: Replays, rows: Rows) -> None:
    """Time every variant of a size."""
    variants: dict[str, Take] = {}
    for name, values in VARIANTS.items():
        reduced = name.endswith("reduce-overhead")
        run = build_run({"model": size, "context": 256, "device": "cuda", "precision": "bf16_autocast", **values})
        assembly = build_step(run)
        if reduced:
            assembly.module.compile(mode="reduce-overhead", fullgraph=True)

        def take(index: int, assembly=assembly, reduced=reduced) -> Tensor:
            if reduced:
                torch.compiler.cudagraph_mark_step_begin()
            loss: Tensor = assembly.take(assembly.micro_batches(index))
            return loss

        for index in range(WARMUPS):
            take(index)
        torch.cuda.synchronize()
        variants[name] = take
    in_rounds(size, variants, rows, rounds=range(ROUNDS), replays=replays)
    variants.clear()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def in_rounds(
    what: str, variants: Mapping[str, Take], rows: Rows, *, rounds: Iterable[int], replays: Replays | None = None
) -> None:
    """Time single steps and windows of steps of all variants in turns, and read the GPU's state. Odd rounds go backwards."""
    gpu = GpuState(str(torch.cuda.get_device_properties(0).uuid))
    for index in rounds:
        for name in list(variants)[:: 1 if index % 2 else -1]:
            take = variants[name]
            for step in range(WINDOW):
                if replays is not None:
                    replays.seconds = 0.0
                torch.cuda.synchronize()
                began = time.perf_counter()
                take(step)
                host = time.perf_counter() - began
                torch.cuda.synchronize()
                rows.append((what, name, "step", time.perf_counter() - began))
                rows.append((what, name, "host", host))
                if replays is not None:
                    rows.append((what, name, "replay", replays.seconds))
            began = time.perf_counter()
            for step in range(WINDOW):
                take(step)
            torch.cuda.synchronize()
            rows.append((what, name, "window", (time.perf_counter() - began) / WINDOW))
            for step in range(WINDOW):
                take(step)
            for unit, value in (("clock", gpu.sm_clock_hz()), ("power", gpu.power_w())):
                if value is not None:
                    rows.append((what, name, unit, value))


def short_attention(rows: Rows, shape: tuple[int, ...] = (4, 16, 256, 64)) -> None:
    """Time forward and backward of causal attention in bf16 as one graph, 50 launches between two synchronisations."""
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    variants = {"trainstep": lambda: flash_attention(*inputs, is_causal=True)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def attend(backend=backend) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(*inputs, is_causal=True)

        variants[f"SDPA {backend.name.lower()}"] = attend
    graphs = {}
    for name, attend in variants.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.autograd.grad(attend(), inputs, do)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            torch.autograd.grad(attend(), inputs, do)
    for index in range(12):
        for name in list(graphs)[:: 1 if index % 2 else -1]:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(50):
                graphs[name].replay()
            torch.cuda.synchronize()
            rows.append(("attention 4,16,256,64", name, "window", (time.perf_counter() - began) / 50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the raw samples")
    parser.add_argument("sizes", nargs="+", choices=("small", "medium", "large"), help="the models")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    with open(asked.file, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "variant", "unit", "value"))
        rows: Rows = []
        short_attention(rows)
        tell(writer, rows)
        replays = Replays()
        for size in asked.sizes:
            rows = []
            steps_of(size, replays, rows)
            tell(writer, rows)
            file.flush()


def tell(writer: Any, rows: Rows) -> None:
    """Write the raw samples to the file, and print medians."""
    writer.writerows((*row[:3], f"{row[3]:.9f}") for row in rows)
    for what, variant, unit in dict.fromkeys(row[:3] for row in rows):
        samples = sorted(row[3] for row in rows if row[:3] == (what, variant, unit))
        low, _, high = statistics.quantiles(samples, n=4)
        factor, shown = SHOWN.get(unit, (1e3, "ms"))
        print(f"{what:24s} {variant:32s} {unit:8s} {factor * statistics.median(samples):9.4f} {shown}"
              f" ± {factor / 2 * (high - low):.4f}, n = {len(samples)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
