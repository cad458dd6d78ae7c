"""Compile the Hopper kernels without a GPU, with the tensors that a call would have, and inspect the machine code.

Run in a process of its own: `python hopper_compiler.py` reads a JSON list of requests on standard input (pass, case, schedule or
nothing) and prints one JSON object per line. The arguments for triton come from the launch code of a call.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hopper_hazards import hazards, opcodes
from kernel_compiler import answer_requests, assemble
from trainstep.ops.flash_attention.hopper import host as hopper
from trainstep.ops.flash_attention.hopper.schedules import BackwardSchedule, BoxedKernel, ForwardSchedule
from trainstep.ops.flash_attention.portable.tiles import Arithmetic
from trainstep.ops.flash_attention.problem import CallMeta, Problem

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


def bound_kernel(request: dict[str, Any]) -> tuple[BoxedKernel, list[Any]]:
    """The kernel of a call and its arguments."""
    dtype = getattr(torch, request["dtype"])
    heads, positions, head_dim = 2, 300 if request["ragged"] else 256, request["head_dim"]
    x = torch.empty(1, heads, positions, head_dim, dtype=dtype)
    problem = Problem(1.0, request["causal"], False, Arithmetic.HALF)
    fields = request.get("schedule")
    if request["pass"] == "forward":
        schedule = ForwardSchedule(**fields) if fields else None
        bound = hopper.bind_hopper_forward(CallMeta.forward(x, x, x), problem, schedule)
        return bound.attend, bound.attend.arguments(x, x, x, x, torch.empty(heads * positions), bound.order)
    backward_schedule = BackwardSchedule(**fields) if fields else None
    kernels = hopper.bind_hopper_backward(CallMeta.backward(*[x] * 5), problem, backward_schedule)
    lse, delta, dq_sum = hopper.backward_buffers(x, kernels.padded_queries)
    return kernels.gradients, kernels.gradients.arguments(x, x, x, x, lse, delta, x, x, dq_sum)


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """The resources of the compiled kernel, and the hazards in its machine code."""
    kernel, arguments = bound_kernel(request)
    names = kernel.kernel.arg_names
    parameters = dict(zip(names, kernel.kernel.params, strict=True))
    constants = {
        name: x for name, x in zip(names, arguments, strict=True) if parameters[name].is_constexpr or x is None
    }
    signature = {
        name: "constexpr" if name in constants else type_of(x) for name, x in zip(names, arguments, strict=True)
    }
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")}
    compiled = triton.compile(
        GluonASTSource(kernel.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=kernel.options,
    )
    folder = Path(triton.__file__).parent
    registers, spilled_bytes, warnings = assemble(compiled.asm["ptx"], folder)
    machine_code = disassemble(compiled.asm["cubin"], folder)
    return {
        "triton": triton.__version__,
        "shared_bytes": compiled.metadata.shared,
        "registers": registers,
        "spilled_bytes": spilled_bytes,
        "warnings": warnings,
        "setmaxnreg": compiled.asm["ptx"].count("setmaxnreg"),
        "hazards": hazards(machine_code),
        "spills_in_loops": opcodes(machine_code, inner_loops=True).keys() & {"LDL", "STL"} != set(),
        "opcodes": {
            name: n for name, n in opcodes(machine_code).items() if name in ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG")
        },
    }


def type_of(x: Any) -> str:
    """The name that triton's launch gives to the type of an argument."""
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{_NAMES[x.base.dtype]}{list(x.block_shape)},{x.layout!r}>"
    if isinstance(x, torch.Tensor):
        return f"*{_NAMES[x.dtype]}"
    return "fp32" if isinstance(x, float) else "i32"


def disassemble(cubin: bytes, triton_folder: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        tool = triton_folder / "backends" / "nvidia" / "bin" / "nvdisasm"
        return subprocess.run([str(tool), "-c", str(file)], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    answer_requests(compile_kernel)
