"""Times designs of RMSNorm's kernels beside the present ones and a copy of the same bytes, in turns in one process.

    python results/h200/rms_norm_variants.py runs/rms_norm_variants.csv           # one GPU; about a minute

Tensors of 67 MB in bf16, no residual: all designs for rows of 4,096, then the fastest few for other widths. A sample is
the time of a launch in a graph of 20, over four sets of tensors in turn, so that the L2 cache holds none of them.
`sums` is the kernel that adds the weight's gradients, alone; `copy` and `neg` are torch's, of as many bytes as the pass
reads and writes. Each design is first compared with fp64: y, dh and dweight may be off by twice the present kernel's
error, 1 / rms by 1e-6. One that fails is told in a line and left out. A variant's name says which fields of `Design`
are not as by default. The samples of 2026-11-28 have twelve slower designs more: rows read by TMA, sums of dweight whose
launch overlaps the kernel before (`end=overlapped`), and sums within it behind a barrier of all programs
(`end=barrier`, 87.7 % of a copy at most).
"""

import argparse
import csv
import dataclasses
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.kernels import rms_norm as present

ELEMENTS, SETS, LAUNCHES, EPS = 8_192 * 4_096, 4, 20, 1e-5
Key = tuple[str, str]
"""A pass and the name of a design."""


@dataclasses.dataclass(frozen=True)
class Design:
    tile: int = 4096  # elements of a tile of whole rows
    warps: int = 8  # more where a row is longer than the tile
    programs: float = 0  # a multiprocessor; 0: as many as tiles
    even: bool = False  # fewer programs, all with as many tiles
    ahead: bool = False  # the next tile is read into registers
    stages: int | None = None  # of Triton's pipelined loop
    contiguous: bool = False  # a program's rows follow each other
    early: bool = False  # a tile's rows are added to one sum, not each to its own
    whole: bool = False  # columns have no mask
    weight_first: bool = False
    exact: bool = True  # 1 / rms is rounded correctly
    load: str = ""  # evict_first
    store: str = ""
    sum_rows: int = 128
    sum_columns: int = 32
    sum_warps: int = 4

    def __str__(self) -> str:
        changed = [(f.name, value) for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default]
        return " ".join(name if value is True else f"{name}={value}" for name, value in changed) or "default"


D, HINTS = Design, {"load": "evict_first", "store": "evict_first"}
FORWARD = [
    D(), D(warps=4), D(warps=16), D(tile=8192), D(tile=8192, warps=16), D(load="evict_first"), D(store="evict_first"),
    D(**HINTS), D(weight_first=True), D(exact=False), D(whole=True), D(warps=4, weight_first=True, whole=True, **HINTS),
    D(programs=4, ahead=True), D(programs=4, ahead=True, even=True), D(programs=4, ahead=True, **HINTS),
    D(programs=2, ahead=True), D(programs=4, warps=4, ahead=True), D(programs=8, warps=4, ahead=True),
    D(tile=8192, programs=1, ahead=True), D(tile=8192, programs=2, ahead=True), D(programs=2, stages=2),
    D(programs=2, stages=3), D(programs=2, stages=4), D(programs=4, stages=3), D(tile=8192, programs=1, stages=4),
]  # fmt: skip
P = {"tile": 8192, "programs": 1, "ahead": True}  # what ran until 2026-11-28
W = {"tile": 16384, "programs": 1, "warps": 16, "early": True}
BACKWARD = [
    D(**P), D(**P, warps=4), D(**P, warps=16), D(programs=1, ahead=True), D(programs=2, ahead=True),
    D(programs=2, warps=4, ahead=True), D(programs=4, warps=4, ahead=True), D(**P | {"programs": 0.5}, warps=16),
    D(**W | {"early": False}, ahead=True), D(**W, ahead=True, even=True), D(**W, stages=2), D(programs=2, stages=3),
    D(tile=8192, programs=1, stages=2), D(tile=8192, programs=1, stages=3),
    D(tile=8192, programs=1, stages=4, even=True),
    D(**P, even=True), D(**P, contiguous=True), D(**P, load="evict_first"), D(**P, **HINTS), D(**P, early=True),
    D(**P, even=True, early=True, whole=True, **HINTS), D(**P, sum_rows=64),
]  # fmt: skip
SUMS = [
    D(), D(sum_rows=64), D(sum_rows=32, sum_columns=64), D(sum_columns=16), D(sum_columns=8), D(sum_warps=8),
    D(sum_rows=256, sum_columns=16, sum_warps=8), D(sum_rows=64, sum_columns=16, sum_warps=2),
]  # fmt: skip
DESIGNS: dict[str, list[Design]] = {"forward": FORWARD, "backward": BACKWARD, "sums": SUMS}


