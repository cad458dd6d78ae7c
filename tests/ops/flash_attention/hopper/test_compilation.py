"""The Hopper kernels compile for sm_90a without a GPU, and fit: registers, spills, shared memory, wgmma, hazards.

Compiled in processes of their own by the installed triton and by the oldest that pyproject.toml allows, as in test_compilation.py:
each variant by one of them, each kernel by both.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hopper_hazards import hazards, opcodes
from sources import ROOT

pytest.importorskip("triton.experimental.gluon")
from trainstep.ops.flash_attention.hopper.schedules import FORWARD, SHARED_MEMORY_BYTES, WIDTHS

SPILLED_BYTES = {
    ("forward", 64): 512,  # three warpgroups have 160 registers a thread; once a tile, before the loop
    ("forward", 80): 0,
    ("forward", 96): 0,
    ("forward", 128): 512,  # for the same reason
    ("backward", 64): 768,  # fp16 and triton 3.6: probabilities in fp32, 128 queries a step; a few in the loop
    ("backward", 80): 0,
    ("backward", 96): 64,  # fp16, ragged and triton 3.6, some in the loop; 24 in bf16, 16 with triton 3.9
    ("backward", 128): 640,  # for the same reason; triton 3.9 spills 80 at most, 8 in bf16
}
"""The most bytes that a thread may spill, loads and stores together. Measure before allowing more."""
SPILLS_IN_LOOPS = {("forward", 64), ("backward", 64), ("backward", 96), ("backward", 128)}
"""Kernels that may spill in a loop; forward only with a causal mask, three warpgroups and triton 3.6: a few addresses, and it is
faster than any schedule without."""


def request(pass_: str, head_dim: int, causal: bool, ragged: bool, dtype: str, schedule: Any = None) -> dict[str, Any]:
    case = {"pass": pass_, "head_dim": head_dim, "causal": causal, "ragged": ragged, "dtype": dtype}
    return case | ({} if schedule is None else {"schedule": asdict(schedule)})


def half_of_variants(half: int) -> list[dict[str, Any]]:
    """Requests for every pass, head width and schedule: causal and not, of even and ragged lengths; the other pairs in half 1."""
    halves = [(True, False), (False, True)], [(True, True), (False, False)]
    rows = [("forward", width, schedule) for width in WIDTHS for schedule in FORWARD[width]]
    rows += [("backward", width, None) for width in WIDTHS]
    return [
        request(pass_, width, causal, ragged, ("bfloat16", "float16")[ragged], schedule)
        for row, (pass_, width, schedule) in enumerate(rows)
        for causal, ragged in halves[(row + half) % 2]
    ]


def compile_all(requests: list[dict[str, Any]], cache: Path, triton_folder: str = "") -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    folders = [triton_folder, str(ROOT / "src"), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    process = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hopper_compiler.py")],
        input=json.dumps(requests), env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def complaints_about(result: dict[str, Any]) -> list[str]:
    name = " ".join(f"{key}={result[key]}" for key in ("pass", "head_dim", "causal", "ragged", "dtype"))
    if "error" in result:
        return [f"{name}: {result['error']}"]
    kernel = (result["pass"], result["head_dim"])
    store = "UTMASTG" if result["pass"] == "forward" else "UTMAREDG"
    wrong = {
        "shared memory": result["shared_bytes"] > SHARED_MEMORY_BYTES,
        "spills": result["spilled_bytes"] > SPILLED_BYTES[kernel],
        "spills in a loop": result["spills_in_loops"] and kernel not in SPILLS_IN_LOOPS,
        "serialised, or no room for registers": bool(result["warnings"]),
        "warpgroups cannot trade registers": result["setmaxnreg"] == 0,
        "hazards": bool(result["hazards"]),
        "no wgmma or TMA": not {"HGMMA", "UTMALDG", store} <= set(result["opcodes"]),
    }
    return [f"{name}: {what}: {result}" for what, is_so in wrong.items() if is_so]


def check_all(requests: list[dict[str, Any]], cache: Path, version: str, triton_folder: str = "") -> None:
    results = compile_all(requests, cache, triton_folder)
    assert len(results) == len(requests)
    assert not [complaint for result in results for complaint in complaints_about(result)]
    assert {result["triton"] for result in results} == {version}


def test_every_variant_is_in_one_half():
    first, second = half_of_variants(0), half_of_variants(1)
    assert not [wanted for wanted in first if wanted in second]
    for row in [{key: wanted.get(key) for key in ("pass", "head_dim", "schedule")} for wanted in first]:
        for half in (first, second):
            masks = [wanted for wanted in half if row.items() <= {"schedule": None, **wanted}.items()]
            assert {wanted["causal"] for wanted in masks} == {wanted["ragged"] for wanted in masks} == {True, False}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_of_all_variants_compile(tmp_path: Path):
    mixed = request("forward", 64, True, True, "bfloat16")  # elsewhere ragged lengths are in fp16
    check_all([*half_of_variants(0), mixed], tmp_path, pytest.importorskip("triton").__version__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_half_compiles_with_the_oldest_triton(tmp_path: Path):
    folder = os.environ.get("TRAINSTEP_OLDEST_TRITON")
    if not folder:
        refuse = pytest.fail if os.environ.get("TRAINSTEP_REQUIRE_OLDEST_TRITON") == "1" else pytest.skip
        refuse("needs TRAINSTEP_OLDEST_TRITON: make oldest-triton")
    (version,) = re.findall(r'"triton>=([\d.]+);', (ROOT / "pyproject.toml").read_text())
    check_all(half_of_variants(1), tmp_path, f"{version}.0", str(Path(folder).resolve()))


CODE = """
/*0000*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
/*0010*/ {between} ;
/*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
/*0030*/ FADD R5, R5, R6 ;
"""


@pytest.mark.parametrize(
    ("between", "wrong"),
    [
        ("FADD R9, R10, R11", ""),
        ("F2FP.BF16.F32.PACK_AB R6, R10, R11", "writes an operand in flight"),
        ("FMUL R55, R10, R11", "writes a sum in flight"),
        ("LDS.128 R2, [R70]", "writes an operand in flight"),
        ("STS [R4], R6", ""),
    ],
)
def test_the_hazard_check_finds_writes_in_flight(between: str, wrong: str):
    texts = hazards(CODE.replace("{between}", between))
    assert [text.partition(":")[0] for text in texts] == ([wrong] if wrong else [])
    assert opcodes(CODE)["HGMMA"] == 1


def test_a_wait_for_all_but_the_newest_leaves_its_operands_in_flight():
    newest = "HGMMA.64x64x16.F32.BF16 R88, R8, gdesc[UR8], R88, gsb0 ;\n/*0018*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"
    assert not hazards(CODE.replace("{between}", newest + "/*001a*/ FADD R4, R5, R6"))
    assert hazards(CODE.replace("{between}", newest + "/*001a*/ FADD R8, R5, R6"))
