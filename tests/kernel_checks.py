"""Compiles kernels for GPUs that are not here and says what is wrong: errors, shared memory, spills, narrow accesses.

They are compiled in processes of their own, without the interpreter, by the installed triton or by the oldest that pyproject.toml
allows, which `make oldest-triton` puts into a folder of its own: TRAINSTEP_OLDEST_TRITON names it.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kernel_compiler import SHARED_MEMORY_BYTES
from sources import ROOT

PROCESSES = 2


def oldest_triton() -> tuple[str, str]:
    """Version and folder of the oldest triton; skips, or where CI requires it fails, if it is not there."""
    folder = os.environ.get("TRAINSTEP_OLDEST_TRITON")
    if not folder:
        refuse = pytest.fail if os.environ.get("TRAINSTEP_REQUIRE_OLDEST_TRITON") == "1" else pytest.skip
        refuse("needs TRAINSTEP_OLDEST_TRITON: make oldest-triton")
    (version,) = re.findall(r'"triton>=([\d.]+);', (ROOT / "pyproject.toml").read_text())
    return f"{version}.0", str(Path(folder).resolve())


def check_compiled(
    requests: list[dict[str, Any]], cache: Path, record_property: Any, version: str, triton_folder: str = ""
) -> None:
    """Compile all of them by this version of triton; the assertion shows every complaint."""
    results = compile_all(requests, cache, triton_folder)
    assert len(results) == len(requests)
    record_property("compiled", json.dumps(results))
    complaints = [complaint for result in results for complaint in complaints_about(result)]
    assert not complaints, "\n".join(complaints)
    assert {result["triton"] for result in results} == {version}


def compile_all(requests: list[dict[str, Any]], cache: Path, triton_folder: str = "") -> list[dict[str, Any]]:
    """Compile by the triton in that folder, or else the installed one; one result for each request."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    if triton_folder:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (triton_folder, environment.get("PYTHONPATH"))))
    compiler = Path(__file__).parent / "kernel_compiler.py"

    def run(share: list[dict[str, Any]]) -> list[dict[str, Any]]:
        process = subprocess.run(
            [sys.executable, str(compiler)],
            input=json.dumps(share),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(PROCESSES) as pool:
        shares = list(pool.map(run, [requests[i::PROCESSES] for i in range(PROCESSES)]))
    return [result for share in shares for result in share]


def name_of(result: dict[str, Any]) -> str:
    return f"{result['kernel']} {result['element']} {result['constants']} sm_{result['architecture']}"


def complaints_about(result: dict[str, Any]) -> list[str]:
    name = name_of(result)
    if "error" in result:
        return [f"{name}: {result['error']}"]
    complaints = []
    if result["shared_bytes"] > SHARED_MEMORY_BYTES[result["architecture"]]:
        complaints.append(f"{name}: {result['shared_bytes']} bytes of shared memory")
    if result["spilled_bytes"] > result["most_spilled_bytes"]:
        complaints.append(f"{name}: {result['spilled_bytes']} bytes spilled")
    if result["vector_accesses"] < result.get("least_vector_accesses", 0):
        complaints.append(f"{name}: only {result['vector_accesses']} vector accesses")
    if result["conversions"] > result.get("most_conversions", result["conversions"]):
        complaints.append(f"{name}: {result['conversions']} tensors pass through shared memory to other threads")
    if result["running_sums"] and result.get("sums_run_on") is False:
        complaints.append(f"{name}: {result['running_sums']} sums go on within the products from tile to tile")
    if result.get("sums_run_on") and not result["running_sums"]:
        complaints.append(f"{name}: no sum that goes on from tile to tile was found, where there is one")
    if result["architecture"] == 90 and any("C75" in warning for warning in result["warnings"]):
        complaints.append(f"{name}: {result['warnings']}")
    return complaints
