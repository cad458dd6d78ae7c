"""The published tables: every sweep that mirrors one has its records, and answers and tables in Markdown match the records."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from sources import ROOT, load_script
from trainstep.config.grid import Cell, expand_all
from trainstep.config.parsing import CONFIGS, fields_of
from trainstep.config.sweep import load_sweep
from trainstep.records.record import Failure, Record, record_to_plain
from trainstep.records.store import Store

SWEEPS, RECORDS = ROOT / "sweeps", ROOT / "results" / "h200"
README = RECORDS / "README.md"
pytestmark = pytest.mark.skipif(not RECORDS.exists(), reason="a source distribution holds no records")

_NO_PUBLISHED_TABLE = {
    "attention_peers": "attention_hopper.toml has its sizes, with flash-attn-4, which that machine did not have",
    "attention_widths": "attention_hopper_widths.toml has its widths beside every implementation that runs them",
    "captured": "a table of our own: the step as one graph",
    "captured_ranks": "a table of our own: strategies as one graph, measured in part",
    "ops": "a table of our own: ops beside attention against other packages, not measured yet",
    "copy_ceiling": "what the ops are compared with, not measured yet",
    "memory_ranks": "a table of our own: each rank's memory beside the formula",
}
"""Sweeps that mirror no published table, or whose table another sweep has."""

_NOT_YET_WHOLE: Mapping[str, str] = {}
"""Sweeps whose record in results/h200 lacks cells: how many it has, and why. A complete sweep must leave this list."""

_EXTRA_MEASUREMENTS = {"graph_replay"}
"""Fields that add a measurement after the timed steps: a cell without the field is answered by one with it."""
_PROMISED = sorted({path.stem for path in SWEEPS.glob("*.toml")} - _NO_PUBLISHED_TABLE.keys())
_FILES = sorted(path.stem for path in RECORDS.glob("*.jsonl"))

_BESIDE_THE_GRID = {"attention_hopper": "ceiling"}
"""Records of another workload in a sweep's file, with which its cells are compared."""
_CELL_FAILURES = ("out_of_memory", "timeout", "unsupported")
"""Failures that answer a cell. A crash or a failed import is no result, and its cell is measured again."""
_PICTURES = ("end_to_end", "profile", "memory", "flash", "ddp_xl", "numerics")
_PAUSE = timedelta(minutes=10)
"""A longer pause between two cells may mean another machine of the same kind, which records do not tell apart."""
_WHERE = ("gpu", "gpu_count", "gpu_memory_bytes", "cpu", "cores", "memory_bytes", "driver", "torch", "triton", "python")
"""Fields of the environment that one file of records has one value of, if its cells are of one machine."""


class Described(NamedTuple):
    """A file's row in results/h200/README.md."""

    cells: str
    gpus: str
    commit: str
    command: str


@cache
def defaults(workload: str) -> Mapping[str, Any]:
    return {name: field.default for name, field in fields_of(CONFIGS[workload]).items()}


def has_cell(config: Mapping[str, Any], cell: Cell) -> bool:
    """Whether a record of this config is one of the cell; fields that its code did not have yet are at their defaults."""
    known = {**defaults(cell.workload), **config}
    return all(known[name] == value for name, value in cell.config.items() if name not in _EXTRA_MEASUREMENTS)


@cache
def records_of(path: Path) -> Sequence[Record]:
    return list(Store(path).latest().values())


@cache
def grid(sweep: str) -> Sequence[Cell]:
    return expand_all(load_sweep(SWEEPS / f"{sweep}.toml").grids({}), {"device": "cuda"})


@cache
def rows_of_readme() -> Mapping[str, Described]:
    rows = (line.strip("| ").split(" | ") for line in README.read_text().splitlines())
    return {
        found[1]: Described(*row[1:])
        for row in rows
        if (found := re.match(r"\[(\w+)\.jsonl\]", row[0])) and len(row) == len(Described._fields) + 1
    }


