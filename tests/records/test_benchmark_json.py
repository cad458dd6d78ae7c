"""pytest-benchmark's JSON: what is read, what is written, what is refused."""

import json
import statistics
from pathlib import Path

import pytest

from trainstep.records.benchmark_json import read_benchmarks, write_benchmarks

TIMES = {"tests/test_a.py::test_forward[8]": [0.3, 0.1, 0.2, 0.9], "wall time": [1.5]}


def test_what_is_written_is_read_again(tmp_path: Path):
    path = tmp_path / "b.json"
    write_benchmarks(path, TIMES, {"cpu": "a cpu", "cores": 2, "python": "3.13"}, "1f0c2a9")
    found = read_benchmarks(path)
    assert found.rounds == {name: tuple(values) for name, values in TIMES.items()}
    assert found.seconds == {name: pytest.approx(statistics.median(values)) for name, values in TIMES.items()}
    assert found.environment == {"cpu": "a cpu", "cores": 2, "python": "3.13"}


def test_the_statistics_are_those_of_their_names(tmp_path: Path):
    path = tmp_path / "b.json"
    write_benchmarks(path, TIMES, {})
    first = json.loads(path.read_text())["benchmarks"][0]
    values = TIMES["tests/test_a.py::test_forward[8]"]
    stats = first["stats"]
    assert first["name"] == "test_forward[8]"
    assert stats["mean"] == pytest.approx(0.375)
    assert stats["stddev"] == pytest.approx(statistics.stdev(values))
    assert (stats["min"], stats["max"], stats["rounds"], stats["total"]) == (0.1, 0.9, 4, pytest.approx(1.5))
    assert stats["iqr"] == pytest.approx(stats["q3"] - stats["q1"])
    assert stats["ops"] == pytest.approx(1 / 0.375)
    assert (stats["hd15iqr"], stats["outliers"]) == (0.3, "1;1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is not JSON of pytest-benchmark"),
        ("[]", "is not JSON of pytest-benchmark"),
        ('{"benchmarks": [1]}', "is not JSON of pytest-benchmark"),
        ('{"benchmarks": []}', "holds no benchmark"),
        ('{"benchmarks": [{"fullname": "a", "stats": {}}]}', "is not JSON of pytest-benchmark"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": 0}}]}', "a has times that are not above 0"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": NaN}}]}', "a has times that are not above 0"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": "1"}}]}', "a has times that are not above 0"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": 1, "data": [null]}}]}', "not above 0"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": 1e308}}]}', "a has a time of 1e\\+308 s"),
        (
            '{"machine_info": {"trainstep": 1}, "benchmarks": [{"fullname": "a", "stats": {"median": 1}}]}',
            "environment",
        ),
        ("[" * 100_000, "is not JSON of pytest-benchmark"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, text: str, named: str):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        read_benchmarks(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no such file"):
        read_benchmarks(tmp_path / "b.json")
    with pytest.raises(ValueError, match="a folder"):
        read_benchmarks(tmp_path)
