"""Kernels compile for GPUs that are not here, and fit them: within each one's shared memory, and with few spilled registers.

A covering set of what the table offers, each value at least once an architecture; compiled in processes of their own, without
the interpreter, by the installed triton and by the oldest that pyproject.toml allows, which `make oldest-triton` puts into a folder
of its own: TRAINSTEP_OLDEST_TRITON names it. Each compiles half of the set, with every pair of architecture, pass and variant.
`make compile-all` runs this file: every variant, one line each.
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kernel_checks import check_compiled, compile_all, complaints_about, name_of, oldest_triton
from kernel_compiler import SHARED_MEMORY_BYTES
from trainstep.ops.flash_attention.portable.tiles import (
    UNTUNED,
    Arithmetic,
    KernelPass,
    TileConfig,
    TileProblem,
    choose_row,
    padded,
)

HALF, IEEE, TF32, TF32X3, FP16X3 = list(Arithmetic)
ALTERNATED = ("fp32", (TF32X3, IEEE), 32, True, True)  # one or the other
VARIANTS = [  # element, arithmetic, head width, causal, ragged
    ("bf16", HALF, 64, True, False),
    ("bf16", HALF, 128, True, False),
    ("fp16", HALF, 256, False, True),
    ("bf16", HALF, 80, True, True),
    ("fp32", TF32, 128, False, False),
    ALTERNATED,
]
PARTS_VARIANTS = {
    80: {KernelPass.FORWARD: [(64, True, False)]},
    89: {KernelPass.KEY_GRADIENTS: [(80, False, True)]},
    100: {KernelPass.QUERY_GRADIENTS: [(128, True, True)]},
    90: {
        KernelPass.FORWARD: [(64, False, True), (128, True, False), (256, True, True)],
        KernelPass.KEY_GRADIENTS: [(64, True, False), (128, True, True)],
        KernelPass.QUERY_GRADIENTS: [(64, False, True), (128, True, False), (256, False, False)],
    },
}
"""Shapes (head width, causal, ragged) for kernels that take parts split beforehand: all on Hopper, elsewhere one."""
PROLOGUE = {80: "split_peaks_kernel", 89: "split_parts_kernel", 90: "split_parts_kernel", 100: "split_peaks_kernel"}
"""Which of the two kernels that make parts is compiled, by architecture."""
KERNELS = {
    KernelPass.FORWARD: ("forward", "forward_kernel", "RAGGED_K"),
    KernelPass.KEY_GRADIENTS: ("backward", "key_gradients_kernel", "RAGGED_Q"),
    KernelPass.QUERY_GRADIENTS: ("backward", "query_gradients_kernel", "RAGGED_K"),
}
PARTS_KERNELS = {
    pass_: (module, f"split_{kernel}", ragged_name) for pass_, (module, kernel, ragged_name) in KERNELS.items()
}
GRADIENTS = ("fp32", "bf16", "bf16", "fp16")
"""The dtype of gradients for which AdamW's update is compiled, one for each architecture."""
MOST = 96
SPILLED_BYTES = 4096
"""The most bytes that a thread may spill. More means that a tile is far too large, unless it was measured to be the fastest."""
MEASURED_SPILLED_BYTES = 8192


def request(architecture: int, pass_: KernelPass, element: str, arithmetic: Arithmetic, *shape: Any) -> dict[str, Any]:
    head_dim, causal, ragged = shape
    row = choose_row(
        TileProblem(
            pass_=pass_,
            head_dim=head_dim,
            arithmetic=arithmetic,
            architecture=f"sm_{architecture}",
            shared_memory_bytes=SHARED_MEMORY_BYTES[architecture],
        )
    )
    config = row.config
    of_parts = arithmetic is FP16X3
    module, kernel, ragged_name = (PARTS_KERNELS if of_parts else KERNELS)[pass_]
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
    }
    constants |= {"CAUSAL": causal, ragged_name: ragged}
    constants |= {} if of_parts else {"PRECISION": arithmetic.dot_precision}
    if pass_ is KernelPass.KEY_GRADIENTS:
        constants["HEADS_PER_KEY_HEAD"] = 4 if ragged else 1
    return {
        "module": f"trainstep.ops.flash_attention.{'split' if of_parts else 'portable'}.{module}",
        "kernel": kernel,
        "constants": constants,
        "types": types_of_parts(config, padded(head_dim)) if of_parts else {},
        "element": element,
        "architecture": architecture,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "most_spilled_bytes": SPILLED_BYTES if row.record == UNTUNED else MEASURED_SPILLED_BYTES,
        # IEEE fp32 adds tiles up outside the products, except for key gradients, which do so every 1,024 queries
        "sums_run_on": not of_parts and (arithmetic is not IEEE or pass_ is KernelPass.KEY_GRADIENTS),
    }


