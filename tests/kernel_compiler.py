"""Compile Triton kernels without a GPU, and report their resources: shared memory, registers, spills.

Run in a process of its own, without the interpreter: `python kernel_compiler.py` reads a JSON list of requests on standard input
and prints one JSON object per line.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VECTOR_ACCESS = r"\b(?:ld|st)\.global\S*\.v[24]|\bcp\.async\.c[ag]\.shared\S*[^;]*?, (?:0x10|16)\b"
"""An access of up to 16 bytes by a thread, through registers or from global to shared memory."""
SHARED_MEMORY_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""The most shared memory of a block, by compute capability (CUDA C++ Programming Guide, technical specifications)."""


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel. The request has module, kernel, constants, element (bf16...), architecture (90...), num_warps,
    num_stages, the `types` of arguments that their names do not determine, and `aligned`: integers that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
    constants, types = request["constants"], request.get("types", {})
    signature = {
        name: "constexpr" if name in constants else types.get(name) or argument_type(name, request["element"])
        for name in kernel.arg_names
    }
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr")
        or name.startswith("stride")
        or name in ("queries", "keys", *request.get("aligned", ()))
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", request["architecture"], 32),
        options={"num_warps": request["num_warps"], "num_stages": request["num_stages"]},
    )
    registers, spilled_bytes, warnings = assemble(compiled.asm["ptx"], Path(triton.__file__).parent)
    return {
        "triton": triton.__version__,
        "shared_bytes": compiled.metadata.shared,
        "registers": registers,
        "spilled_bytes": spilled_bytes,
        "warnings": warnings,
        "conversions": compiled.asm["ttgir"].count("ttg.convert_layout"),
        "vector_accesses": len(re.findall(_VECTOR_ACCESS, compiled.asm["ptx"])),
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync|tcgen05\.mma", compiled.asm["ptx"])),
        "running_sums": max(running_sums(compiled.asm[stage]) for stage in ("ttir", "ttgir")),
    }


def argument_type(name: str, element: str) -> str:
    if name in ("lse_ptr", "delta_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{element}"
    return "fp32" if name.startswith("scale") else "i32"


def running_sums(mlir: str) -> int:
    """Matrix products whose accumulator does not start from zero in the same tile: it is carried from tile to tile.

    An accumulator may be a product itself, waited for or not, or zero. Blackwell's own products (tc_gen5_mma) are not
    inspected: they are plain `tt.dot` in the stage before.
    """
    defined = {name: (operation, operands) for name, operation, operands in _DEFINITION.findall(mlir)}

    def runs_on(name: str) -> bool:
        name, _, result = name.partition("#")
        operation, operands = defined.get(name, ("", ""))
        names = re.findall(r"%[\w#-]+", operands)
        if operation in _PRODUCTS:
            return runs_on(names[2])
        if operation in ("ttng.warp_group_dot_wait", "ttg.convert_layout"):
            return runs_on(names[int(result or 0)])
        return not (operation == "arith.constant" and operands.startswith("dense<0.0"))

    return sum(runs_on(name) for name, (operation, _) in defined.items() if operation in _PRODUCTS)


_PRODUCTS = ("tt.dot", "ttng.warp_group_dot")
_DEFINITION = re.compile(r"^\s*(%[\w-]+)(?::\d+)? = ([\w.]+) (.*?)(?: : |$)", re.MULTILINE)


def assemble(ptx: str, triton_folder: Path) -> tuple[int, int, list[str]]:
    """Registers, spilled bytes and warnings that ptxas reports."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target
    tools = triton_folder / "backends" / "nvidia" / "bin"
    newer = re.search(r"^\.version 9|\.target sm_1", ptx, re.MULTILINE) is not None  # the older assembler refuses these
    tool = tools / ("ptxas-blackwell" if newer and (tools / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(Path(folder) / "kernel.o")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    assert registers
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return int(registers[1]), spilled, [line for line in log.splitlines() if re.search(r"C75\d\d|warning", line)]


def answer_requests(compile_one: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Print a line of JSON for each request on standard input, with its result or error."""
    for request in json.load(sys.stdin):
        try:
            result = compile_one(request)
        except Exception as error:  # noqa: BLE001 - a compiler fails in many ways; the next request goes on
            result = {"error": f"{type(error).__name__}: {str(error)[-600:]}"}
        print(json.dumps({**request, **result}), flush=True)


if __name__ == "__main__":
    answer_requests(compile_kernel)
