"""Times SwiGLU's forward kernel in variants of grid, block and warps, beside torch.compile and a copy of the same bytes.

    python results/h200/swiglu_variants.py runs/swiglu_variants.ndjson            # one GPU; twenty seconds

8,192 tokens, 11,008 wide, bf16, gate and up in one tensor. A line of the file is a variant: the median time of a launch, by graphs
of 20 launches in 12 turns, and the samples (ms). `rows first`: programs that follow each other take a block of each row in turn.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

TOKENS, WIDTH, LAUNCHES, TURNS = 8_192, 11_008, 20, 12


@triton.jit
def kernel(gate, up, y, width, stride, blocks, BLOCK: tl.constexpr, ROWS_FIRST: tl.constexpr, STREAM: tl.constexpr):
    if ROWS_FIRST:
        row = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
    else:
        row = (tl.program_id(0) // blocks).to(tl.int64)
        block = tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    policy: tl.constexpr = "evict_first" if STREAM else ""
    a = tl.load(gate + row * stride + column, mask=mask, other=0.0, eviction_policy=policy).to(tl.float32)
    b = tl.load(up + row * stride + column, mask=mask, other=0.0, eviction_policy=policy).to(tl.float32)
    tl.store(y + row * width + column, (a * tl.sigmoid(a) * b).to(y.dtype.element_ty), mask=mask)


def variants() -> dict[str, Callable[[], object]]:
    joint = torch.randn(TOKENS, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
    gate, up = joint.chunk(2, -1)
    pair = gate.contiguous(), up.contiguous()
    y = torch.empty(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    exact = silu(gate.float()) * up.float()
    of_joint = torch.compile(lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    of_pair = torch.compile(lambda gate, up: silu(gate) * up)
    source = torch.empty(3 * TOKENS * WIDTH // 2, device="cuda", dtype=torch.bfloat16)
    copy = torch.empty_like(source)
    found: dict[str, Callable[[], object]] = {
        "copy of the same bytes": lambda: copy.copy_(source),
        "compile, joint": lambda: of_joint(joint),
        "compile, pair": lambda: of_pair(*pair),
    }
    sizes = [(2048, 4), (1024, 4), (1024, 2), (512, 2), (512, 4), (2048, 8), (4096, 8), (256, 1)]
    plain = [(block, warps, rows_first, False) for block, warps in sizes for rows_first in (True, False)]
    for block, warps, rows_first, stream in [*plain, (1024, 4, False, True), (512, 2, False, True)]:
        blocks = triton.cdiv(WIDTH, block)

        def run(block=block, warps=warps, rows_first=rows_first, stream=stream, blocks=blocks) -> None:
            grid = (TOKENS, blocks) if rows_first else (TOKENS * blocks,)
            kernel[grid](
                gate, up, y, WIDTH, 2 * WIDTH, blocks,
                BLOCK=block, ROWS_FIRST=rows_first, STREAM=stream, num_warps=warps,
            )  # fmt: skip

        run()
        assert (y.float() - exact).abs().max() <= 2**-7 * exact.abs().max()
        order = "rows first" if rows_first else "blocks first"
        found[f"block {block}, warps {warps}, {order}{', evict first' if stream else ''}"] = run
    return found


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="file for a line of each variant; they are added to it")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    graphs = {name: graph_of(run) for name, run in variants().items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(TURNS):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[name].replay()
            begin.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / LAUNCHES)
    copy_ms = statistics.median(times["copy of the same bytes"])
    with open(asked.file, "a") as file:
        for name, samples in times.items():
            ms = statistics.median(samples)
            file.write(json.dumps({"variant": name, "ms": ms, "samples": samples}) + "\n")
            print(f"{name:55s} {ms:.5f} ms {100 * copy_ms / ms:.1f} % of a copy", flush=True)


if __name__ == "__main__":
    main()
