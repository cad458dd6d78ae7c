"""Times designs of the cross-entropy kernel beside the present one and a copy of its bytes, in turns in one process.

    python results/h200/cross_entropy_variants.py runs/cross_entropy_variants.csv      # one GPU; about a minute

Logits in bf16 that their gradient replaces, as with gradients in forward. A sample is the time of a launch in a graph
over as many sets of logits as make 3.2 GB, at most 16, restored before it, of which the L2 cache holds little. `copy`
is torch's, of the bytes that must be read and written. Each design is first compared with fp64 on 64 rows: some are
ignored, one of those with logits that are not finite, some targets are out of range, and for the first size also with
smoothing and z_loss. Loss, lse (not of ignored rows, where no one reads it) and gradient may be off by twice the
present kernel's error and one ulp of the largest, the gradient beside targets in its norm by twice alone. A design
that fails is told in a line and left out. A variant's name says which fields of `Design` are not as by default.
"""

import argparse
import csv
import dataclasses
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import triton
import triton.language as tl

from trainstep.ops.kernels import cross_entropy as present

IGNORED, GROUP, CHECKED_ROWS, BYTES, PROCESSORS, ROUNDS = -100, 8, 64, 3.2e9, 132, 11
MOST_KEPT = 32_768  # logits of a row that the registers of one multiprocessor hold
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
ULPS = (2**-23, 2**-23, 2**-8, 0.0)
Settings = tuple[float, float]  # smoothing and z_loss
Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Design:
    block: int = 8192  # logits of a row that a program takes at once; all that there are with `keep`
    warps: int = 16
    state: str = "thread"  # what has a maximum and a sum: an "element" of a block, a "group" of 8, or a "thread"
    exponent: str = "folded"  # 2^(z log2(e) - peak), one fma; "exp2": 2^((z - peak) log2(e)); "exp": e^(z - peak)
    masked: bool = False  # all blocks, not only the last one where it is not whole
    select: bool = False  # the target's element is found among all; else it is written again behind a barrier
    multiply: bool = False  # ignored rows are computed and replaced by 0; else a branch writes zeros
    plain: bool = False  # what smoothing needs is always there
    backwards: bool = False  # the gradient is written from the row's end, which was read last
    keep: str = ""  # a row's "logits" in registers between both passes, or its "powers"
    peak_first: bool = False  # of the whole row, before any exponential
    programs: int = 0  # a multiprocessor, each with many rows; 0: one for each row
    ahead: bool = False  # the next row is read into registers; with `keep` and `programs`
    stages: int | None = None  # of Triton's pipelined loops
    first: str = ""  # eviction of the first read, the last one, and of what is written
    last: str = ""
    store: str = ""

    def __str__(self) -> str:
        changed = [(f.name, value) for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default]
        return " ".join(name if value is True else f"{name}={value}" for name, value in changed) or "default"


D, HINTS = Design, {"last": "evict_first", "store": "evict_first"}
ALL_HINTS = HINTS | {"first": "evict_last"}
SMALL = ALL_HINTS | {"warps": 8}
WIDE, LOGITS, POWERS = {"block": 16_384, "warps": 32}, {"keep": "logits"}, {"keep": "powers"}
DESIGNS = [
    D(), D(state="element"), D(state="group"), D(exponent="exp"), D(exponent="exp2"), D(masked=True), D(select=True),
    D(multiply=True), D(plain=True), D(block=2048, warps=4), D(block=4096, warps=8), D(warps=8), D(block=4096),
    D(block=16_384), D(**WIDE), D(warps=32), D(block=32_768, warps=32), D(**HINTS), D(**ALL_HINTS),
    D(backwards=True), D(**WIDE, backwards=True, **HINTS), D(**WIDE, backwards=True, **ALL_HINTS),
    D(**ALL_HINTS, backwards=True), D(block=4096, **SMALL), D(block=4096, **SMALL, backwards=True), D(**SMALL),
    D(**SMALL, backwards=True), D(**WIDE, **ALL_HINTS), D(**ALL_HINTS, block=32_768, warps=32, backwards=True),
    D(**ALL_HINTS, block=16_384, backwards=True),
    D(stages=2), D(stages=3), D(block=4096, warps=8, stages=3), D(**WIDE, programs=1, backwards=True, **HINTS),
    D(block=32_768, warps=32, programs=1, backwards=True, **HINTS), D(**LOGITS), D(**LOGITS, warps=8),
    D(**LOGITS, warps=32), D(**LOGITS, **HINTS), D(**LOGITS, store="evict_first"), D(**LOGITS, select=True),
    D(**LOGITS, peak_first=True), D(**LOGITS, peak_first=True, warps=32), D(**POWERS), D(**POWERS, warps=32),
    D(**POWERS, peak_first=True, warps=32), D(**LOGITS, warps=32, programs=1, ahead=True),
    D(**LOGITS, programs=1, ahead=True), D(**LOGITS, programs=2), D(**POWERS, warps=32, programs=1, ahead=True),
]  # fmt: skip


