"""What the README shows of trainstep.parallel runs as it stands: by torchrun and spawn, with start_ranks and with torch's start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import import_path
from ranks import free_port
from sources import ROOT
from trainstep.parallel.listening import loopback_interface

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


def shown() -> str:
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    (block,) = [block.partition("```")[0] for block in blocks if "from trainstep.parallel import" in block]
    return block


@pytest.mark.slow
@pytest.mark.parametrize("start", ["torchrun", "spawn"])
def test_the_readmes_ways_to_start(start: str, tmp_path: Path):
    """All ranks, however they started, end with the same weights."""
    script = tmp_path / "train.py"
    script.write_text(shown().replace("29500", str(free_port())) + AROUND)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["GLOO_SOCKET_IFNAME"] = loopback_interface() or ""
    command = [sys.executable, *(torchrun if start == "torchrun" else []), str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    names = ("launched", "launched_by_torch_alone") if start == "torchrun" else ("spawned", "spawned_by_torch_alone")
    assert sorted(name for name, _, _ in lines) == sorted(names * 2)
    assert len({weights for _, _, weights in lines}) == 1, done.stdout
