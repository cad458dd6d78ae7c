"""Attacks on `trainstep memory --from`: hostile pickles. None of their code runs, and none exhausts the machine.

The cases are our snapshots with a part replaced, random streams of opcodes, pickles that call dangerous functions, and files
beside the snapshot with the names of modules.
"""

import gzip
import pickle
import pickletools
import random
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attacks.attack import Outcome
from attacks.damage import BYTES, TEXTS, json_value
from attacks.reader import Readers, judged
from trace_maker import FIXTURES

Draw = random.Random

_KINDS = ("bytes", "values", "values", "opcodes", "opcodes", "call", "call", "bomb")
_RAN = "ran"
"""A file that only code of the attack creates."""
_MODULES = (
    "pickle",
    "random",
    "types",
    "profile",
    "json",
    "io",
    "gzip",
    "resource",
    "subprocess",
    "struct",
    "copyreg",
    "torch",
)
_CALLS = (
    ("posix", "system", f"touch {_RAN}"),
    ("os", "mkdir", _RAN),
    ("builtins", "eval", f"open('{_RAN}', 'w')"),
    ("builtins", "exec", f"open('{_RAN}', 'w')"),
    ("builtins", "__import__", _RAN),
    ("subprocess", "getoutput", f"touch {_RAN}"),
    ("pathlib", "Path", _RAN),
    ("runpy", "run_path", "planted.py"),
    ("importlib", "import_module", "planted"),
    ("torch", "load", "other.pickle"),
    ("pickle", "loads", "x"),
    ("builtins.str", "format", "x"),
    ("", "", ""),
    ("a\x1b[31m", "b\x07c", "x"),
)
_PLANTED = f"open({_RAN!r}, 'w').close()\n"


class Pickles:
    """Hostile pickles: 120 cases at full size."""

    name = "pickles"
    full = 120

    def __init__(self, readers: Readers, *, bombs: bool = True) -> None:
        """`bombs`: include files that take gigabytes without limits; otherwise their cases are left out."""
        self._readers = readers
        self._bombs = bombs
        self._real = gzip.decompress((FIXTURES / "snapshot_tiny.pickle.gz").read_bytes())

    def afterwards(self) -> Iterable[Outcome]:
        return self._readers.left()

    def attack(self, draw: Draw, folder: Path) -> Outcome:
        kind = draw.choice(_KINDS)
        if kind == "bomb" and not self._bombs:
            return Outcome(case="a bomb, left out")
        content, what = self._pickle(draw, kind)
        if draw.random() < 0.3:
            content, what = gzip.compress(content, compresslevel=1), f"{what}, zipped"
        file = folder / "s.pickle"
        file.write_bytes(content)
        (folder / "planted.py").write_text(_PLANTED)
        if draw.random() < 0.3:
            module = draw.choice(_MODULES)
            (folder / f"{module}.py").write_text(_PLANTED)
            what += f", {module}.py beside it"
        end = self._readers.run(["memory", "--from", file.name, *draw.choice(([], ["--json"]))], folder)
        lost = "the file was changed" if file.read_bytes() != content else ""
        other = "code of the file, or of one beside it, ran" if (folder / _RAN).exists() else ""
        return judged(what, [end], lost=lost, other=other)

    def _pickle(self, draw: Draw, kind: str) -> tuple[bytes, str]:
        if kind == "bytes":
            return draw.choice(BYTES[:3])(draw, self._real)
        if kind == "values":
            return _changed(draw, self._real)
        if kind == "opcodes":
            return _random_opcodes(draw)
        return _call(draw, self._real) if kind == "call" else _bomb(draw)


def _changed(draw: Draw, real: bytes) -> tuple[bytes, str]:
    """A snapshot with changed values."""
    document = _shorter(draw, pickle.loads(real))
    changes = []
    for _ in range(draw.choice((1, 1, 3, 10))):
        part = document if draw.random() < 0.2 else document[draw.choice(list(document))]
        changes.append(json_value(draw, part) if isinstance(part, list | dict) else "no part")
    return pickle.dumps(document, protocol=draw.choice((0, 2, 4, 5))), "; ".join(changes)[:400]


def _shorter(draw: Draw, document: dict[str, Any]) -> dict[str, Any]:
    """The same document with fewer events."""
    kept = draw.choice((3, 100, 2000))
    return {**document, "device_traces": [events[:kept] for events in document["device_traces"]]}


