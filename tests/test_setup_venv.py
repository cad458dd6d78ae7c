"""The set-up script: the sentence before a download, the torch it chooses, and its pip commands. Nothing is installed."""

import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sources import ROOT, load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/setup_venv.py as a module."""
    return load_script("setup_venv", monkeypatch)


class Commands:
    """A stand-in for subprocess.run, which keeps each command and its constraints, and returns the given answer."""

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
    ("version", "usable"), [("2.13.0+cu130", "2.13.0+cu130"), ("2.11.0", "2.11.0"), ("2.10.1", None), (None, None)]
)
def test_an_installed_torch_is_used_if_it_is_new_enough(script, monkeypatch, version, usable):
    with_torch(script, monkeypatch, version)
    assert script.installed_torch() == usable


@pytest.mark.parametrize(
    ("platform", "offered", "words"),
    [
        ("linux", "2.13.0", ["2.13.0 with CUDA, about 3 GB (over 6 GB on disk)", "--index-url", "it is kept"]),
        ("linux", None, ["with CUDA, about 3 GB"]),
        ("linux", "2.13.0+cpu", ["2.13.0+cpu (~0.2 GB CPU build)"]),
        ("darwin", "2.13.0", ["(~0.2 GB CPU build)"]),
    ],
)
def test_the_size_of_a_download_is_stated(script, monkeypatch, platform, offered, words):
    monkeypatch.setattr(script.sys, "platform", platform)
    sentence = script.download_sentence(Path(".venv"), offered)
    assert [word for word in words if word not in sentence] == []
    assert sentence.startswith("Setting up .venv: downloading PyTorch")
    assert ("CPU build (~0.2 GB) does" in sentence) == ("CUDA" in sentence), (
        "a large download comes with the way to a smaller one"
    )


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ("torch (2.13.0+cpu)\nAvailable versions: 2.13.0+cpu, 2.13.0, 2.12.0\n  INSTALLED: none", "2.13.0+cpu"),
        ("torch (2.13.1)\nAvailable versions: 2.13.1, 2.13.0+cpu, 2.13.0, 2.12.0+cpu\n", "2.13.0+cpu"),
        ("torch (99.0)\nAvailable versions: 99.0, 2.13.0, 2.11.0, 2.10.0+cpu\n", "2.13.0"),
        ("torch (99.0)\nAvailable versions: 99.0\n", None),
        ("", None),
    ],
)
def test_the_newest_cpu_build_below_the_limit_is_chosen_else_the_newest_release(script, monkeypatch, offers, chosen):
    commands = answered(script, monkeypatch, offers)
    assert script.offered_torch(Path("python")) == chosen
    assert commands.commands == [["python", "-m", "pip", "index", "versions", "torch"]], "nothing is downloaded"


@pytest.mark.parametrize(("version", "enough"), [("2.13.0+cpu\n", True), ("2.10.0\n", False), ("99.0\n", False)])
def test_an_environments_own_torch_must_be_within_the_limits(script, monkeypatch, version, enough):
    answered(script, monkeypatch, version)
    assert script.has_torch(Path("python")) == enough


def test_one_pip_command_installs_everything(script, monkeypatch):
    commands = answered(script, monkeypatch)
    script.install(Path("python"), torch=None, reuse=False)
    [command] = commands.commands
    assert command[:4] == ["python", "-m", "pip", "install"]
    assert command[-2:] == ["--editable", f"{ROOT}[dev]"]
    assert commands.constraints == (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("torch", "reuse", "other_pins"), [("2.12.0+cu130", True, []), ("2.13.0+cpu", False, ["triton"])]
)
def test_the_chosen_torch_is_installed(script, monkeypatch, torch, reuse, other_pins):
    """A reused torch is kept, and so is its triton, whatever constraints.txt says about them."""
    commands = answered(script, monkeypatch)
    script.install(Path("python"), torch=torch, reuse=reuse)
    pinned = [line for line in commands.constraints.splitlines() if line.startswith(("torch", "triton"))]
    assert pinned.pop() == f"torch=={torch}"
    assert [line.partition("<")[0] for line in pinned] == other_pins


def test_a_pip_that_fails_ends_in_a_sentence(script, monkeypatch):
    answered(script, monkeypatch, code=1)
    with pytest.raises(SystemExit, match="pip could not install the packages"):
        script.install(Path("python"), torch=None, reuse=False)


@pytest.mark.parametrize("reused", ["2.13.0", None])
def test_the_choice_is_printed_before_anything_is_installed(script, monkeypatch, capsys, tmp_path, reused):
    calls: list[str] = []
    with_torch(script, monkeypatch, reused)
    monkeypatch.setattr(script.sys, "argv", ["setup_venv.py", str(tmp_path / "venv")])
    monkeypatch.setattr(script, "create", lambda folder, reuse: calls.append(f"create reuse={reuse}"))
    monkeypatch.setattr(script, "has_torch", lambda python: False)
    monkeypatch.setattr(script, "offered_torch", lambda python: "2.13.0+cpu")
    monkeypatch.setattr(
        script, "install", lambda python, torch, reuse: calls.append(f"{capsys.readouterr().out}{torch} {reuse}")
    )
    script.main()
    created, installed = calls
    assert created == f"create reuse={reused is not None}"
    assert ("PyTorch 2.13.0 is installed here and used" in installed) == (reused is not None)
    assert ("downloading PyTorch 2.13.0+cpu (~0.2 GB CPU build)" in installed) == (reused is None)
    assert installed.endswith("2.13.0 True" if reused else "2.13.0+cpu False")
