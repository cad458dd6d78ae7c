"""`trainstep --install-completion`: the Tab key completes verbs, options and names of files, in bash, zsh and fish."""

from typing import Literal

_START_UP = {"bash": "~/.bashrc", "zsh": "~/.zshrc"}
"""Shell -> the file that loads the completion from now on; fish finds it by itself."""


def install_completion(*, shell: Literal["bash", "zsh", "fish"] | None = None) -> None:
    """Write a completion script under your home folder, and have your shell load it.

    Examples:

        trainstep --install-completion

        trainstep --install-completion --shell zsh

    Parameters
    ----------
    shell
        For which shell; by default the one that you are in.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    from trainstep.cli.app import build_app

    try:
        chosen = shell or detect_shell()
    except ShellDetectionError:
        raise ValueError(
            "shell: it cannot be told which one this is; name it: trainstep --install-completion --shell bash"
        ) from None
    if chosen == "powershell":
        raise ValueError("shell: PowerShell has no completion here; name another: --shell bash, zsh or fish")
    script = build_app([]).install_completion(shell=chosen)
    print(f"completion for {chosen}: {script}")
    loads = f"{_START_UP[chosen]} loads it: " if chosen in _START_UP else ""
    print(f"{loads}open a new shell, then type: trainstep <Tab>")
