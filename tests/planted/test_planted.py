"""A slowdown that is planted in a loop is the first cause that `trainstep explain` names: three loops, each under `trainstep run`.

Each run is a process of its own. On a CPU with other work an excess `another_process` may be true, and is left out of the ranks
where it was not planted. Each slowdown is in one loop here, the loops in turns; results/cpu/planted.py has each in all of them, and
on GPUs those that need one, with the gains.
"""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cell_maker import import_path
from trainstep.cli import app
from trainstep.explain.causes import CAUSES

LOOPS = Path(__file__).with_name("loops")
sys.path.insert(0, str(LOOPS))
from plants import PLANTS, planted  # noqa: E402

NEEDED = {"nano": [], "hugging_face": ["transformers", "accelerate"], "lightning_loop": ["lightning"]}
ON_A_CPU = [name for name, plant in PLANTS.items() if not plant.gpu]
_LEAST = 0.03
"""A smaller first excess on a clean loop is its own."""
_RUNS = 3
"""Other work on the machine may be in one run; no cause may be missed, or made up, in this many."""


def findings(folder: Path, loop: str, *plants: str) -> dict[str, float]:
    """Cause -> its share of the step, the longest first. The record is explained in this process, which has torch already."""
    for package in NEEDED[loop]:
        if os.environ.get("TRAINSTEP_REQUIRE_TRANSFORMERS") == "1":
            __import__(package)
        pytest.importorskip(package)
    out, ranks = folder / "run.jsonl", max((PLANTS[name].ranks for name in plants), default=1)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if ranks > 1 else []
    words = [sys.executable, "-m", *torchrun, "trainstep", "run", "--quiet", "--no-page", "--inspect-every", "12"]
    words += ["--out", str(out), str(LOOPS / f"{loop}.py"), "--steps", "26", "--plant", ",".join(plants)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert app.run(["explain", str(out), "--json"]) == 0
    rows = [row for row in json.loads(shown.getvalue())["rows"] if row["kind"] == "finding"]
    left_out = () if "second_process" in plants else ("another_process",)
    return {row["cause"]: row["share"] for row in rows if row["cause"] not in left_out}


def test_every_plant_names_causes_that_there_are():
    assert len(PLANTS) == 13
    assert {cause for plant in PLANTS.values() for cause in plant.causes} <= CAUSES.keys()


def test_an_unknown_plant_is_refused():
    with pytest.raises(ValueError, match="there is no nothing"):
        planted(["nothing", "item"])


def found_in_a_run(good: Callable[[dict[str, float]], bool], folder: Path, loop: str, *plants: str) -> bool:
    """Whether the findings of one of a few runs are good; the first, as a rule."""
    for number in range(_RUNS):
        (folder / str(number)).mkdir()
        found = findings(folder / str(number), loop, *plants)
        if good(found):
            return True
        print(found)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "loop"), list(zip(ON_A_CPU, itertools.cycle(NEEDED), strict=False)))
def test_the_planted_slowdown_is_first(plant: str, loop: str, tmp_path: Path):
    assert found_in_a_run(lambda found: next(iter(found), None) in PLANTS[plant].causes, tmp_path, loop, plant)


@pytest.mark.slow
@pytest.mark.parametrize("loop", NEEDED)
def test_in_a_clean_loop_nothing_is_first(loop: str, tmp_path: Path):
    assert found_in_a_run(lambda found: max(found.values(), default=0.0) < _LEAST, tmp_path, loop)


@pytest.mark.slow
def test_two_slowdowns_are_the_first_two(tmp_path: Path):
    plants = "slow_loader", "eager_attention"
    assert found_in_a_run(lambda found: set(list(found)[:2]) == {"data", "attention_kernel"}, tmp_path, "nano", *plants)
