"""test_kernels.py in Triton's interpreter, which must be chosen before triton is imported: hence a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from sources import ROOT

KERNELS = "tests/ops/flash_attention/test_kernels.py"
SECONDS = 90
"""What CI may spend here."""


def in_the_interpreter(*tests: str) -> tuple[int, float]:
    """How many tests passed, in how many seconds."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not multigpu", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed, seconds = re.findall(r"(\d+) passed.* in ([\d.]+)s", done.stdout)[-1]
    return int(passed), float(seconds)


def test_a_few_shapes():
    shapes = [f"{KERNELS}::test_small_random_shapes[{seed}]" for seed in range(1, 5)]
    passed, _ = in_the_interpreter(*shapes, f"{KERNELS}::test_queries_that_see_nothing")
    assert passed == 5


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
def test_kernels_in_the_interpreter():
    passed, seconds = in_the_interpreter(KERNELS)
    assert passed >= 60
    assert seconds <= SECONDS
