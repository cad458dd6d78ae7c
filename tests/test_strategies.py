"""Each parallel strategy has a row, a constructor and memory terms, and a new one needs no other place."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sources import PACKAGE
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import OURS, PEERS, SYNCS, USED_BY, ParallelConfig
from trainstep.config.parsing import from_plain
from trainstep.costs.exchange import Exchange, ParameterSize
from trainstep.costs.gradient_sync import step_messages
from trainstep.costs.strategies import STRATEGIES, MessageKind, Part, Strategy, strategy_named
from trainstep.plan.memory_terms import TERMS, transformer_parameters
from trainstep.plan.peak_memory import expected_memory
from trainstep.training.parallelism import CONSTRUCTORS

MODEL = ModelConfig(d_model=512, d_ff=1344, layers=8, heads=16, vocab_size=256)


def test_each_strategy_has_one_name_a_constructor_and_ours_have_memory_terms():
    assert len(set(SYNCS)) == len(STRATEGIES)
    assert CONSTRUCTORS.keys() == set(SYNCS)
    assert TERMS.keys() == set(OURS)


@pytest.mark.parametrize("kind", MessageKind)
def test_each_kind_of_message_has_a_formula(kind: MessageKind):
    sizes = [ParameterSize(name="weight", numel=100, element_bytes=4)]
    row = Strategy(name="toy", meaning="", sends=(kind,))
    assert [message for message in step_messages(Exchange(strategy=row, ranks=2), sizes) if message.payload_bytes > 0]


@pytest.mark.parametrize("name", OURS)
def test_sharded_parts_take_a_fraction_of_the_memory(name: str):
    """The memory terms are compared with measured bytes in tests/plan/test_peak_memory.py."""
    config = from_plain(ParallelConfig, {"model": MODEL, "ranks": 8, "sync": name})
    memory = expected_memory(config, transformer_parameters(MODEL, "fp32"))
    assert memory is not None
    whole = 4 * MODEL.parameters
    shares = {
        Part.GRADIENTS: memory.after_backward.gradients_bytes / whole,
        Part.OPTIMIZER_STATE: memory.after_step.optimizer_state_bytes / (2 * whole),
        Part.PARAMETERS: memory.after_step.parameters_bytes / whole,
    }
    assert {part for part, share in shares.items() if share < 0.2} == strategy_named(name).shards
    assert all(share == pytest.approx(1, rel=0.01) or share < 0.2 for share in shares.values())


@pytest.mark.parametrize("name", PEERS)
def test_strategies_of_torch_match_their_counterparts(name: str):
    peer = strategy_named(name)
    ours = strategy_named(str(peer.counterpart))
    assert ours.counterpart is None
    assert (peer.shards, peer.in_units, peer.overlaps) == (ours.shards, ours.in_units, ours.overlaps)
    assert set(peer.options) <= set(ours.options)
    assert peer.sends == ()


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
"""File -> the text after which the line of a new strategy is written: all steps of the recipe in CONTRIBUTING.md."""


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and one more strategy in it."""
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
from trainstep.plan.peak_memory import expected_messages
from trainstep.plan.memory_terms import transformer_parameters
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


def test_a_new_strategy_needs_three_lines(with_toy: Path):
    printed = json.loads(run_python(with_toy, "-c", USE_IT))
    assert printed["cells"] == ["tiny, sync none", "tiny, toy, own", "tiny, toy, bf16"]
    assert "toy: toys" in printed["help"]
    assert printed["messages"] == printed["parameters"] + 1
    assert printed["state_bytes"] > 2 * 4 * printed["elements"]
    assert printed["wrapper"] == "NaiveDDP"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_strategy_runs_from_the_command_line(with_toy: Path):
    """Its messages and bytes are those of its row, and it is in every table."""
    small = ["--layers", "1", "--d-model", "16", "--heads", "2", "--context", "8", "--steps", "2", "--warmups", "1"]
    options = ["--sync", "none,toy", "--window-steps", "1", "--json", "--page", "page.html"]
    out = run_python(with_toy, "-m", "trainstep", "parallel", "--device", "cpu", *small, *options)
    [row] = [row for row in json.loads(out)["rows"] if row["sync"] == "toy"]
    assert row["failure"] is None
    assert row["agreement"] == "parameters and buffers"
    assert row["messages"] == row["expected_messages"] > 1
    assert row["wire_bytes"] == row["expected_wire_bytes"] > 0
    assert "toy" in (with_toy / "page.html").read_text()
