"""Run test files in Triton's interpreter, in a separate process, since it must be chosen before triton is imported."""

import os
import re
import subprocess
import sys

import pytest

from sources import ROOT


def in_the_interpreter(*tests: str) -> int:
    """Run tests; how many passed."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not multigpu", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])
