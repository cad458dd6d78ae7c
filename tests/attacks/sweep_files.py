"""Attacks on `trainstep sweep`: TOML with wrong types, keys, nestings and encodings. The file itself is never changed."""

import json
import random
import shlex
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from attacks.attack import Outcome
from attacks.damage import NUMBERS, TEXTS, any_place, flip_bits, lines, nested, unfolded
from attacks.reader import Readers, judged

Draw = random.Random

_DOCUMENTS: tuple[dict[str, Any], ...] = (
    {
        "title": "t",
        "description": "d",
        "timeout_s": 60,
        "grid": {"model": "tiny", "device": "cpu", "context": [32, 64]},
    },
    {
        "compare": "attention",
        "grid": {"model": ["tiny", "mini"], "attention": ["plain", "sdpa"], "device": "cpu", "steps": 3},
    },
    {
        "grid": {"workload": "attention", "seq": [64, 128], "dtype": "fp32", "device": "cpu"},
        "rows": [{"heads": 2}, {"heads": 4}],
    },
    {"grid": {"workload": ["memory", "profile"], "model": "tiny", "device": "cpu"}},
    {"grid": {"workload": "collective", "backend": "gloo", "mib": [0.5, 1], "ranks": 2, "device": "cpu"}},
    {"grid": {"workload": "parallel", "model": "tiny", "sync": ["none", "flat"], "ranks": 2, "device": "cpu"}},
    {"grid": {"workload": "workloads:SLEEP", "index": [1, 2]}},
)
_KEYS = (
    "grid",
    "rows",
    "title",
    "compare",
    "timeout_s",
    "workload",
    "model",
    "device",
    "ranks",
    "steps",
    "é",
    "",
    "a.b",
    "\x1b[1m",
)
_ENCODINGS = ("utf-16", "utf-32", "latin-1", "utf-8-sig", "utf-7", "cp037")


class SweepFiles:
    """Damaged sweep files: 250 cases at full size."""

    name = "sweep_files"
    full = 250

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    def afterwards(self) -> Iterable[Outcome]:
        return self._readers.left()

    def attack(self, draw: Draw, folder: Path) -> Outcome:
        content, what = sweep_file(draw)
        file = folder / "s.toml"
        file.write_bytes(content)
        words = ["sweep", "s.toml", *_more_words(draw)]
        end = self._readers.run(words, folder)
        lost = "s.toml was changed" if not file.exists() or file.read_bytes() != content else ""
        return judged(f"{shlex.join(words)}: {what}: {content[:120]!a}", [end], lost=lost)


def sweep_file(draw: Draw) -> tuple[bytes, str]:
    """A sweep file with one to three kinds of damage, and their description."""
    document = json.loads(json.dumps(draw.choice(_DOCUMENTS)))
    changes = [_change(draw, document) for _ in range(draw.choice((1, 1, 2, 3)))] if draw.random() < 0.75 else []
    content = toml(document).encode("utf-8", errors="surrogatepass")
    if not changes or draw.random() < 0.1:
        content, what = _damaged_text(draw, content)
        changes.append(what)
    return content, "; ".join(changes)


def toml(document: dict[str, Any]) -> str:
    """The document as TOML, tables written inline."""
    return unfolded("".join(f"{_key(name)} = {_inline(value)}\n" for name, value in document.items()))


def _key(name: str) -> str:
    return json.dumps(name)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_inline(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, date | datetime):
        return value.isoformat()
    return repr(value)


def _any_value(draw: Draw) -> Any:
    """A random value of a type of TOML."""
    kinds = (
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice((float("nan"), float("inf"), True, False, 1, 2)),
        lambda: draw.choice([text for text in TEXTS if text != "\ud800"]),
        lambda: draw.choice((datetime(2026, 11, 1, tzinfo=UTC), date(2026, 11, 1))),
        lambda: draw.choice(([], [[]], [[8]], [1, "a"], [[1], [2]], {}, {"a": 1}, [{}], [{"a": 1}], [True, 1, 1.0])),
        lambda: nested(draw.choice((3, 90, 900, 2000))),
        lambda: list(range(draw.choice((100, 1000)))),
    )
    return draw.choice(kinds)()


def _change(draw: Draw, document: dict[str, Any]) -> str:
    """Change one value or key of the document."""
    holder, last, path = any_place(draw, document)
    what = draw.choice(("replaced", "replaced", "replaced", "removed", "renamed", "added"))
    if what == "replaced":
        holder[last] = _any_value(draw)
    elif what == "removed" or not isinstance(holder, dict):
        del holder[last]
    elif what == "renamed":
        holder[draw.choice(_KEYS)] = holder.pop(last)
    else:
        holder[draw.choice(_KEYS)] = _any_value(draw)
    return f"{path} {what}"


def _damaged_text(draw: Draw, content: bytes) -> tuple[bytes, str]:
    encoding = draw.choice(_ENCODINGS)
    damages = (
        lambda: flip_bits(draw, content),
        lambda: lines(draw, content),
        lambda: (content.decode().encode(encoding), f"in {encoding}"),
        lambda: (content.replace(b"\n", b"\r"), "old Macintosh's line ends"),
        lambda: (b"\0" + content, "a zero byte"),
        lambda: (b"[grid]\nmodel = " + b"[" * 2000 + b"]" * 2000, "2,000 nested arrays"),
        lambda: (b"[" + b"a." * 3000 + b"b]\n", "3,000 nested tables"),
        lambda: (b"[grid]\n" + b"".join(b"x%d = 1\n" % number for number in range(5000)), "5,000 keys"),
        lambda: (b"[grid]\nmodel = " + b"9" * 5000, "a number of 5,000 digits"),
        lambda: (b"[grid]\nmodel = '" + b"a" * 10**6 + b"'", "a text of 1 MB"),
    )
    return draw.choice(damages)()


def _more_words(draw: Draw) -> list[str]:
    """Further words of the command line."""
    return draw.choice(
        (
            [],
            [],
            [],
            ["--device", "cpu"],
            ["--model", "tiny"],
            ["--page", "s.toml"],
            ["--out", "s.toml"],
            ["--set", "ranks=2"],
            ["--rounds", "2"],
            ["--json"],
        )
    )
