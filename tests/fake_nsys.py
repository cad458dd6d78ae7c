"""A stand-in for nsys on PATH, which logs its calls and behaves as the test asks."""

import json
import sys
from pathlib import Path

import pytest

_SCRIPT = """#!{python}
import json, pathlib, shutil, subprocess, sys, time
verb, *options = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
[output] = [option.partition("=")[2] for option in options if option.startswith("--output=")]
if {does!r} == "hangs":
    time.sleep(600)
if {does!r} == "runs" and verb == "profile":
    print("Collecting data...", flush=True)
    code = subprocess.call(options[next(i for i, option in enumerate(options) if not option.startswith("-")):])
    print("Generated nothing.")
    sys.exit(code)
if {does!r} == verb + " fails":
    print("The target application could not be attached to.")
    sys.exit(5)
if {does!r} != verb + " leaves nothing":
    if verb == "profile":
        pathlib.Path(output + ".nsys-rep").write_text("a report")
    else:
        shutil.copy({export!r}, output)
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *, does: str = "", export: Path | None = None) -> Path:
    """Make the stand-in the only program on PATH; the file of its calls. `does`: hangs, runs (the recorded process), `VERB fails`,
    `VERB leaves nothing`; otherwise it writes a report, and a copy of `export`.
    """
    folder.mkdir()
    log = folder / "calls.jsonl"
    script = folder / "nsys"
    script.write_text(_SCRIPT.format(python=sys.executable, log=str(log), does=does, export=str(export)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return log


def calls(log: Path) -> list[list[str]]:
    """The words of each call."""
    return [json.loads(line) for line in log.read_text().splitlines()]