def types_of_parts(config: TileConfig, width: int) -> dict[str, str]:
    sides = {"query_parts": config.block_q, "key_parts": config.block_k}
    descriptors = {name: f"tensordesc<fp16[{side}, {width}]>" for name, side in sides.items()}
    return {**descriptors, "peaks_ptr": "*i32"}


def prologue_request(architecture: int, kernel: str) -> dict[str, Any]:
    return {
        "module": "trainstep.ops.flash_attention.split.parts",
        "kernel": kernel,
        "constants": {"HEAD_DIM": 80, "BLOCK_D": 128, "BLOCK": 32, "BACKWARD": True},
        "types": {"query_parts_ptr": "*fp16", "key_parts_ptr": "*fp16", "peaks_ptr": "*i32"},
        "element": "fp32",
        "architecture": architecture,
        "num_warps": 4,
        "num_stages": 1,
        "most_spilled_bytes": 0,
        # 32 x 128 elements by 128 threads, 16 bytes at a time, for four tensors; else for o too, and for four tensors' two parts
        "least_vector_accesses": 4 * 8 if kernel == "split_peaks_kernel" else 5 * 8 + 4 * 2 * 4,
    }


def delta_request(architecture: int) -> dict[str, Any]:
    return {
        "module": "trainstep.ops.flash_attention.portable.backward",
        "kernel": "delta_kernel",
        "constants": {"HEAD_DIM": 80, "BLOCK_D": 128, "BLOCK_Q": 64},
        "element": "bf16",
        "architecture": architecture,
        "num_warps": 4,
        "num_stages": 1,
        "most_spilled_bytes": 0,
    }


def adamw_request(architecture: int, gradient: str) -> dict[str, Any]:
    """A request for AdamW's kernel, which is compiled here although it is not attention."""
    numbers = dict.fromkeys(("lr", "eps", "weight_decay"), "fp32")
    pointers = {"addresses_ptr": "*i64", "chunks_ptr": "*i32", "gradient_ptr": f"*{gradient}", "rounded_ptr": "*bf16"}
    betas = {"BETA1": 0.9, "BETA2": 0.999, "LOG2_BETA1": -0.152, "LOG2_BETA2": -0.00144}
    switches = dict.fromkeys(("ROUNDED", "ALIGNED", "LR_ON_DEVICE", "SCALED", "MAY_SKIP"), True)
    return {
        "module": "trainstep.ops.adamw_kernel",
        "kernel": "adamw_kernel",
        "constants": betas | switches | {"CHUNK": 2048, "VECTOR": 4},
        "types": numbers | pointers,
        "element": "fp32",
        "architecture": architecture,
        "num_warps": 8,
        "num_stages": 3,
        "most_spilled_bytes": 64,  # triton 3.6 spills up to 48 with the rounded copy, none without; 3.9 none
        # For a full chunk: 2048 elements by 256 threads, 4 at a time: gradient, rounded copy, and three tensors twice
        "least_vector_accesses": 2 + 2 + 3 * 2 * 2,
        "most_conversions": 0,
    }


def chosen(half: int) -> list[tuple[int, KernelPass, tuple[Any, ...]]]:
    """Architecture, pass and variant of half 0 or 1 of the set, without the variant that changes its arithmetic."""
    places = itertools.product(enumerate(SHARED_MEMORY_BYTES), enumerate(KernelPass), enumerate(VARIANTS))
    return [
        (architecture, pass_, variant)
        for (index, architecture), (pass_index, pass_), (place, variant) in places
        if variant != ALTERNATED and (index + pass_index + place) % 2 == half
    ]