def not_measured(record: Record) -> str | None:
    """Why a record is no result of its cell; None if it is one."""
    if record.failure:
        return None if record.failure.kind in _CELL_FAILURES else f"{record.failure.kind}: {record.failure.message}"
    steps = record.config.get("steps")
    if steps is None:
        return None if record.tables else "no table"
    most = max((len(samples.values) for samples in record.samples.values()), default=0)
    return None if most >= steps else f"{most} of {steps} steps"


def left_out(cells: Sequence[Cell], records: Sequence[Record]) -> tuple[list[Cell], list[str]]:
    """Cells of a grid that no record has, and what is odd about the records: not measured, or of no cell of the grid."""
    results, odd = [], []
    for record in records:
        config = record_to_plain(dataclasses.replace(record, samples={}, tables={}))["config"]
        reason = not_measured(record)
        if reason:
            odd.append(f"{record.key}: {reason}")
        elif any(cell.workload == record.workload and has_cell(config, cell) for cell in cells):
            results.append((record.workload, config))
        else:
            odd.append(f"{record.key}: a cell of another grid")
    missing = [
        cell for cell in cells if not any(cell.workload == name and has_cell(config, cell) for name, config in results)
    ]
    return missing, odd


@cache
def coverage(sweep: str) -> tuple[int, int]:
    """Cells of a sweep's grid that its record has, and all of them."""
    missing, _ = left_out(grid(sweep), records_of(RECORDS / f"{sweep}.jsonl"))
    return len(grid(sweep)) - len(missing), len(grid(sweep))


def undisclosed(records: Sequence[Record], row: Described) -> list[str]:
    """What records say about themselves and their row does not: failed cells, mixed code or machines, a pause."""
    found = []
    reason = row.cells.partition(":")[2]
    failed = sum(record.failure is not None for record in records)
    if failed and not re.search(rf"\b{failed}\b", reason):
        found.append(f"{failed} cells failed: say so and why behind the number of cells")
    sources = {record.environment.source: record.environment for record in records}
    for source, where in sources.items():
        named = source if where.commit is None or where.dirty else where.commit[:7]
        if named not in row.commit and not (where.dirty and re.search("`source`|working tree", row.commit)):
            found.append(f"{named} is not in the column of commits")
    if len(sources) > len(re.findall(r"\b[0-9a-f]{7}\b", row.commit)):
        found.append(f"{len(sources)} versions of the code: name each commit")
    apart = {tuple(getattr(record.environment, name) for name in _WHERE) for record in records}
    if len(apart) > 1 and not re.search("another|one of two", row.gpus):
        found.append("cells of unlike machines: say so in the column of GPUs")
    if pauses(records) and not re.search("later|over", f"{row.cells} {row.gpus} {row.commit}"):
        found.append(f"a pause before {', '.join(pauses(records))}: say which cells are later ones")
    return found


def pauses(records: Sequence[Record]) -> list[str]:
    """When a cell began long after every earlier one had ended."""
    found, end = [], None
    for record in sorted(records, key=lambda record: record.started_at):
        start = datetime.fromisoformat(record.started_at)
        if end and start - end > _PAUSE:
            found.append(record.started_at)
        end = max(end or start, start + timedelta(seconds=record.duration_s))
    return found


@pytest.mark.parametrize("sweep", _PROMISED)
def test_a_sweep_has_all_its_cells_or_a_reason(sweep: str):
    done, cells = coverage(sweep)
    if done == cells:
        assert sweep not in _NOT_YET_WHOLE, "its record is complete now: remove it from the list"
    else:
        assert _NOT_YET_WHOLE.get(sweep, "").startswith(f"{done} of {cells} cells: "), (
            f"{done} of {cells} cells in results/h200/{sweep}.jsonl: measure the others, or say so in _NOT_YET_WHOLE"
        )


