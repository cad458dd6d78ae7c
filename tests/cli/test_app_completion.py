"""`trainstep --install-completion` writes a script under the home folder, and bash completes with it."""

import contextlib
import functools
import io
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainstep.cli import app

SCRIPTS = {
    "bash": ".local/share/bash-completion/completions/trainstep",
    "zsh": ".zsh/completions/_cyclopts_trainstep",
    "fish": ".config/fish/completions/trainstep.fish",
}
START_UP_FILES = {"bash": ".bashrc", "zsh": ".zshrc"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """The home folder in which a shell's completion was installed twice, and what that printed.

    Once for each shell: a script takes half a second to make.
    """

    @functools.cache
    def install(shell: str) -> tuple[Path, str]:
        home = tmp_path_factory.mktemp(shell)
        if shell in START_UP_FILES:
            (home / START_UP_FILES[shell]).write_text("alias ll='ls -l'\n")
        with pytest.MonkeyPatch.context() as patch:
            leave_home(patch, home)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                codes = [app.run(["--install-completion", "--shell", shell]) for _ in range(2)]
        assert codes == [0, 0]
        return home, out.getvalue()

    return install


def leave_home(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Let shells find another home folder."""
    patch.setenv("HOME", str(home))
    for name in ("ZSH", "ZSH_CUSTOM", "ZDOTDIR"):
        patch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with nothing in it."""
    leave_home(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.parametrize("shell", SCRIPTS)
def test_each_shell_gets_its_script(installed: Callable[[str], tuple[Path, str]], shell: str):
    home, printed = installed(shell)
    assert printed.count(f"completion for {shell}: {home / SCRIPTS[shell]}\n") == 2
    script = (home / SCRIPTS[shell]).read_text()
    assert [word for word in ("bench", "sweep", "budget-minutes", "install-completion") if word not in script] == []


@pytest.mark.parametrize("shell", START_UP_FILES)
def test_the_start_up_file_loads_the_script_once(installed: Callable[[str], tuple[Path, str]], shell: str):
    home, _ = installed(shell)
    text = (home / START_UP_FILES[shell]).read_text()
    assert "alias ll='ls -l'\n" in text
    assert text.count(str((home / SCRIPTS[shell]).parent)) == (2 if shell == "bash" else 1), "in one line"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [("be", {"bench"}), ("bench --bud", {"--budget-minutes"}), ("co", {"compare", "collectives"})],
)
def test_bash_completes_verbs_and_options(
    installed: Callable[[str], tuple[Path, str]], words: str, completed: set[str]
):
    home, _ = installed("bash")
    line = f"COMP_WORDS=(trainstep {words}); COMP_CWORD={len(words.split())}; _trainstep; echo ${{COMPREPLY[@]}}"
    command = ["bash", "--norc", "-c", f'. "{home / SCRIPTS["bash"]}"; {line}']
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
