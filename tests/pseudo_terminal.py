"""Run a command on a pseudo-terminal of a given width, as a shell would start it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    command: Sequence[str | Path], width: int, *, folder: Path | None = None, with_errors: bool = False
) -> tuple[int, str]:
    """The exit code of `python COMMAND` and its standard output on the terminal, without colours.

    `with_errors`: standard error goes to the terminal too.
    """
    reading_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal if with_errors else subprocess.DEVNULL,
        cwd=folder,
        env={**environment, "TERM": "xterm-256color"},
    )
    os.close(terminal)
    parts = []
    while True:
        try:
            part = os.read(reading_end, 65536)
        except OSError:  # Linux raises it once no process holds the other end
            break
        if not part:
            break
        parts.append(part)
    os.close(reading_end)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return child.wait(), COLOURS.sub("", text)