@pytest.mark.parametrize("sweep", _PROMISED)
def test_every_record_of_a_sweep_is_a_result_of_one_of_its_cells(sweep: str):
    records = [r for r in records_of(RECORDS / f"{sweep}.jsonl") if r.workload != _BESIDE_THE_GRID.get(sweep)]
    assert not left_out(grid(sweep), records)[1]
    assert len(records) == len(grid(sweep)), "a cell has one record"


@pytest.mark.parametrize("sweep", _PROMISED)
def test_the_readme_states_how_many_cells_are_measured(sweep: str):
    done, cells = coverage(sweep)
    if sweep in rows_of_readme():
        assert re.match(rf"{done} of {cells}\b", rows_of_readme()[sweep].cells)
    else:
        assert not done
        assert not (RECORDS / f"{sweep}.jsonl").exists()


@pytest.mark.parametrize("name", _FILES)
def test_a_row_of_the_readme_says_what_its_records_are(name: str):
    row = rows_of_readme()[name]
    assert not undisclosed(records_of(RECORDS / f"{name}.jsonl"), row)
    counted = re.match(r"(\d+)( pairs)?( of (\d+))?(.?)", row.cells)
    assert counted, "the number of cells comes first"
    lines = [r for r in Store(RECORDS / f"{name}.jsonl").read() if r.workload != _BESIDE_THE_GRID.get(name)]
    assert int(counted[1]) * (2 if counted[2] else 1) == len(lines)
    if counted[4] is not None and int(counted[1]) < int(counted[4]):
        assert ": " in row.cells or " that were begun, " in row.cells, "fewer cells than all have a reason"


@pytest.mark.parametrize("name", _PICTURES)
def test_a_page_has_its_picture(name: str):
    assert (RECORDS / f"{name}.png").exists()


def failed_as(kind: str) -> Callable[[Record], Record]:
    failure = Failure(kind=kind, phase="step", message="it did not run.")
    return lambda record: dataclasses.replace(record, failure=failure, samples={}, tables={})


