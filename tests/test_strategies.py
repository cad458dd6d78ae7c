"""A parallel strategy is one row, one constructor and one set of memory terms: none is missing, and no fourth place is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sources import PACKAGE
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import ParallelConfig
from trainstep.config.parsing import from_plain
from trainstep.config.sync import OURS, PEERS, SYNCS, USED_BY
from trainstep.costs.exchange import Exchange, ParameterSize
from trainstep.costs.gradient_sync import step_messages
from trainstep.costs.strategies import STRATEGIES, MessageKind, Part, Strategy, strategy_named
from trainstep.plan.memory_terms import TERMS
from trainstep.plan.parameters import transformer_parameters
from trainstep.plan.peak_memory import expected_memory
from trainstep.training.parallelism import CONSTRUCTORS

MODEL = ModelConfig(d_model=512, d_ff=1344, layers=8, heads=16, vocab_size=256)


def test_each_is_named_once_and_has_its_constructor_and_ours_their_memory_terms():
    assert len(set(SYNCS)) == len(STRATEGIES)
    assert CONSTRUCTORS.keys() == set(SYNCS)
    assert TERMS.keys() == set(OURS)


@pytest.mark.parametrize("kind", MessageKind)
def test_each_kind_of_message_has_its_formula(kind: MessageKind):
    sizes = [ParameterSize(name="weight", numel=100, element_bytes=4)]
    row = Strategy(name="toy", meaning="", sends=(kind,))
    assert [one for one in step_messages(Exchange(strategy=row, ranks=2), sizes) if one.payload_bytes > 0]


@pytest.mark.parametrize("name", OURS)
def test_what_a_row_says_is_sharded_is_held_by_parts(name: str):
    """By the memory terms, whose agreement with what is held tests/plan/test_peak_memory.py shows."""
    config = from_plain(ParallelConfig, {"model": MODEL, "ranks": 8, "sync": name})
    found = expected_memory(config, transformer_parameters(MODEL, "fp32"))
    assert found is not None
    whole = 4 * MODEL.parameters
    shares = {
        Part.GRADIENTS: found.after_backward.gradients_bytes / whole,
        Part.OPTIMIZER_STATE: found.after_step.optimizer_state_bytes / (2 * whole),
        Part.PARAMETERS: found.after_step.parameters_bytes / whole,
    }
    assert {part for part, share in shares.items() if share < 0.2} == strategy_named(name).shards
    assert all(share == pytest.approx(1, rel=0.01) or share < 0.2 for share in shares.values())


@pytest.mark.parametrize("name", PEERS)
def test_torchs_own_are_of_the_kind_of_their_counterparts(name: str):
    theirs = strategy_named(name)
    ours = strategy_named(str(theirs.counterpart))
    assert ours.counterpart is None
    assert (theirs.shards, theirs.in_units, theirs.overlaps) == (ours.shards, ours.in_units, ours.overlaps)
    assert set(theirs.options) <= set(ours.options)
    assert theirs.sends == ()


def test_options_are_those_of_the_config():
    assert {option for strategy in STRATEGIES for option in strategy.options} == set(USED_BY)


ADDED = {
    "costs/strategies.py": (
        "STRATEGIES = (\n",
        '    Strategy(name="toy", meaning="toys", sends=(MessageKind.GRADIENTS_ONE_BY_ONE, MessageKind.USAGE), '
        'options=("reduce_dtype",)),\n',
    ),
    "training/parallelism.py": ("] = {\n", '    "toy": _wrapper_then_optimizer(NaiveDDP),\n'),
    "plan/memory_terms.py": ("]] = {\n", '    "toy": _one_by_one,\n'),
}
"""File -> the line behind which a new strategy's is written: all that CONTRIBUTING.md's recipe asks for."""


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, and in it a strategy more."""
    folder = tmp_path_factory.mktemp("with_toy")
    shutil.copytree(PACKAGE, folder / "trainstep", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (behind, line) in ADDED.items():
        path = folder / "trainstep" / name
        text = path.read_text()
        place = text.rindex(behind) + len(behind)
        path.write_text(text[:place] + line + text[place:])
    return folder


def run_python(folder: Path, *arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


USE_IT = """
import json
import torch
from trainstep.config.grid import expand
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import ParallelConfig
from trainstep.config.parsing import fields_of, from_plain
from trainstep.parallel.ranks import alone
from trainstep.plan.communication import expected_messages
from trainstep.plan.parameters import transformer_parameters
from trainstep.plan.peak_memory import expected_memory
from trainstep.training.build import build_step
from trainstep.training.parallelism import parallel

grid = {"workload": ["parallel"], "model": ["tiny"], "sync": [None, "toy"], "reduce_dtype": ["own", "bf16"], "bucket_mib": [1, 2]}
model = ModelConfig(d_model=16, d_ff=32, layers=2, heads=2, vocab_size=40)
config = from_plain(ParallelConfig, {"model": model, "sync": "toy", "context": 8, "clip_grad_norm": 1.0})
sizes = transformer_parameters(model, "fp32")
assembly = build_step(config.run, parallel(alone(torch.device("cpu")), config.sync))
assembly.step(assembly.micro_batches(0))
print(json.dumps({
    "cells": [cell.label for cell in expand(grid, {})],
    "help": fields_of(ParallelConfig)["sync"].metadata["help"],
    "messages": len(expected_messages(config, sizes)),
    "parameters": len(sizes),
    "elements": model.parameters,
    "state_bytes": expected_memory(config, sizes).after_step.optimizer_state_bytes,
    "wrapper": type(assembly.step.gradient_sync).__name__,
}))
"""


def test_a_new_one_needs_its_three_lines_and_nothing_else(with_toy: Path):
    found = json.loads(run_python(with_toy, "-c", USE_IT))
    assert found["cells"] == ["tiny, sync none", "tiny, toy, own", "tiny, toy, bf16"]
    assert "toy: toys" in found["help"]
    assert found["messages"] == found["parameters"] + 1
    assert found["state_bytes"] > 2 * 4 * found["elements"]
    assert found["wrapper"] == "NaiveDDP"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_one_from_the_command_line(with_toy: Path):
    """Messages and bytes come out as its row says, and it stands in every table."""
    small = ["--layers", "1", "--d-model", "16", "--heads", "2", "--context", "8", "--steps", "2", "--warmups", "1"]
    asked = ["--sync", "none,toy", "--window-steps", "1", "--json", "--page", "page.html"]
    out = run_python(with_toy, "-m", "trainstep", "parallel", "--device", "cpu", *small, *asked)
    [row] = [row for row in json.loads(out)["rows"] if row["sync"] == "toy"]
    assert row["failure"] is None
    assert row["agreement"] == "parameters and buffers"
    assert row["messages"] == row["expected_messages"] > 1
    assert row["wire_bytes"] == row["expected_wire_bytes"] > 0
    assert "toy" in (with_toy / "page.html").read_text()
