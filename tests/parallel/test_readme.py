"""The snippets of the README and of the guide to trainstep.parallel run unchanged, started by torchrun, spawn and torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import import_path
from ranks import free_port
from sources import ROOT
from trainstep.parallel.liveness.link import loopback_interface

AROUND = """
from types import SimpleNamespace


class Model(torch.nn.Linear):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).square().mean())


def build():
    global model
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    model = Model(4, 2)
    return model


def batches():
    numbers = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return [{"x": torch.randn(3, 4, generator=numbers)} for _ in range(3)]


def in_turn(*arguments):
    for start in (launched, launched_by_torch_alone) if not arguments else (spawned, spawned_by_torch_alone):
        start(*arguments)
        os.write(1, f"{start.__name__} {model.weight.flatten().tolist()}\\n".encode())


if __name__ == "__main__":
    if "RANK" in os.environ:
        in_turn()
    else:
        torch.multiprocessing.spawn(in_turn, args=(2,), nprocs=2)
"""


def snippet(document: str) -> str:
    """The Python block of a document that uses trainstep.parallel."""
    blocks = (ROOT / document).read_text().split("```python\n")[1:]
    (block,) = [block.partition("```")[0] for block in blocks if "from trainstep.parallel import" in block]
    return block


def output_of(script: Path, start: str) -> str:
    """Run a script as two ranks of torchrun, or as one process that spawns them; what it prints."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["GLOO_SOCKET_IFNAME"] = loopback_interface() or ""
    command = [sys.executable, *(torchrun if start == "torchrun" else []), str(script)]
    process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.slow
def test_ranks_of_the_readmes_snippet_end_with_equal_weights(tmp_path: Path):
    script = tmp_path / "train.py"
    report = "import os\nos.write(1, f'{model.module.weight.flatten().tolist()}\\n'.encode())\n"
    script.write_text(snippet("README.md") + report)
    weights = output_of(script, "torchrun").splitlines()
    assert len(weights) == 2
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["torchrun", "spawn"])
def test_every_start_in_the_guide_gives_equal_weights(start: str, tmp_path: Path):
    """All ranks end with the same weights, whatever started them."""
    script = tmp_path / "train.py"
    script.write_text(snippet("docs/guide/parallel.md").replace("29500", str(free_port())) + AROUND)
    output = output_of(script, start)
    lines = [line.partition(" ") for line in output.splitlines()]
    names = ("launched", "launched_by_torch_alone") if start == "torchrun" else ("spawned", "spawned_by_torch_alone")
    assert sorted(name for name, _, _ in lines) == sorted(names * 2)
    assert len({weights for _, _, weights in lines}) == 1, output