@triton.jit
def read(ptr, row, column, rows, width, WHOLE: tl.constexpr, LOAD: tl.constexpr):
    mask = (row < rows) & ((column < width) | WHOLE)
    return tl.load(ptr + row.to(tl.int64) * width + column, mask=mask, other=0.0, eviction_policy=LOAD)


@triton.jit
def write(ptr, row, column, rows, width, tile, WHOLE: tl.constexpr, STORE: tl.constexpr):
    mask, place = (row < rows) & ((column < width) | WHOLE), row.to(tl.int64) * width + column
    tl.store(ptr + place, tile.to(ptr.dtype.element_ty), mask=mask, eviction_policy=STORE)


@triton.jit
def forward(
    x_ptr, weight_ptr, y_ptr, inverse_rms_ptr, rows, width, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LOOP: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EXACT: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    begin = tl.program_id(0) * ROWS
    if LOOP:
        end, step = rows, tl.num_programs(0) * ROWS
    else:
        end, step = begin + 1, 1
    if LOOP or WEIGHT_FIRST:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    if AHEAD:
        next_h = read(x_ptr, begin + tl.arange(0, ROWS)[:, None], column, rows, width, WHOLE, LOAD)
    for first in tl.range(begin, end, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        if AHEAD:
            h = next_h.to(tl.float32)
            next_h = read(x_ptr, row + step, column, rows, width, WHOLE, LOAD)
        else:
            h = read(x_ptr, row, column, rows, width, WHOLE, LOAD).to(tl.float32)
        square = tl.sum(h * h, axis=1, keep_dims=True) / width + eps
        inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(square)) if EXACT else tl.rsqrt(square)
        tl.store(inverse_rms_ptr + row, inverse_rms, mask=row < rows)
        if not (LOOP or WEIGHT_FIRST):
            weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
        write(y_ptr, row, column, rows, width, h * inverse_rms * weight.to(tl.float32), WHOLE, STORE)


@triton.jit
def backward(
    dy_ptr, h_ptr, weight_ptr, inverse_rms_ptr, dh_ptr, table_ptr, rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, CONTIGUOUS: tl.constexpr,
    EARLY: tl.constexpr, WHOLE: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros([1 if EARLY else ROWS, WIDTH], tl.float32)
    if CONTIGUOUS:
        begin, end, step = rows * program // tl.num_programs(0), rows * (program + 1) // tl.num_programs(0), ROWS
    else:
        begin, end, step = program * ROWS, rows, tl.num_programs(0) * ROWS
    row = begin + tl.arange(0, ROWS)[:, None]
    next_inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < end, other=0.0)
    if AHEAD:
        next_h = read(h_ptr, row, column, end, width, WHOLE, LOAD)
        next_dy = read(dy_ptr, row, column, end, width, WHOLE, LOAD)
    for first in tl.range(begin, end, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        inverse_rms = next_inverse_rms
        next_inverse_rms = tl.load(inverse_rms_ptr + row + step, mask=row + step < end, other=0.0)
        if AHEAD:
            h, dy = next_h, next_dy.to(tl.float32)
            next_h = read(h_ptr, row + step, column, end, width, WHOLE, LOAD)
            next_dy = read(dy_ptr, row + step, column, end, width, WHOLE, LOAD)
        else:
            h = read(h_ptr, row, column, end, width, WHOLE, LOAD)
            dy = read(dy_ptr, row, column, end, width, WHOLE, LOAD).to(tl.float32)
        n = h.to(tl.float32) * inverse_rms
        dn = dy * weight
        dh = inverse_rms * (dn - n * (tl.sum(dn * n, axis=1, keep_dims=True) / width))
        write(dh_ptr, row, column, end, width, dh, WHOLE, STORE)
        dweight += tl.sum(dy * n, axis=0, keep_dims=True) if EARLY else dy * n
    sums = dweight if EARLY else tl.sum(dweight, axis=0, keep_dims=True)
    tl.store(table_ptr + program.to(tl.int64) * width + column, sums, mask=column < width)


class Launch:
    """A kernel with its arguments; of the constants, those that it has."""

    def __init__(self, kernel: Any, programs: int, warps: int, arguments: tuple[Any, ...], **constants: Any) -> None:
        self.kernel, self.grid, self.arguments = kernel, (programs,), arguments
        self.options = {name: value for name, value in constants.items() if name in kernel.arg_names}
        self.options["num_warps"] = warps

    def compile(self) -> None:
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)


class Operands:
    """Tensors of one width: sets to read and to write, and what the passes should write for set 0, in fp64."""

    def __init__(self, rows: int, width: int, processors: int, device: str) -> None:
        self.rows, self.width, self.processors = rows, width, processors
        size = rows * width
        read = torch.randn(SETS, 2, rows, width, device=device, dtype=torch.bfloat16)
        written = torch.empty(SETS, 3 * size // 2, device=device, dtype=torch.bfloat16)
        self.x, self.dy, self.out = read[:, 0], read[:, 1], written[:, :size].view(SETS, rows, width)
        self.copies = {  # forward reads one tensor and writes one, backward reads two and writes one
            "forward": list(zip(self.out, self.x, strict=True)),
            "backward": list(zip(written, read.view(SETS, -1)[:, : 3 * size // 2], strict=True)),
        }
        self.weight = (1 + 0.2 * torch.randn(width, device=device)).bfloat16()
        self.inverse_rms = (self.x.double().square().mean(-1) + EPS).rsqrt().float()
        self.new_inverse_rms, self.dweight = torch.empty_like(self.inverse_rms[0]), torch.empty_like(self.weight)
        self.table, self.sums = (torch.randn(n * processors, width, device=device) for n in (8, 1))
        x, dy, weight = self.x[0].double(), self.dy[0].double(), self.weight.double()
        inverse_rms = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        n, dn = x * inverse_rms, dy * weight
        dh = inverse_rms * (dn - n * (dn * n).mean(-1, keepdim=True))
        self.results: dict[str, list[tuple[Tensor, Tensor]]] = {
            "forward": [(self.out[0], n * weight), (self.new_inverse_rms, inverse_rms.view(-1))],
            "backward": [(self.out[0], dh), (self.dweight, (dy * n).sum(0))],
            "sums": [(self.dweight, self.sums.double().sum(0))],
        }

    def errors(self, part: str, launches: list[Launch]) -> list[float]:
        """The largest difference from fp64 over the largest value, of each output."""
        for output, _ in self.results[part]:
            output.fill_(float("nan"))
        for launch in launches:
            launch()
        return [float((out.double() - exact).abs().max() / exact.abs().max()) for out, exact in self.results[part]]

    def launches(self, part: str, design: Design | None, index: int) -> list[Launch]:
        """The kernels of a pass over one set; the present ones without a design."""
        if part == "sums":
            return [self.add_table(design, self.sums, self.processors)]
        return (self.forward if part == "forward" else self.backward)(design, index)

    def forward(self, design: Design | None, index: int) -> list[Launch]:
        x, y, rest = self.x[index], self.out[index], (self.new_inverse_rms, self.rows, self.width, EPS)
        if design is None:
            rows, width, warps = present._tile(self.width)
            arguments = (x, x, self.weight, x, y, *rest)
            programs = triton.cdiv(self.rows, rows)
            return [Launch(present.rms_norm_kernel, programs, warps, arguments, ADD=False, ROWS=rows, WIDTH=width)]
        programs, warps, constants = self.constants(design)
        return [Launch(forward, programs, warps, (x, self.weight, y, *rest), **constants)]

    def backward(self, design: Design | None, index: int) -> list[Launch]:
        dy, h, dh, inverse_rms = self.dy[index], self.x[index], self.out[index], self.inverse_rms[index]
        if design is None:
            tile = present.backward_tile(self.width, self.rows, dy.device, is_16_bit=True)
            arguments = (dy, dy, h, self.weight, inverse_rms, dh, self.table, self.rows, self.width)
            constants: dict[str, Any] = {"ADD": False, "STAGES": tile.stages, "ROWS": tile.rows, "WIDTH": tile.columns}
            first = Launch(present.rms_norm_backward_kernel, tile.programs, tile.warps, arguments, **constants)
            return [first, self.add_table(None, self.table, tile.programs)]
        programs, warps, constants = self.constants(design)
        arguments = (dy, h, self.weight, inverse_rms, dh, self.table, self.rows, self.width)
        first = Launch(backward, programs, warps, arguments, **constants)
        return [first, self.add_table(design, self.table, programs)]

    def add_table(self, design: Design | None, table: Tensor, rows: int) -> Launch:
        """The kernel that sums dweight, the present one with the design's tile."""
        tile_rows, columns, warps = present._SUMMED_ROWS, present._SUMMED_COLUMNS, 4
        if design is not None:
            tile_rows, columns, warps = design.sum_rows, design.sum_columns, design.sum_warps
        arguments = (table, self.dweight, rows, self.width)
        programs = triton.cdiv(self.width, columns)
        return Launch(present.rms_norm_weight_kernel, programs, warps, arguments, ROWS=tile_rows, COLUMNS=columns)

    def constants(self, design: Design) -> tuple[int, int, dict[str, Any]]:
        """Programs, warps, and the constants of a kernel."""
        rows = max(1, design.tile // self.width)
        warps = min(32, max(1, design.warps * rows * self.width // design.tile))
        tiles = triton.cdiv(self.rows, rows)
        programs = min(tiles, int(design.programs * self.processors) or tiles)
        if design.even:
            programs = triton.cdiv(tiles, triton.cdiv(tiles, programs))
        fields = {name.upper(): value for name, value in dataclasses.asdict(design).items()}
        return programs, warps, fields | {"ROWS": rows, "WIDTH": self.width, "LOOP": design.programs > 0}


def check(operands: Operands, sets: dict[Key, list[list[Launch]]]) -> None:
    """Compile all, and leave out of `sets` those that fail or are wrong."""
    with ThreadPoolExecutor(12) as pool:
        compiled = {key: [pool.submit(launch.compile) for launch in launches[0]] for key, launches in sets.items()}
    allowed: dict[str, list[float]] = {}
    for (part, name), launches in list(sets.items()):
        try:
            for future in compiled[part, name]:
                future.result()
            errors = operands.errors(part, launches[0])
            limits = allowed.setdefault(part, [2 * error for error in errors])  # the present one comes first
            if part == "forward":
                limits[1] = 1e-6
            if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
                raise ArithmeticError(f"errors {errors}, allowed {limits}")
        except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and the other designs go on
            print(f"left out: {part}, {name}: {type(error).__name__}: {str(error)[:150]!r}", flush=True)
            del sets[part, name]
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # nothing runs any more in this process
                sys.exit(subprocess.call([sys.executable, *sys.argv, "--without", f"{part}, {name}"]))


def graph_of(runs: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    runs[0]()  # so that its code is loaded before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES):
            runs[index % SETS]()
    return graph


def measure(width: int, designs: dict[str, list[Design]], rounds: int, without: list[str]) -> dict[Key, list[float]]:
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    operands = Operands(ELEMENTS // width, width, processors, "cuda")
    sets = {
        (part, str(design or "present")): [operands.launches(part, design, index) for index in range(SETS)]
        for part, some in designs.items()
        for design in [None, *some]
        if f"{part}, {design or 'present'}" not in without
    }
    check(operands, sets)
    graphs = {}
    for part, copies in operands.copies.items():
        graphs[part, "copy"] = graph_of([lambda to=to, source=source: to.copy_(source) for to, source in copies])
        graphs[part, "neg"] = graph_of(
            [lambda to=to, source=source: torch.neg(source, out=to) for to, source in copies]
        )
    for key, launches in sets.items():
        try:
            graphs[key] = graph_of([lambda some=some: [launch() for launch in some] for some in launches])
        except RuntimeError as error:
            print(f"left out: {', '.join(key)}: no graph, {str(error)[:150]!r}", flush=True)
    times: dict[Key, list[float]] = {key: [] for key in graphs}
    for number in range(rounds + 1):
        order = random.sample(list(graphs), len(graphs))
        events = {key: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for key in order}
        graphs["forward", "copy"].replay()  # the host is ahead of the GPU from the first on
        for key in order:
            events[key][0].record()
            graphs[key].replay()
            events[key][1].record()
        torch.cuda.synchronize()
        for key, (begin, end) in events.items():
            if number:  # the first one warms up
                times[key].append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the samples")
    parser.add_argument("--widths", default="4096,2048,8192", help="all designs run at the first")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--best", type=int, default=4, help="designs of each pass for the other widths")
    parser.add_argument("--without", action="append", default=[], help="a design to leave out: 'forward, warps=4'")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    random.seed(0)
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    designs = DESIGNS
    with open(asked.file, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("width", "pass", "variant", "round", "time_s"))
        for width in map(int, asked.widths.split(",")):
            times = measure(width, designs, asked.rounds, asked.without)
            for (part, name), samples in times.items():
                writer.writerows((width, part, name, index, sample) for index, sample in enumerate(samples))
            file.flush()
            fastest = sorted(times, key=lambda key: statistics.median(times[key]))
            for part in DESIGNS:
                print(f"\n{part}, {ELEMENTS // width} x {width}: median, fastest, slowest us; share of a copy's rate")
                for key in (key for key in fastest if key[0] == part):
                    us = [1e6 * function(times[key]) for function in (statistics.median, min, max)]
                    copy = statistics.median(times.get((part, "copy"), [0.0]))
                    share = f"{1e8 * copy / us[0]:6.1f} %" if copy else ""
                    print(*(f"{value:8.2f}" for value in us), share, "", key[1])
            if designs is DESIGNS:
                named = {(part, str(design)): design for part, some in DESIGNS.items() for design in some}
                best = [key for key in fastest if key in named]
                designs = {part: [named[key] for key in best if key[0] == part][: asked.best] for part in DESIGNS}


if __name__ == "__main__":
    main()
