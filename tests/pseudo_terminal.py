"""A command on a pseudo-terminal of so many columns, as a person's shell would start it."""

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


def on_terminal(command: Sequence[str | Path], width: int, *, folder: Path | None = None) -> tuple[int, str]:
    """The exit code of `python COMMAND` and what the terminal got of its standard output, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={**environment, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when nobody holds the other end any more
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return child.wait(), COLOURS.sub("", text)