def _random_opcodes(draw: Draw) -> tuple[bytes, str]:
    """Opcodes with arguments of the right kind, mostly on a stack that is not empty."""
    start = b"\x80" + bytes([draw.choice((0, 2, 4, 5))]) if draw.random() < 0.7 else b""
    stream = [start, *(b"N" for _ in range(draw.randrange(4))), *(b"(" for _ in range(draw.randrange(3)))]
    names = []
    for _ in range(draw.choice((5, 20, 100, 1000))):
        opcode = draw.choice(pickletools.opcodes)
        names.append(opcode.name)
        stream.append(opcode.code.encode("latin-1") + _argument(draw, opcode))
    return b"".join([*stream, b"."]), f"opcodes {' '.join(names[:12])}..."


def _argument(draw: Draw, opcode: pickletools.OpcodeInfo) -> bytes:
    """Bytes that may be the argument of an opcode."""
    if opcode.arg is None:
        return b""
    text = draw.choice((*TEXTS, "os", "system")).encode("utf-8", errors="surrogatepass")
    size = opcode.arg.n
    if opcode.arg.name == "stringnl_noescape_pair":
        return draw.choice((b"os\nsystem\n", b"builtins\neval\n", text.replace(b"\n", b"") + b"\nx\n"))
    if size == pickletools.UP_TO_NEWLINE:
        return draw.choice((b"0", b"-1", b"1", b"9" * 30, b"'a'", b"x", text.replace(b"\n", b""))) + b"\n"
    if size >= 0:
        return draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size), b"\1" + bytes(size - 1)))
    width = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }[size]
    claimed = draw.choice((len(text), len(text), len(text), 0, 2 ** (8 * width) - 1, 2 ** (8 * width - 1)))
    return (claimed % 2 ** (8 * width)).to_bytes(width, "little") + text


def _call(draw: Draw, real: bytes) -> tuple[bytes, str]:
    """A call by one of the opcodes that call, alone or before a snapshot."""
    module, name, argument = draw.choice(_CALLS)
    named = f"c{module}\n{name}\n".encode()
    short = b"".join(b"\x8c" + bytes([len(word.encode())]) + word.encode() for word in (module, name))
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    variants = (
        named + b"(" + text + b"tR",
        named + text + b"\x85R",
        short + b"\x93" + text + b"\x85R",
        f"(X{''}".encode() + struct.pack("<I", len(argument)) + argument.encode() + f"i{module}\n{name}\n".encode(),
        b"(" + named + text + b"o",
        named + text + b"\x85\x81",
        named + b")\x81}" + text + b"Nsb",
        b"\x82\x01" + text + b"\x85R",
        text + b"Q",
        f"P{module}.{name}\n".encode(),
    )
    at = draw.randrange(len(variants))
    content = b"\x80\x04" + variants[at]
    if draw.random() < 0.5:  # the result is popped, and a snapshot follows
        content = content + b"0" + real[2:]
    else:
        content += b"."
    return content, f"a call of {module!a}.{name!a} by variant {at}"


def _bomb(draw: Draw) -> tuple[bytes, str]:
    """A pickle that takes far more memory or time than its size suggests."""
    bombs = (
        (lambda: b"\x80\x04" + b"}" * 300_000_000 + b".", "300 million mappings"),
        (lambda: b"\x80\x04]" + b"2" * 100_000_000 + b".", "a list a hundred million times"),
        (lambda: b"\x80\x04}r\xff\xff\xff\xff.", "a memo of 64 GB"),
        (lambda: b"\x80\x04})" + b"\x85" * 2_000_000 + b"Ns.", "a tuple too deep to hash"),
        (lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.", "bytes of a terabyte"),
        (lambda: b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"x.", "a number of 2 GB"),
        (lambda: b"I" + b"9" * 10_000_000 + b"\n.", "a number of ten million digits"),
        (lambda: b"\x80\x04(" + b"K\x01" * 150_000_000 + b"l.", "150 million numbers"),
        (_doubling, "a list that names itself twice, sixty deep"),
        (lambda: _many_events(4000), "16 million events that are one"),
    )
    make, what = draw.choice(bombs)
    return make(), what


def _doubling() -> bytes:
    nested: Any = "a"
    for _ in range(60):
        nested = [nested, nested]
    return pickle.dumps({"segments": [], "device_traces": nested, "external_annotations": nested})


def _many_events(count: int) -> bytes:
    event = {"action": "alloc", "addr": 512, "size": 4, "stream": 0, "time_us": 1, "frames": []}
    return pickle.dumps({"segments": [], "device_traces": [[event] * count] * count})
