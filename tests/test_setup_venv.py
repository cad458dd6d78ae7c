"""The set-up script: what it says before a download, which torch it takes, and what it asks pip for. Nothing is installed."""

import importlib.util
import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sources import ROOT


@pytest.fixture
def script() -> ModuleType:
    """scripts/setup_venv.py as a module."""
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "scripts" / "setup_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Commands:
    """Stands in for subprocess.run: keeps each command and the constraints it named, and answers what it is told to."""

    def __init__(self, stdout: str = "", code: int = 0) -> None:
        self.commands: list[list[str]] = []
        self.constraints = ""
        self._stdout, self._code = stdout, code

    def __call__(self, command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        self.commands.append(words)
        if "--constraint" in words:
            self.constraints = Path(words[words.index("--constraint") + 1]).read_text()
        if options.get("check") and self._code:
            raise subprocess.CalledProcessError(self._code, words)
        return subprocess.CompletedProcess(words, self._code, self._stdout, "")


def answered(script: ModuleType, monkeypatch: pytest.MonkeyPatch, stdout: str = "", code: int = 0) -> Commands:
    commands = Commands(stdout, code)
    monkeypatch.setattr(script.subprocess, "run", commands)
    return commands


def with_torch(script: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(script.metadata, "version", installed)


@pytest.mark.parametrize(
    ("version", "found"), [("2.13.0+cu130", "2.13.0+cu130"), ("2.11.0", "2.11.0"), ("2.10.1", None), (None, None)]
)
def test_a_torch_that_is_installed_is_used_if_it_is_new_enough(script, monkeypatch, version, found):
    with_torch(script, monkeypatch, version)
    assert script.installed_torch() == found


@pytest.mark.parametrize(
    ("platform", "offered", "words"),
    [
        ("linux", "2.13.0", ["2.13.0 with CUDA, about 2.6 GB (6 GB on disk)", "--index-url", "it is kept"]),
        ("linux", None, ["with CUDA, about 2.6 GB"]),
        ("linux", "2.13.0+cpu", ["2.13.0+cpu (~0.2 GB CPU build)"]),
        ("darwin", "2.13.0", ["(~0.2 GB CPU build)"]),
    ],
)
def test_the_size_of_a_download_is_said(script, monkeypatch, platform, offered, words):
    monkeypatch.setattr(script.sys, "platform", platform)
    said = script.download_sentence(Path(".venv"), offered)
    assert [word for word in words if word not in said] == []
    assert said.startswith("Setting up .venv: downloading PyTorch")
    assert ("CPU build (~0.2 GB) does" in said) == ("CUDA" in said), "how to make it less, where it is much"


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ("torch (2.13.0+cpu)\nAvailable versions: 2.13.0+cpu, 2.13.0, 2.12.0\n  INSTALLED: none", "2.13.0+cpu"),
        ("torch (99.0)\nAvailable versions: 99.0, 2.11.0\n", "2.11.0"),
        ("torch (99.0)\nAvailable versions: 99.0\n", None),
        ("", None),
    ],
)
def test_what_pip_offers_first_below_the_limit_is_chosen(script, monkeypatch, offers, chosen):
    """A CPU build among pip's find-links comes first of its version."""
    commands = answered(script, monkeypatch, offers)
    assert script.offered_torch(Path("python")) == chosen
    assert commands.commands == [["python", "-m", "pip", "index", "versions", "torch"]], "nothing is downloaded"


@pytest.mark.parametrize(("version", "enough"), [("2.13.0+cpu\n", True), ("2.10.0\n", False), ("99.0\n", False)])
def test_an_environments_own_torch_must_be_within_the_limits(script, monkeypatch, version, enough):
    answered(script, monkeypatch, version)
    assert script.has_torch(Path("python")) == enough


def test_one_pip_command_installs_everything(script, monkeypatch):
    commands = answered(script, monkeypatch)
    script.install(Path("python"), torch=None)
    [command] = commands.commands
    assert command[:4] == ["python", "-m", "pip", "install"]
    assert command[-2:] == ["--editable", f"{ROOT}[dev]"]
    assert commands.constraints == (ROOT / "constraints.txt").read_text()


def test_a_torch_that_is_reused_stays_as_it_is(script, monkeypatch):
    commands = answered(script, monkeypatch)
    script.install(Path("python"), torch="2.12.0+cu130")
    pinned = [line for line in commands.constraints.splitlines() if line.startswith(("torch", "triton"))]
    assert pinned == ["torch==2.12.0+cu130"]


def test_a_pip_that_fails_ends_in_a_sentence(script, monkeypatch):
    answered(script, monkeypatch, code=1)
    with pytest.raises(SystemExit, match="pip could not install the packages"):
        script.install(Path("python"), torch=None)


@pytest.mark.parametrize("reused", ["2.13.0", None])
def test_it_is_said_before_anything_is_installed(script, monkeypatch, capsys, tmp_path, reused):
    done: list[str] = []
    with_torch(script, monkeypatch, reused)
    monkeypatch.setattr(script.sys, "argv", ["setup_venv.py", str(tmp_path / "venv")])
    monkeypatch.setattr(script, "create", lambda folder, reuse: done.append(f"create reuse={reuse}"))
    monkeypatch.setattr(script, "has_torch", lambda python: False)
    monkeypatch.setattr(script, "offered_torch", lambda python: "2.13.0+cpu")
    monkeypatch.setattr(script, "install", lambda python, torch: done.append(f"{capsys.readouterr().out}{torch}"))
    script.main()
    created, installed = done
    assert created == f"create reuse={reused is not None}"
    assert ("PyTorch 2.13.0 is installed here and used" in installed) == (reused is not None)
    assert ("downloading PyTorch 2.13.0+cpu (~0.2 GB CPU build)" in installed) == (reused is None)
    assert installed.endswith(str(reused))
