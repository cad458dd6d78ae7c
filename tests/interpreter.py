"""Test files in Triton's interpreter, which must be chosen before triton is imported: hence a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from sources import ROOT


def in_the_interpreter(*tests: str) -> tuple[int, float]:
    """How many tests passed, in how many seconds."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not multigpu", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed, seconds = re.findall(r"(\d+) passed.* in ([\d.]+)s", done.stdout)[-1]
    return int(passed), float(seconds)
