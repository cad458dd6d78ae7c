"""A user's model function is found, called and checked; errors name what is wrong."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainstep.config.model import UserModel
from trainstep.config.run import RunConfig
from trainstep.training.user_model import blocks_of, build_user_model, source_of

SOURCE = """
import torch
from torch import nn

ASKED = []

def good(run, device):
    ASKED.append((run, device))
    return nn.Linear(2, 1), lambda step: {"input": torch.ones(1, 2)}

def alone(run, device):
    return nn.Linear(2, 1)

def no_module(run, device):
    return "module", lambda step: {}

def no_batches(run, device):
    return nn.Linear(2, 1), [1]

constant = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "someones").mkdir()
    (tmp_path / "someones" / "__init__.py").touch()
    (tmp_path / "someones" / "model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "someones"]:
        monkeypatch.delitem(sys.modules, name)
    return "someones.model"


def build(function: str) -> tuple[nn.Module, object]:
    run = RunConfig(model=UserModel(function=function), context=3)
    return build_user_model(function, run, torch.device("cpu"))


def test_the_function_gets_the_run_and_the_device(package: str):
    module, next_batch = build(f"{package}:good")
    assert isinstance(module, nn.Linear)
    assert callable(next_batch)
    import someones.model  # type: ignore[import-not-found]

    (run, device) = someones.model.ASKED[-1]
    assert (run.context, device) == (3, torch.device("cpu"))


def test_the_source_is_that_of_the_file_which_was_built(package: str, tmp_path: Path):
    source_of.cache_clear()
    build(f"{package}:good")
    (tmp_path / "someones" / "model.py").write_text(SOURCE + "\n")
    assert source_of(f"{package}:good") == hashlib.sha256(SOURCE.encode()).hexdigest()[:12]
    (tmp_path / "someones" / "other.py").write_text("from someones.model import good")
    assert source_of("someones.other:good") == hashlib.sha256((SOURCE + "\n").encode()).hexdigest()[:12]
    for absent in ("nobodys_package_at_all:build", f"{package}:absent", "sys:exit"):
        assert source_of(absent) == "", "it has no file"


@pytest.mark.parametrize("name", ["absent", "constant"])
def test_a_missing_function_is_named(package: str, name: str):
    with pytest.raises(ImportError, match=f"model: {package} has no function '{name}'"):
        build(f"{package}:{name}")


def test_a_missing_module_is_named():
    with pytest.raises(ImportError, match="nobodys_package_at_all"):
        build("nobodys_package_at_all:build")


@pytest.mark.parametrize("name", ["alone", "no_module", "no_batches"])
def test_a_wrong_return_value_is_refused(package: str, name: str):
    with pytest.raises(ValueError, match=r"must return \(module, next_batch\)"):
        build(f"{package}:{name}")


def test_blocks_are_the_longest_module_list():
    model = nn.Module()
    model.short = nn.ModuleList([nn.Linear(1, 1)])
    model.inner = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)]))
    assert blocks_of(model) == list(model.inner[0])
    with pytest.raises(ValueError, match=r"compile: block needs a model with its blocks in an nn\.ModuleList"):
        blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ModuleList()))
