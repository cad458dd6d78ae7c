"""What the host pays for both passes of a fused op, launches included, with a driver that does nothing.

    python results/cpu/launch_cost.py 3 src OTHER_CHECKOUT/src > results/cpu/launch_cost.csv

Triton compiles for sm_90 and binds and launches as ever; only the C function that would call the driver does nothing. Tensors lie
on the CPU, so the CPU's allocator replaces CUDA's, and the hop to autograd's thread is missing. A line: commit, op, launches,
microseconds of a call in each of 15 turns of 200 calls. Checkouts take turns, each in a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

TURNS, CALLS = 15, 200


def pretend() -> list[int]:
    """A driver for an H100 that runs nothing; the list counts launches."""
    import torch
    import triton.backends.nvidia.driver as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launched = [0]

    def launch(*_: Any) -> None:
        launched[0] += 1

    class Launcher(nvidia.CudaLauncher):
        def __init__(self, _source: Any, _metadata: Any) -> None:
            vars(self).update(
                launch=launch, num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0,
                global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, arg_annotations=None,
                kernel_signature=b"", gsan_enabled=False,
            )  # fmt: skip

    sizes = {"max_shared_mem": 232_448, "max_num_regs": 65_536, "multiprocessor_count": 132, "warpSize": 32}
    utilities = SimpleNamespace(load_binary=lambda *_: (1, 2, 64, 0, 1024), get_device_properties=lambda _device: sizes)
    driver._active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 77,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=Launcher,
        utils=utilities,
    )
    torch._C._cuda_getCurrentRawStream = lambda _device: 77
    return launched


def calls() -> dict[str, Callable[[], object]]:
    """Both passes of each op, on small tensors, in bf16."""
    import torch
    from torch import Tensor
    from torch.autograd import grad

    from trainstep.ops import rms_norm, rotary, swiglu

    for module in (rms_norm, rotary, swiglu):
        module.has_kernel = lambda *_: True

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    x, residual, weight, q = normal(64, 4096), normal(64, 4096), normal(4096), normal(1, 8, 64, 64)
    dy, dq, half, table = (normal(*shape).detach() for shape in (x.shape, q.shape, (64, 2048), (64, 32)))
    return {
        "rms_norm": lambda: grad(rms_norm.rms_norm(x, weight), (x, weight), dy),
        "rms_norm with a residual": lambda: grad(
            rms_norm.rms_norm(x, weight, residual=residual), (x, residual, weight), (dy, dy)
        ),
        "swiglu": lambda: grad(swiglu.swiglu(x), (x,), half),
        "rotary": lambda: grad(rotary.rotary(q, q, table, table), (q,), (dq, dq)),
    }


def measure(name: str) -> None:
    launched = pretend()
    for op, call in calls().items():
        call()
        before = launched[0]
        call()
        launches, samples = launched[0] - before, []
        for _ in range(TURNS):
            started_s = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples.append((time.perf_counter() - started_s) / CALLS * 1e6)
        print(name, op, launches, *(f"{sample:.1f}" for sample in samples), sep=",", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int)
    parser.add_argument("sources", nargs="+", help="the folder src of each checkout")
    parser.add_argument("--as", dest="commit", help="measure the trainstep that this process imports, as this commit")
    arguments = parser.parse_args()
    if arguments.commit:
        measure(arguments.commit)
        return
    for source in arguments.rounds * arguments.sources:
        git = ["git", "-C", source, "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        environ = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, __file__, "1", source, "--as", commit], env=environ, check=True)


if __name__ == "__main__":
    main()
