"""Randomly damaged files of records are read or refused in one sentence, and appending loses no record that can be read.

PYTHONPATH=src:tests python tests/records/test_damaged_records.py 2500     # more seeds
"""

import gzip
import hashlib
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from record_maker import a_record, seconds
from trainstep.records.record import Fact, Failure
from trainstep.records.store import Store

SEEDS = 40
ODD = [
    b"",
    b"5",
    b"null",
    b"[]",
    b"{}",
    b'{"a":5}',
    b'{"a":[1]}',
    b"\0" * 50,
    b"[" * 3000,
    b"\xff\xfe",
    b'{"a":' * 300,
    b'"',
]


def fill(store: Store) -> None:
    columns = {"time": [i / 7 for i in range(9000)], "name": [f"kernel {i % 90}" for i in range(9000)]}
    store.append(
        a_record(key="a", facts={"loss": Fact(value=2.5), "word": Fact(value="x")}, prediction={"step_s": 0.1})
    )
    store.append(a_record(key="b", tables={"kernels": columns, "small": {"a": [1, None, "x"]}}))
    store.append(a_record(key="c", failure=Failure(kind="crash", phase="build", message="no", last_lines=("a", "b"))))
    store.append(a_record(key="d", config={"nested": {"list": [1, [2.5]]}}, samples={"step": seconds([1, 2], (3,))}))


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A copy of the data with bytes cut off, changed, inserted, doubled or removed, lines shuffled, or a value replaced."""
    start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    kind = chance.randrange(8)
    if kind == 0:
        return data[:end]
    if kind == 1:
        return data[:end] + bytes([chance.randrange(256)]) + data[end + 1 :]
    if kind == 2:
        return data[:end] + chance.choice(ODD) + data[end:]
    if kind == 3:
        return data[:start] + data[start:end] + data[start:]
    if kind == 4:
        return data[:start] + data[min(end, start + chance.randrange(1, 40)) :]
    if kind == 5:
        lines = data.split(b"\n")
        chance.shuffle(lines)
        return b"\n".join(lines)
    if kind == 6:
        return data.rstrip(b"\n") + chance.choice([b"", b"\0" * 9, b" ", b"\n\n", b"\r\n"])
    places = [place for place, byte in enumerate(data) if byte in b":,["]
    place = chance.choice(places or [0]) + 1
    return data[:place] + chance.choice([*ODD, b"1e999", b"-1", b"true", b'"text"']) + data[place + 1 :]


def damage(folder: Path, chance: random.Random) -> None:
    """Damage the file of records or its table; a damaged table keeps its name, or gets the name that its new content hashes to."""
    records, [table] = folder / "r.jsonl", [*(folder / "r.tables").iterdir()]
    if chance.randrange(3):
        records.write_bytes(damaged(records.read_bytes(), chance))
    elif chance.randrange(2):
        table.write_bytes(damaged(table.read_bytes(), chance))
    else:
        text = chance.choice([damaged(gzip.decompress(table.read_bytes()), chance), *ODD])
        name = hashlib.sha256(text).hexdigest()[:16] + ".json.gz"
        (folder / "r.tables" / name).write_bytes(gzip.compress(text))
        records.write_bytes(records.read_bytes().replace(table.name.encode(), name.encode()))


def check(pristine: Path, seed: int) -> str:
    """Damage a copy and read it; return 'read' or 'refused'."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(pristine, Path(parent) / "copy"))
        damage(folder, random.Random(seed))
        store, before = Store(folder / "r.jsonl"), (folder / "r.jsonl").read_bytes()
        try:
            records = store.finished()
        except ValueError:
            with pytest.raises(ValueError, match=r"r\.jsonl: "), store.locked():
                pass
            assert store.path.read_bytes() == before, seed
            return "refused"
        with store.locked():
            store.append(a_record(key="new"))
        assert [record.key for record in store.read()] == [*(record.key for record in records), "new"], seed
        assert store.read()[:-1] == records, seed
        return "read"


def test_damaged_files_are_read_or_refused_and_lose_no_record(tmp_path: Path):
    fill(Store(tmp_path / "r.jsonl"))
    outcomes = Counter(check(tmp_path, seed) for seed in range(SEEDS))
    assert min(outcomes["read"], outcomes["refused"]) > SEEDS / 10, "both outcomes occur"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        fill(Store(Path(place) / "r.jsonl"))
        print(Counter(check(Path(place), seed) for seed in range(int(sys.argv[1]))))