@triton.jit
def power(z, peak, EXPONENT: tl.constexpr):
    """e^(z - peak). A "folded" peak counts in powers of 2; its rounding is the same in the sum and in the gradient."""
    if EXPONENT == "folded":
        return tl.exp2(z * LOG2_E - peak)
    return tl.exp2((z - peak) * LOG2_E) if EXPONENT == "exp2" else tl.exp(z - peak)


@triton.jit
def ratio(peak, larger_peak, EXPONENT: tl.constexpr):
    return tl.exp2(peak - larger_peak) if EXPONENT == "folded" else power(peak, larger_peak, EXPONENT)


@triton.jit
def same(z, zero):
    """z, of which the compilers do not know that it is z: they keep nothing that they have computed of it."""
    return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r,r", [z, zero], dtype=z.dtype, is_pure=True, pack=2)


@triton.jit
def read(logits, place, vocabulary, MASKED: tl.constexpr, HINT: tl.constexpr):
    mask = (place < vocabulary) | (not MASKED)  # one that is always true is removed
    return tl.load(logits + place, mask=mask, other=float("-inf"), eviction_policy=HINT)


@triton.jit
def add_block(
    z, place, vocabulary, state, zero,
    MASKED: tl.constexpr, SMOOTHING: tl.constexpr, EXPONENT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A maximum, the sum of powers relative to it, and the plain sum, with a block added to them."""
    largest = tl.max(tl.max(z.to(tl.float32), axis=2), axis=1)
    larger = tl.maximum(state[0], largest * LOG2_E if EXPONENT == "folded" else largest)
    z = (same(z, zero) if KEEP == "logits" else z).to(tl.float32)
    powers = power(z, larger[:, None, None], EXPONENT)
    total = state[1] * ratio(state[0], larger, EXPONENT) + tl.sum(tl.sum(powers, axis=2), axis=1)
    plain_total = state[2]
    if SMOOTHING:
        plain_total += tl.sum(tl.sum(tl.where(place < vocabulary, z, 0.0) if MASKED else z, axis=2), axis=1)
    return larger, total, plain_total


@triton.jit
def write(
    logits, place, vocabulary, powers, slope, parts, MASKED: tl.constexpr, SMOOTHING: tl.constexpr,
    SELECT: tl.constexpr, MULTIPLY: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    even_part, target_part, target, is_used = parts
    dz = slope * powers - even_part if SMOOTHING else slope * powers
    if SELECT:
        dz -= tl.where(place == target, target_part, 0.0)
    if MULTIPLY:
        dz = tl.where(is_used, dz, 0.0)
    mask = (place < vocabulary) | (not MASKED)
    tl.store(logits + place, dz.to(logits.dtype.element_ty), mask=mask, eviction_policy=HINT)


@triton.jit
def kernel(  # noqa: C901
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, scale_ptr,
    rows, vocabulary, row_stride, ignore_index, smoothing, z_loss,
    R: tl.constexpr, T: tl.constexpr, G: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    SMOOTHING: tl.constexpr, EXPONENT: tl.constexpr, SELECT: tl.constexpr, MULTIPLY: tl.constexpr,
    BACKWARDS: tl.constexpr, KEEP: tl.constexpr, PEAK_FIRST: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, STORE: tl.constexpr, LOOP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A block is (T, R, G): T states, of each R times G logits that follow each other. TAIL: the last is not whole."""
    BLOCK: tl.constexpr = R * T * G
    place = (tl.arange(0, T)[:, None, None] + tl.arange(0, R)[None, :, None] * T) * G + tl.arange(0, G)[None, None, :]
    whole = vocabulary // BLOCK * BLOCK if TAIL else vocabulary
    stride, begin = row_stride.to(tl.int64), tl.program_id(0)
    zero, other_zero = rows >> 30, vocabulary >> 30
    end, step = (rows, tl.num_programs(0)) if LOOP else (begin + 1, 1)
    if AHEAD:
        next_kept = read(logits_ptr + begin * stride, place, vocabulary, MASKED, LAST)
    for row in tl.range(begin, end, step, num_stages=1):
        logits, target = logits_ptr + row * stride, tl.load(targets_ptr + row)
        if AHEAD:
            kept = next_kept
            next_row = tl.where(row + step < rows, row + step, row)  # behind the last one, any that is there
            next_kept = read(logits_ptr + next_row * stride, place, vocabulary, MASKED, LAST)
        elif KEEP != "":
            kept = read(logits, place, vocabulary, MASKED, LAST)
        is_used = target != ignore_index
        if is_used | MULTIPLY:
            is_valid = (target >= 0) & (target < vocabulary)
            target_place = tl.where(is_valid, target, 0)
            z_target = tl.load(logits + target_place).to(tl.float32)
            zeros = tl.zeros([T], tl.float32)
            state = zeros - 1e30, zeros, zeros
            if KEEP != "":
                state = add_block(kept, place, vocabulary, state, zero, MASKED, SMOOTHING, EXPONENT, KEEP)
            else:
                for first in tl.range(0, whole, BLOCK, num_stages=STAGES):
                    z = read(logits, first + place, vocabulary, MASKED, FIRST)
                    state = add_block(z, first + place, vocabulary, state, zero, MASKED, SMOOTHING, EXPONENT, KEEP)
                if TAIL:
                    z = read(logits, whole + place, vocabulary, True, FIRST)
                    state = add_block(z, whole + place, vocabulary, state, zero, True, SMOOTHING, EXPONENT, KEEP)
            maximum, total, plain_total = state
            peak = tl.max(maximum, axis=0)
            if PEAK_FIRST:
                again = same(kept, zero) if KEEP == "logits" else kept
                powers = power(again.to(tl.float32), peak, EXPONENT)
                sum_at_peak = tl.sum(tl.sum(tl.sum(powers, axis=2), axis=1), axis=0)
            else:
                sum_at_peak = tl.sum(total * ratio(maximum, peak, EXPONENT), axis=0)
            lse = (peak + tl.log2(sum_at_peak)) * LN_2 if EXPONENT == "folded" else peak + tl.log(sum_at_peak)
            loss = lse - (1 - smoothing) * z_target + z_loss * lse * lse
            if SMOOTHING:  # 0 times the mean is NaN where a logit is -inf
                loss -= tl.where(smoothing > 0, smoothing * (tl.sum(plain_total, axis=0) / vocabulary), 0.0)
            tl.store(loss_ptr + row, tl.where(is_used, tl.where(is_valid, loss, float("nan")), 0.0))
            tl.store(lse_ptr + row, lse)
            scale = tl.load(scale_ptr)
            slope = scale * (1 + 2 * z_loss * lse) / sum_at_peak
            even_part, target_part = scale * (smoothing / vocabulary), scale * (1 - smoothing)
            parts = even_part, target_part, tl.where(is_valid, target, -1).to(tl.int32), is_used
            if KEEP != "":
                own_slope = slope
                if KEEP == "logits":
                    powers = power(same(kept, other_zero).to(tl.float32), peak, EXPONENT)
                elif not PEAK_FIRST:
                    powers = power(kept.to(tl.float32), maximum[:, None, None], EXPONENT)
                    own_slope = (slope * ratio(maximum, peak, EXPONENT))[:, None, None]
                write(logits, place, vocabulary, powers, own_slope, parts, MASKED, SMOOTHING, SELECT, MULTIPLY, STORE)
            else:
                if TAIL:
                    here = whole + place
                    powers = power(read(logits, here, vocabulary, True, LAST).to(tl.float32), peak, EXPONENT)
                    write(logits, here, vocabulary, powers, slope, parts, True, SMOOTHING, SELECT, MULTIPLY, STORE)
                for first in tl.range(0, whole, BLOCK, num_stages=STAGES):
                    here = place + (tl.cdiv(whole, BLOCK) * BLOCK - BLOCK - first if BACKWARDS else first)
                    powers = power(read(logits, here, vocabulary, MASKED, LAST).to(tl.float32), peak, EXPONENT)
                    write(logits, here, vocabulary, powers, slope, parts, MASKED, SMOOTHING, SELECT, MULTIPLY, STORE)
            if not SELECT:
                tl.debug_barrier()  # what all threads have written comes before
                dz_target = slope * power(z_target, peak, EXPONENT) - even_part - target_part
                tl.store(logits + target_place, dz_target.to(logits_ptr.dtype.element_ty), mask=is_valid & is_used)
        else:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
            for first in range(0, vocabulary, BLOCK):
                dz = tl.zeros([T, R, G], logits_ptr.dtype.element_ty)
                tl.store(logits + first + place, dz, mask=first + place < vocabulary, eviction_policy=STORE)


class Operands:
    """Logits, targets and outputs of one size; some rows are ignored."""

    def __init__(self, rows: int, vocabulary: int, sets: int, device: str, ignored_every: int) -> None:
        self.source = (3 * torch.randn(rows, vocabulary, device=device)).bfloat16()
        self.sets = torch.empty(sets, rows, vocabulary, device=device, dtype=torch.bfloat16)
        self.targets = torch.randint(vocabulary, (rows,), device=device)
        self.targets[1::ignored_every] = IGNORED
        self.loss, self.lse = (torch.empty(rows, device=device) for _ in range(2))
        self.scale = (self.targets != IGNORED).sum().float().reciprocal()

    def restore(self) -> None:
        self.sets.copy_(self.source.expand_as(self.sets))
        self.loss.fill_(7.0), self.lse.fill_(7.0)


def launch(design: Design | None, operands: Operands, index: int, settings: Settings) -> tuple[Run, Run]:
    """What runs a design's kernel, the present one without, and what only compiles it."""
    logits, smoothing, z_loss = operands.sets[index], *settings
    tensors, (rows, vocabulary) = (logits, operands.targets, operands.loss, operands.lse, operands.scale), logits.shape
    if design is None:
        options = {"ignore_index": IGNORED, "smoothing": smoothing, "z_loss": z_loss}
        return partial(present.launch_cross_entropy, *tensors, **options, has_lse=False, gradient=True), partial(int)
    block = triton.next_power_of_2(vocabulary) if design.keep else design.block
    group, is_ragged = 1 if design.state == "element" else GROUP, vocabulary % block != 0
    repeats = max(1, block // (GROUP * 32 * design.warps)) if design.state == "thread" else 1
    constants = {name.upper(): value for name, value in dataclasses.asdict(design).items()} | {
        "R": repeats, "T": block // repeats // group, "G": group, "SMOOTHING": smoothing > 0 or design.plain,
        "TAIL": is_ragged and not design.masked and not design.keep, "LOOP": design.programs > 0,
        "MASKED": is_ragged if design.keep else design.masked,
    }  # fmt: skip
    options = {name: value for name, value in constants.items() if name in kernel.arg_names}
    options["num_warps"] = design.warps
    arguments = (*tensors, rows, vocabulary, logits.stride(0), IGNORED, smoothing, z_loss)
    grid = (min(rows, design.programs * PROCESSORS or rows),)
    return partial(kernel[grid], *arguments, **options), partial(kernel.warmup, *arguments, grid=grid, **options)


class Check:
    """A few rows, with what the kernel should write for them in fp64."""

    def __init__(self, rows: int, vocabulary: int, settings: Settings, device: str) -> None:
        self.settings, self.operands = settings, Operands(rows, vocabulary, 1, device, ignored_every=8)
        source, targets = self.operands.source, self.operands.targets
        source[1, ::3], source[1, 1::3] = float("inf"), float("nan")  # an ignored row
        source[2, 5:99] = -20.0 if settings[0] else float("-inf")  # with smoothing the mean would not be finite
        targets[2:7] = torch.tensor([0, vocabulary - 1, -1, vocabulary, 2**40 + 5], device=device)
        smoothing, z_loss = settings
        z, scale = source.double(), float(self.operands.scale)
        is_valid, self.is_used = (targets >= 0) & (targets < vocabulary), targets != IGNORED
        place = torch.where(is_valid, targets, 0)[:, None]
        self.is_target = torch.zeros_like(z, dtype=torch.bool).scatter_(1, place, is_valid[:, None])
        lse = z.logsumexp(-1)
        loss = lse - (1 - smoothing) * z.gather(1, place).view(-1) + z_loss * lse.square()
        loss -= smoothing * z.mean(-1) if smoothing else 0.0
        self.loss = torch.where(self.is_used, torch.where(is_valid, loss, float("nan")), 0.0)
        dz = (1 + 2 * z_loss * lse)[:, None] * z.softmax(-1) - smoothing / vocabulary - (1 - smoothing) * self.is_target
        self.dz = torch.where(self.is_used[:, None], scale * dz, 0.0)
        self.exact = self.loss.nan_to_num(), lse[self.is_used], self.dz

    def errors(self, run: Run) -> list[float]:
        """The largest error of loss, lse and gradient over the largest value; beside targets the norm of the gradient's."""
        work, is_used, is_beside = self.operands, self.is_used, ~self.is_target
        work.restore()
        run()
        dz = work.sets[0].double()
        if not torch.equal(work.loss.isnan(), self.loss.isnan()) or dz[~is_used].count_nonzero():
            raise ArithmeticError("a loss is NaN that should not be or the reverse, or an ignored row has a gradient")
        results = zip((work.loss.nan_to_num(), work.lse[is_used], dz), self.exact, strict=True)
        errors = [float((one - exact).abs().max() / exact.abs().max()) for one, exact in results]
        return [*errors, float((dz - self.dz)[is_beside].norm() / self.dz[is_beside].norm())]


def check(checks: list[Check], designs: list[Design]) -> list[Design]:
    """The designs without those that fail or are wrong."""
    right, allowed = [], []
    for one in checks:
        errors = one.errors(launch(None, one.operands, 0, one.settings)[0])
        allowed.append([2 * error + ulp for error, ulp in zip(errors, ULPS, strict=True)])
    runs = {design: [launch(design, one.operands, 0, one.settings) for one in checks] for design in designs}
    with ThreadPoolExecutor(12) as pool:
        compiled = {design: [pool.submit(compile_it) for _, compile_it in some] for design, some in runs.items()}
    for design, some in runs.items():
        try:
            for future, one, (run, _), limits in zip(compiled[design], checks, some, allowed, strict=True):
                future.result()
                errors = one.errors(run)
                if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
                    raise ArithmeticError(f"errors {errors}, allowed {limits}")
            right.append(design)
        except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and the other designs go on
            print(f"left out: {design}: {type(error).__name__}: {str(error)[:150]!r}", flush=True)
    return right


def measure(rows: int, vocabulary: int, designs: list[Design]) -> dict[str, list[float]]:
    """Seconds of each launch, by the name of the design."""
    sets = min(16, max(2, round(BYTES / (2 * rows * vocabulary))))
    operands = Operands(rows, vocabulary, sets, "cuda", ignored_every=1024)
    pairs = [(operands.sets[index], operands.sets[index - sets // 2]) for index in range(sets)]
    all_runs: dict[str, list[Run]] = {"copy": [partial(to.copy_, source) for to, source in pairs]}
    for design in [None, *designs]:
        name = str(design or "present")
        all_runs[name] = [launch(design, operands, index, (0.0, 0.0))[0] for index in range(sets)]
    graphs, times = {name: torch.cuda.CUDAGraph() for name in all_runs}, {name: [] for name in all_runs}
    for name, runs in all_runs.items():
        runs[0]()  # so that its code is loaded before
        with torch.cuda.graph(graphs[name]):
            for run in runs:
                run()
    for number in range(ROUNDS + 1):
        order = random.sample(list(graphs), len(graphs))
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in order}
        for name in order:
            operands.restore()  # the host is ahead of the GPU behind it
            events[name][0].record()
            graphs[name].replay()
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            if number:  # the first one warms up
                times[name].append(begin.elapsed_time(end) / 1e3 / sets)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="CSV file for the samples")
    parser.add_argument(
        "--sizes", default="4096x10000,16368x32768,8192x50304,4096x128256,2048x151936", help="rows x vocabulary"
    )
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    random.seed(0)
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    designs, all_settings = DESIGNS, [(0.0, 0.0), (0.1, 1e-3)]
    with open(asked.file, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("rows", "vocabulary", "variant", "round", "time_s"))
        for size in asked.sizes.split(","):
            rows, vocabulary = map(int, size.split("x"))
            some = [design for design in designs if vocabulary <= MOST_KEPT or not design.keep]
            right = check([Check(CHECKED_ROWS, vocabulary, settings, "cuda") for settings in all_settings], some)
            designs = [design for design in designs if design in right or design not in some]
            times = measure(rows, vocabulary, right)
            for name, samples in times.items():
                writer.writerows((rows, vocabulary, name, index, sample) for index, sample in enumerate(samples))
            file.flush()
            print(f"\n{rows} x {vocabulary}: median, fastest, slowest us; share of a copy's rate")
            copy = statistics.median(times["copy"])
            for name in sorted(times, key=lambda name: statistics.median(times[name])):
                us = [1e6 * function(times[name]) for function in (statistics.median, min, max)]
                print(*(f"{value:8.2f}" for value in us), f"{1e8 * copy / us[0]:6.1f} %", "", name)
            all_settings = all_settings[:1]  # the others need kernels of their own


if __name__ == "__main__":
    main()
