"""Some of the attacks on command lines and readers of files; `python tests/attacks/full.py` runs all of them."""

import sys
from pathlib import Path

import pytest

from attacks.attack import check
from attacks.command_lines import VERBS, CommandLines, options_of
from attacks.pickles import Pickles
from attacks.reader import End, Readers, judged, last_frame
from attacks.record_files import RecordFiles
from attacks.sweep_files import SweepFiles
from attacks.trace_files import TraceFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


def test_command_lines_are_run_or_refused(readers: Readers):
    check(CommandLines(readers), 20)


def test_damaged_sweep_files_are_run_or_refused(readers: Readers):
    check(SweepFiles(readers), 20)


def test_damaged_records_are_read_or_refused(readers: Readers):
    check(RecordFiles(readers, readers_a_file=2), 10)


@pytest.mark.slow
def test_damaged_traces_are_read_or_refused(readers: Readers):
    check(TraceFiles(readers, bombs=False), 12)


@pytest.mark.slow
def test_hostile_pickles_are_read_or_refused(readers: Readers):
    check(Pickles(readers, bombs=False), 12)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_options_to_attack(verb: str):
    own = {"report": "--format", "compare": "--quantity", "doctor": "--measure", "plan": "--gpu"}
    assert own.get(verb, "--out") in options_of(verb)


def test_each_breach_of_a_reader_is_found(readers: Readers, tmp_path: Path):
    """A refusal is no breach; a traceback, an unexpected exit code, an escape code and a hang are."""
    refused = readers.run(["report", "nowhere.jsonl"], tmp_path)
    assert (refused.code, judged("", [refused]).breaches) == (2, [])
    frame = '  File "/a/trainstep/cli/app.py", line 5, in run\n  File "/b/json/decoder.py", line 9, in decode\n'
    ends = {
        "traceback": End(code=1, out=b"", err=f"Traceback (most recent call last):\n{frame}KeyError: 1\n", **_QUICK),
        "other": End(code=0, out=b"\x1b[31m", err="", **_QUICK),
        "memory": End(code=0, out=b"", err="", seconds=1.0, peak_bytes=10**10, timed_out=False),
        "time": End(code=-9, out=b"", err="", seconds=71.0, peak_bytes=0, timed_out=True),
    }
    assert {name: judged("", [end]).breaches for name, end in ends.items()} == {name: [name] for name in ends}
    assert judged("", [End(code=-11, out=b"", err="", **_QUICK)]).breaches == ["traceback"]
    assert judged("", [End(code=2, out=b"", err="no sentence\n", **_QUICK)]).breaches == ["other"]
    assert last_frame(ends["traceback"].err) == "cli/app.py:5 run"


_QUICK = {"seconds": 1.0, "peak_bytes": 0, "timed_out": False}
