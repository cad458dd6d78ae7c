"""The table of instruments: every name in it resolves, and a row with the files of CONTRIBUTING's recipe is a workload."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sources import ROOT
from trainstep.cli.app import _VERBS
from trainstep.config.instruments import INSTRUMENTS, Instrument, resolve, says
from trainstep.config.parsing import CONFIGS

ROWS = list(INSTRUMENTS.values())


def places_of(instrument: Instrument) -> list[str]:
    """Every module:object in a row."""
    named = (instrument.measured, instrument.answer, instrument.tables, instrument.compared_tables, instrument.summary)
    return [place for place in (*named, *instrument.charts, *instrument.sections, *instrument.last_sections) if place]


@pytest.mark.parametrize("place", sorted({place for row in ROWS for place in places_of(row)}))
def test_every_place_resolves(place: str):
    resolved = resolve(place)
    assert callable(resolved) if place.startswith("trainstep.report") else callable(resolved.prepare)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_complete(row: Instrument):
    assert row.verb in _VERBS
    assert callable(getattr(importlib.import_module(f"trainstep.cli.{row.verb}"), row.verb))
    assert CONFIGS[row.name] is row.config
    assert row.own_words <= {"peak", "ratios", "spread", "times"}
    assert row.title and row.answer  # noqa: PT018  (both are text)


def test_a_users_workload_says_none_of_the_known_words():
    assert not says("mine:WORKLOAD", "peak")
    assert says("memory", "peak")


def test_only_a_row_and_a_workloads_own_modules_name_it():
    """Nothing else in report/ or measure/harness/workload.py chooses by a workload's name."""
    switch = re.compile(r"workload (==|!=|in|not in) [\"(\[]|WORKLOAD = \"")
    sources = [*(ROOT / "src/trainstep/report").rglob("*.py"), ROOT / "src/trainstep/measure/harness/workload.py"]
    assert not [path.name for path in sources if switch.search(path.read_text())]


TOY = {
    "config/toy_wait.py": '''
"""A wait."""
from dataclasses import dataclass
from trainstep.config.fields import check_positive, described


@dataclass(frozen=True, kw_only=True)
class ToyWaitConfig:
    """A wait of so long."""

    wait_us: int = described("microseconds of each wait", 100)
    device: str = described("where it waits", "cpu", ("cpu",))
    steps: int = described("timed waits", 3)

    def __post_init__(self) -> None:
        check_positive(self, "wait_us", "steps")
''',
    "measure/toy_wait.py": '''
"""A wait, timed."""
import time
from trainstep.config.toy_wait import ToyWaitConfig
from trainstep.measure.harness.workload import Findings
from trainstep.records.facts import facts_of
from trainstep.records.record import Samples


class ToyWait:
    shares_worker = True

    def prepare(self, config, stage):
        self.config, self.times = ToyWaitConfig(**config), []
        return self

    def take(self, steps):
        for _ in range(steps):
            start = time.perf_counter()
            time.sleep(self.config.wait_us / 1e6)
            self.times.append(time.perf_counter() - start)

    def finish(self):
        return Findings(
            samples={"time": Samples(unit="s", values=tuple(self.times))},
            facts=facts_of(asked_wait_s=self.config.wait_us / 1e6),
        )


WORKLOAD = ToyWait()
''',
}
ROW = """
    Instrument(
        name="toy_wait",
        title="Toy waits",
        config=ToyWaitConfig,
        measured="trainstep.measure.toy_wait:WORKLOAD",
        verb="sweep",
        answer="trainstep.report.answers:fastest_call",
        facts=("asked_wait_s",),
        always={"facts": ("asked_wait_s",)},
    ),
"""


def add(path: Path, before: str, text: str) -> None:
    """Insert text before the only occurrence of another text."""
    source = path.read_text()
    assert source.count(before) == 1, (path, before)
    path.write_text(source.replace(before, text + before))


@pytest.mark.slow
def test_a_workload_made_by_the_recipe_is_swept_and_reported(tmp_path: Path):
    """A toy with exactly those files (its config, its file in measure/, its row, a line for its fact) is swept and reported."""
    package = tmp_path / "src/trainstep"
    shutil.copytree(ROOT / "src/trainstep", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in TOY.items():
        (package / name).write_text(text.lstrip())
    table = package / "config/instruments.py"
    add(
        table,
        "\n\n@dataclass(frozen=True, kw_only=True)\nclass Instrument:",
        "\nfrom trainstep.config.toy_wait import ToyWaitConfig",
    )
    add(table, ")\nINSTRUMENTS: Mapping", ROW.lstrip("\n"))
    fact = '    "asked_wait_s": FactKind("s", float, "the wait that was asked for"),\n'
    add(package / "records/facts.py", "}\n\n\ndef facts_of(", fact)
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("**A workload.**")[2].partition("\n**")[0]
    for named in ("`config/`", "`measure/`", "`config/instruments.py`", "`records/facts.py`"):
        assert named in recipe

    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*words: str, code: int = 0) -> str:
        """Run trainstep and return its stdout, or its stderr for a refusal."""
        command = [sys.executable, "-m", "trainstep", *words]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == code, ended.stderr
        return ended.stderr if code else ended.stdout

    (tmp_path / "toy.toml").write_text('[grid]\nworkload = "toy_wait"\nwait_us = [100, 200]\n')
    run("sweep", "toy.toml", "--out", "toy.jsonl")
    table_text = run("report", "toy.jsonl", "--format", "markdown")
    assert "a call (ms)" in table_text
    assert "asked_wait_s" in run("report", "toy.jsonl", "--format", "csv").splitlines()[0]
    run("report", "toy.jsonl", "--out", "toy.html")
    assert "<title>Toy waits on " in (tmp_path / "toy.html").read_text()
    whole, fact = (tmp_path / "toy.jsonl").read_text(), '"asked_wait_s":{"value":'
    assert f"{fact}0.0001," in whole
    (tmp_path / "broken.jsonl").write_text(whole.replace(f"{fact}0.0001,", f'{fact}"long",'))
    refusal = run("report", "broken.jsonl", code=2)
    assert "broken.jsonl: line 1: not a record: facts.asked_wait_s" in refusal
