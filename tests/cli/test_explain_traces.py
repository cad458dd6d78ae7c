"""`trainstep explain trace.json.gz`: a trace alone or beside records, JSON, the page, and what is refused."""

import json
from pathlib import Path

import pytest

from run_records import a_run
from trace_maker import EAGER
from trainstep.cli import app
from trainstep.records.store import Store


def test_a_trace_beside_records_is_explained_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Store(tmp_path / "train.jsonl").append(a_run())
    page = tmp_path / "why.html"
    assert app.run(["explain", str(EAGER), str(tmp_path / "train.jsonl"), "--json", "--page", str(page)]) == 0
    out = json.loads(capsys.readouterr().out)
    assert len({row["cell"] for row in out["rows"]}) == 2
    for cell in {row["cell"] for row in out["rows"]}:
        rows = [row for row in out["rows"] if row["cell"] == cell]
        [measured_s] = [row["time_s"] for row in rows if row["kind"] == "measured"]
        assert sum(row["time_s"] for row in rows if row["kind"] != "measured") == pytest.approx(measured_s)
    assert EAGER.name in page.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [str(EAGER), "--prove"],
            "prove: a trace does not say how its step is built, so nothing can be measured; leave",
        ),
        (["train.py"], "train.py is a script: `trainstep run train.py` makes a record that explain reads"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert app.run(["explain", *words]) == 2
    assert sentence in capsys.readouterr().err