def covering_set(half: int) -> list[dict[str, Any]]:
    """Requests of half 0 or 1 of the set; small kernels and the variant that changes its arithmetic are in both."""
    requests = [delta_request(architecture) for architecture in SHARED_MEMORY_BYTES]
    requests += map(adamw_request, SHARED_MEMORY_BYTES, GRADIENTS)
    requests += [request(architecture, pass_, *variant) for architecture, pass_, variant in chosen(half)]
    element, arithmetics, *shape = ALTERNATED
    for index, architecture in enumerate(SHARED_MEMORY_BYTES):
        for pass_index, pass_ in enumerate(KernelPass):
            requests.append(request(architecture, pass_, element, arithmetics[(index + pass_index) % 2], *shape))
    return requests


def parts_set(half: int) -> list[dict[str, Any]]:
    """Requests for the kernels of FP16X3, where a pass has several shapes every other one, and for those that make parts."""
    requests = [
        request(architecture, pass_, "fp32", FP16X3, *shape)
        for architecture, passes in PARTS_VARIANTS.items()
        for pass_, shapes in passes.items()
        for shape in (shapes[half::2] if len(shapes) > 1 else shapes)
    ]
    return [*itertools.starmap(prologue_request, PROLOGUE.items()), *requests]


def every_variant() -> list[dict[str, Any]]:
    elements = [("bf16", HALF), ("fp16", HALF), ("fp32", IEEE), ("fp32", TF32), ("fp32", TF32X3), ("fp32", FP16X3)]
    shapes = itertools.product((64, 80, 128, 256), (True, False), (True, False))
    variants = itertools.product(SHARED_MEMORY_BYTES, KernelPass, elements, shapes)
    requests = [request(architecture, pass_, *element, *shape) for architecture, pass_, element, shape in variants]
    updates = itertools.starmap(adamw_request, itertools.product(SHARED_MEMORY_BYTES, {*GRADIENTS}))
    prologues = itertools.starmap(
        prologue_request, itertools.product(SHARED_MEMORY_BYTES, sorted({*PROLOGUE.values()}))
    )
    return [*map(delta_request, SHARED_MEMORY_BYTES), *prologues, *updates, *requests]


def test_each_half_has_every_pair():
    halves = [set(chosen(half)) for half in (0, 1)]
    every = set(itertools.product(SHARED_MEMORY_BYTES, KernelPass, VARIANTS[:-1]))
    assert halves[0].isdisjoint(halves[1])
    assert halves[0] | halves[1] == every
    for half, (one, other) in itertools.product(halves, itertools.combinations(range(3), 2)):
        assert {(key[one], key[other]) for key in half} == {(key[one], key[other]) for key in every}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_of_a_covering_set_compiles_and_fits(tmp_path: Path, record_property: Any):
    triton = pytest.importorskip("triton")
    check_covering_set(0, tmp_path, record_property, triton.__version__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_half_compiles_with_the_oldest_triton(tmp_path: Path, record_property: Any):
    check_covering_set(1, tmp_path, record_property, *oldest_triton())


def check_covering_set(half: int, cache: Path, record_property: Any, version: str, triton_folder: str = "") -> None:
    requests = [*covering_set(half), *parts_set(half)]
    assert len(requests) <= MOST
    check_compiled(requests, cache, record_property, version, triton_folder)


def main() -> None:
    """Print a line for each variant, `ok` or what is wrong; exit with status 1 if anything is wrong."""
    wrong = 0
    with tempfile.TemporaryDirectory() as cache:
        requests = every_variant()
        for first in range(0, len(requests), MOST):
            for result in compile_all(requests[first : first + MOST], Path(cache)):
                complaints = complaints_about(result)
                wrong += bool(complaints)
                taken = {name: result.get(name) for name in ("registers", "spilled_bytes", "shared_bytes")}
                print(*(complaints or [f"ok {name_of(result)}: {taken}"]), sep="\n", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
