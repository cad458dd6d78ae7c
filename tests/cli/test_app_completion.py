"""`trainstep --install-completion` writes a script under the home folder, and bash completes with it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from trainstep.cli import app

SCRIPTS = {
    "bash": ".local/share/bash-completion/completions/trainstep",
    "zsh": ".zsh/completions/_cyclopts_trainstep",
    "fish": ".config/fish/completions/trainstep.fish",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with nothing in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ZSH", "ZSH_CUSTOM", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize("shell", SCRIPTS)
def test_each_shell_gets_its_script(home: Path, capsys: pytest.CaptureFixture[str], shell: str):
    assert app.run(["--install-completion", "--shell", shell]) == 0
    assert f"completion for {shell}: {home / SCRIPTS[shell]}\n" in capsys.readouterr().out
    script = (home / SCRIPTS[shell]).read_text()
    assert [word for word in ("bench", "sweep", "budget-minutes", "install-completion") if word not in script] == []


@pytest.mark.parametrize(("shell", "start_up"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_the_start_up_file_loads_the_script_once(home: Path, shell: str, start_up: str):
    (home / start_up).write_text("alias ll='ls -l'\n")
    for _ in range(2):
        assert app.run(["--install-completion", "--shell", shell]) == 0
    text = (home / start_up).read_text()
    assert "alias ll='ls -l'\n" in text
    assert text.count(str((home / SCRIPTS[shell]).parent)) == (2 if shell == "bash" else 1), "in one line"


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash, written once: it takes a second to make."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        assert app.run(["--install-completion", "--shell", "bash"]) == 0
    return folder / SCRIPTS["bash"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [("be", {"bench"}), ("bench --bud", {"--budget-minutes"}), ("co", {"compare", "collectives"})],
)
def test_bash_completes_verbs_and_options(bash_script: Path, words: str, completed: set[str]):
    line = f"COMP_WORDS=(trainstep {words}); COMP_CWORD={len(words.split())}; _trainstep; echo ${{COMPREPLY[@]}}"
    command = ["bash", "--norc", "-c", f'. "{bash_script}"; {line}']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == completed


@pytest.mark.parametrize("shell", ["cmd", "powershell"])
def test_another_shell_is_refused(home: Path, capsys: pytest.CaptureFixture[str], shell: str):
    assert app.run(["--install-completion", "--shell", shell]) == 2
    err = capsys.readouterr().err
    assert shell in err
    assert err.count("\n") == 1
    assert list(home.iterdir()) == []


def test_a_home_folder_that_cannot_be_written_is_named(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / ".local").touch()
    assert app.run(["--install-completion", "--shell", "bash"]) == 2
    assert ".local" in capsys.readouterr().err
