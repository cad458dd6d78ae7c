"""What a GPU's power limit does to one kernel that runs for 2.5 seconds: `python results/h200/power_limit.py`.

A line a kernel: its time and the clock in the first 0.1 s, then medians of the last five tenths of a second: time, clock, power,
rate; and the last time over the first. `mix` is matmuls of 4,096 for that share of ten turns (20 in a turn), and copies of 1 GiB in
the others. Needs pynvml (`pip install nvidia-ml-py`).
"""

import time
from collections.abc import Callable
from statistics import median

import pynvml
import torch

from trainstep.ops import flash_attention

_SECONDS = 2.5
_WINDOW_S = 0.1
Work = tuple[Callable[[], object], float, float]
"""A call, its FLOPs and its bytes."""


def matmul(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    """A product of random matrices."""
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    return lambda: a @ b, 2.0 * m * n * k, 0.0


def copy() -> Work:
    """A copy of 1 GiB, read and written."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 0.0, 2.0 * source.nbytes


def mix(share: float) -> Work:
    """Turns of matmuls and of copies."""
    (product, flops, _), (copies, _, nbytes) = matmul(4096, 4096, 4096), copy()
    turns = round(10 * share)

    def run() -> None:
        for _ in range(20 * turns):
            product()
        for _ in range(10 - turns):
            copies()

    return run, 20 * turns * flops, (10 - turns) * nbytes


def attention(batch: int, context: int) -> Work:
    """Causal attention, forward, of 16 heads of 128."""
    q, k, v = (torch.randn(batch, 16, context, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return lambda: flash_attention(q, k, v, is_causal=True), 2.0 * batch * 16 * context**2 * 128, 0.0


def measure(name: str, work: Work) -> None:
    """Print the line of a kernel."""
    call, flops, nbytes = work
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    time.sleep(0.6)
    windows = []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < _SECONDS:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        window_s, calls = time.perf_counter(), 0
        first.record()
        while time.perf_counter() - window_s < _WINDOW_S:
            call()
            calls += 1
            if calls % 64 == 0 or flops > 1e12:  # the host must not run seconds ahead
                torch.cuda.synchronize()
        last.record()
        last.synchronize()
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        windows.append((first.elapsed_time(last) / calls, clock, pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3))
    ms, clock, watts = (median(column) for column in zip(*windows[-5:], strict=True))
    print(
        f"{name:22s} first {windows[0][0]:8.3f} ms {windows[0][1]} MHz; last {ms:8.3f} ms {clock} MHz {watts:.0f} W; "
        f"{flops / ms / 1e9:7.1f} TFLOP/s {nbytes / ms / 1e9:6.3f} TB/s ratio {ms / windows[0][0]:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    pynvml.nvmlInit()
    torch.manual_seed(0)
    measure("bf16 4096", matmul(4096, 4096, 4096))
    measure("bf16 8192", matmul(8192, 8192, 8192))
    measure("bf16 2048x4096x1024", matmul(2048, 4096, 1024))
    measure("bf16 16384x4096x4096", matmul(16384, 4096, 4096))
    measure("fp32 4096", matmul(4096, 4096, 4096, torch.float32))
    measure("copy", copy())
    for share in (0.3, 0.6, 0.8):
        measure(f"mix {share:g}", mix(share))
    measure("att 8192", attention(2, 8192))
    measure("att 2048", attention(8, 2048))
    torch.backends.cuda.matmul.allow_tf32 = True
    measure("tf32 4096", matmul(4096, 4096, 4096, torch.float32))
