"""Damage to the folder of a checkpoint: flipped bits at random places, torn, empty, missing and swapped files.

`damages(folder, bits)` lists each damage as a name and a function that applies it to a folder.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

Damage = Callable[[Path], None]


def damages(folder: Path, bits: int, seed: int = 0) -> Iterator[tuple[str, Damage]]:
    """`bits` flipped bits, spread evenly over the files, and each file torn, empty, missing, longer, a folder, or swapped."""
    numbers = random.Random(seed)
    names = sorted(path.name for path in folder.iterdir())
    for number in range(bits):
        name = names[number % len(names)]
        bit = numbers.randrange(8 * (folder / name).stat().st_size)
        yield f"{name}: bit {bit} flipped", partial(_flip, name=name, bit=bit)
    for name in names:
        size = (folder / name).stat().st_size
        kept = numbers.randrange(1, size)
        yield f"{name}: torn after {kept} of {size} bytes", partial(_cut, name=name, kept=kept)
        yield f"{name}: lacks its last byte", partial(_cut, name=name, kept=size - 1)
        yield f"{name}: empty", partial(_cut, name=name, kept=0)
        yield f"{name}: missing", partial(_remove, name=name)
        yield f"{name}: a byte too long", partial(_lengthen, name=name)
        yield f"{name}: a folder", partial(_become_folder, name=name)
        other = names[(names.index(name) + 1) % len(names)]
        yield f"{name}: swapped with {other}", partial(_swap, name=name, other=other)


def damaged_copy(folder: Path, to: Path, damage: Damage) -> Path:
    """Make `to` a new copy of `folder`, and damage it."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    damage(to)
    return to


def _flip(folder: Path, name: str, bit: int) -> None:
    content = bytearray((folder / name).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)


def _cut(folder: Path, name: str, kept: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:kept])


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _lengthen(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"\0")


def _become_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def _swap(folder: Path, name: str, other: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes((folder / other).read_bytes())
    (folder / other).write_bytes(content)