def with_half_the_steps(record: Record) -> Record:
    halves = {name: dataclasses.replace(s, values=s.values[: len(s.values) // 2]) for name, s in record.samples.items()}
    return dataclasses.replace(record, samples=halves)


def with_config(**values: Any) -> Callable[[Record], Record]:
    return lambda record: dataclasses.replace(record, config={**record.config, **values})


def from_elsewhere(**values: Any) -> Callable[[Record], Record]:
    return lambda record: dataclasses.replace(record, environment=dataclasses.replace(record.environment, **values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (failed_as("crash"), "crash: it did not run"),
        (failed_as("import_error"), "import_error: "),
        (failed_as("divergence"), "divergence: "),
        (with_half_the_steps, "5 of 10 steps"),
        (with_config(context=512), "a cell of another grid"),
        (with_config(steps=5, warmups=1), "a cell of another grid"),
        (with_config(device="cpu"), "a cell of another grid"),
    ],
)
def test_a_record_that_is_no_result_leaves_its_cell_out(change: Callable[[Record], Record], message: str):
    first, *others = records_of(RECORDS / "compile.jsonl")
    assert left_out(grid("compile"), [first, *others]) == ([], [])
    missing, odd = left_out(grid("compile"), [change(first), *others])
    assert [has_cell(record_to_plain(first)["config"], cell) for cell in missing] == [True]
    assert [text.startswith(f"{first.key}: {message}") for text in odd] == [True]


def test_a_cell_without_a_record_is_left_out():
    first, *others = records_of(RECORDS / "compile.jsonl")
    missing, odd = left_out(grid("compile"), others)
    assert [has_cell(record_to_plain(first)["config"], cell) for cell in missing] == [True]
    assert not odd
    assert left_out(grid("compile"), [failed_as("out_of_memory")(first), *others]) == ([], [])


def test_a_table_that_is_missing_leaves_its_cell_out():
    first, *others = records_of(RECORDS / "memory.jsonl")
    assert left_out(grid("memory"), [dataclasses.replace(first, tables={}), *others])[1] == [f"{first.key}: no table"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (failed_as("out_of_memory"), "1 cells failed"),
        (failed_as("timeout"), "1 cells failed"),
        (from_elsewhere(source="0123456789abcdef", commit="fedcba98"), "fedcba9 is not in the column of commits"),
        (from_elsewhere(source="0123456789abcdef"), "2 versions of the code"),
        (from_elsewhere(source="0123456789abcdef", dirty=True), "0123456789abcdef is not in the column of commits"),
        (from_elsewhere(gpu="NVIDIA H100"), "cells of unlike machines"),
        (from_elsewhere(gpu_count=2, cores=32), "cells of unlike machines"),
        (from_elsewhere(driver="570.1"), "cells of unlike machines"),
        (lambda record: dataclasses.replace(record, started_at="2026-11-22T19:00:00+00:00"), "a pause before"),
    ],
)
def test_what_a_row_does_not_say_is_found(change: Callable[[Record], Record], message: str):
    row = rows_of_readme()["memory"]
    first, *others = records_of(RECORDS / "memory.jsonl")
    assert not undisclosed([first, *others], row)
    found = undisclosed([change(first), *others], row)
    assert [text for text in found if text.startswith(message)]


def test_the_lists_name_existing_sweeps():
    sweeps = {path.stem for path in SWEEPS.glob("*.toml")}
    assert not (_NO_PUBLISHED_TABLE.keys() | _NOT_YET_WHOLE.keys()) - sweeps
    assert not _NO_PUBLISHED_TABLE.keys() & _NOT_YET_WHOLE.keys()


def test_a_record_is_matched_to_a_cell_by_its_config():
    (cell,) = expand_all([{"model": ["small"], "context": [128], "attention": ["plain"]}], {"device": "cuda"})
    older = {name: value for name, value in cell.config.items() if name != "recompute"}
    assert has_cell(cell.config, cell)
    assert has_cell(older, cell), "a record from before that field existed"
    assert not has_cell({**older, "context": 256}, cell)
    assert not has_cell({**cell.config, "recompute": "block"}, cell), "a field that is not at its default"


def test_every_file_of_records_is_in_the_readme():
    named = set(re.findall(r"\]\((\w+\.jsonl)\)", README.read_text()))
    assert named == {path.name for path in RECORDS.glob("*.jsonl")}


def test_every_picture_is_in_the_readme_and_small():
    text = README.read_text()
    for path in RECORDS.glob("*.png"):
        assert f"({path.name})" in text
        assert path.stat().st_size <= 300_000


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/answers.py as a module."""
    return load_script("answers", monkeypatch)


def test_the_answers_match_the_records(answers: ModuleType):
    assert not list(answers.stale_answers()), "run scripts/answers.py, and read whether the sentences are still right"


def test_the_tables_beside_the_records_match_the_report(answers: ModuleType):
    assert not list(answers.stale_beside_records()), "run scripts/answers.py"


def test_check_names_stale_tables(
    answers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "answers.md"
    page.write_text("Before.\n<!-- table compiled_model -->\n| old |\n<!-- end -->\nBehind.\n")
    monkeypatch.setattr(answers, "ANSWERS", page)
    monkeypatch.setattr(answers, "stale_beside_records", dict)
    monkeypatch.setattr(answers, "TABLES", {"compiled_model": answers.TABLES["compiled_model"]})
    assert answers.main(["--check"]) == 1
    assert capsys.readouterr().out == "table compiled_model of answers.md: is not what the records say\n"
    assert answers.main([]) == 0
    assert re.fullmatch(r"Before\.\n<!-- table \w+ -->\n(\|.*\|\n)+<!-- end -->\nBehind\.\n", page.read_text())
    assert answers.main(["--check"]) == 0
    monkeypatch.setattr(answers, "TABLES", {})
    with pytest.raises(ValueError, match="answers: compiled_model: in one of"):
        answers.main([])
    assert answers.main(["--force"]) == 2
    assert capsys.readouterr().err == "answers: takes --check or nothing, not --force\n"
