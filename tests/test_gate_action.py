"""The GitHub Action of the gate: its file names what its script reads, and the script passes the verdict on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sources import ROOT

FOLDER = ROOT / ".github" / "actions" / "gate"
GUIDE = ROOT / "docs" / "guide" / "gate.md"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="an sdist carries no .github")

FAKE = """
import json, pathlib, sys
words = sys.argv[1:]
pathlib.Path("words.json").write_text(json.dumps(words))
code = int(pathlib.Path("code").read_text())
if code == 2:
    print("trainstep: head: no such revision", file=sys.stderr)
    sys.exit(2)
verdict = {0: "pass", 1: "fail", 3: "cannot tell"}[code]
pathlib.Path(words[words.index("--comment") + 1]).write_text(f"### Performance gate: {verdict}")
cells = [{"verdict": "pass", "ratio": 0.9}, {"verdict": verdict, "ratio": 1.03}]
print(json.dumps({"verdict": verdict, "cells": cells}))
sys.exit(code)
"""
"""A trainstep that notes its words and gives the verdict of the file `code`."""


def action() -> dict:
    return yaml.safe_load((FOLDER / "action.yml").read_text())


def step() -> dict:
    [found] = [step for step in action()["runs"]["steps"] if step.get("id") == "gate"]
    return found


def run_script(folder: Path, code: int, **given: str) -> subprocess.CompletedProcess[str]:
    (folder / "fake.py").write_text(FAKE)
    (folder / "code").write_text(str(code))
    (folder / "trainstep").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S fake.py "$@"\n')
    (folder / "gh").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > gh_words\n')
    for name in ("trainstep", "gh"):
        (folder / name).chmod(0o755)
    environ = dict.fromkeys(step()["env"], "")
    environ |= {"GATE_COMMAND": "pytest tests\n", "GATE_BASE": "b", "GATE_HEAD": "h", "GATE_FAIL_IF_SLOWER": "2"}
    environ |= {"GATE_BUDGET_MINUTES": "3", "GATE_CANNOT_TELL": "pass", "TRAINSTEP": "./trainstep", **given}
    places = {"GITHUB_STEP_SUMMARY": "summary", "GITHUB_OUTPUT": "output", "GITHUB_REPOSITORY": "o/r"}
    return subprocess.run(
        ["bash", FOLDER / "gate.sh"],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **places, **environ},
        capture_output=True,
        text=True,
    )


def test_the_script_reads_what_the_action_gives_it_and_nothing_else():
    script = (FOLDER / "gate.sh").read_text()
    read = set(re.findall(r"\$\{?(GATE_\w+)", script))
    assert read == {name for name in step()["env"] if name.startswith("GATE_")}
    inputs = action()["inputs"]
    used = set(re.findall(r"inputs\.([\w-]+)", (FOLDER / "action.yml").read_text()))
    assert used == inputs.keys()
    assert all(entry["description"] for entry in inputs.values())


def test_no_input_becomes_a_part_of_a_script():
    """What a pull request names (a branch, a title) must not be able to run in the job."""
    assert not any("${{" in step.get("run", "") for step in action()["runs"]["steps"])


def test_the_workflow_of_the_guide_gives_inputs_that_exist():
    [block] = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    steps = yaml.safe_load(block)["jobs"]["gate"]["steps"]
    [used] = [step for step in steps if "actions/gate" in step.get("uses", "")]
    assert used["with"].keys() <= action()["inputs"].keys()
    assert {name for name, entry in action()["inputs"].items() if entry.get("required")} <= used["with"].keys()


@pytest.mark.parametrize(
    ("code", "given", "expected", "word"),
    [
        (0, {}, 0, ""),
        (1, {}, 1, "::error::"),
        (3, {}, 0, "::warning::"),
        (3, {"GATE_CANNOT_TELL": "fail"}, 3, "::error::"),
        (2, {}, 2, "::error::"),
    ],
)
def test_the_verdict_is_passed_on(tmp_path: Path, code: int, given: dict, expected: int, word: str):
    done = run_script(tmp_path, code, **given)
    assert done.returncode == expected
    assert ("::" in done.stdout) == bool(word)
    assert word in done.stdout
    if code != 2:
        assert "Performance gate" in (tmp_path / "summary").read_text()
        verdict = {0: "pass", 1: "fail", 3: "cannot tell"}[code]
        assert (tmp_path / "output").read_text() == f"verdict={verdict}\nratio=1.03\n"


def test_the_command_takes_the_option_that_the_gate_adds(tmp_path: Path):
    run_script(tmp_path, 0, GATE_MEASURE="benchmark", GATE_SETUP="make it; so")
    words = json.loads((tmp_path / "words.json").read_text())
    assert words[:3] == ["gate", "b", "h"]
    assert words[words.index("--setup") + 1] == "make it; so"
    command = words[words.index("--") + 1 :]
    assert command[:2] == ["bash", "-c"]
    done = subprocess.run(
        [*command[:2], command[2].replace("pytest", "echo"), *command[3:], "--benchmark-json=x"], capture_output=True
    )
    assert done.stdout == b"tests --benchmark-json=x\n"


def test_one_comment_is_posted_where_there_is_a_pull_request(tmp_path: Path):
    run_script(tmp_path, 0, GATE_COMMENT="true")
    assert not (tmp_path / "gh_words").exists()
    run_script(tmp_path, 0, GATE_COMMENT="true", GATE_PULL_REQUEST="12")
    words = (tmp_path / "gh_words").read_text().split()
    assert words[:5] == ["pr", "comment", "12", "--repo", "o/r"]
    assert "--edit-last" in words
