"""Random damage to bytes and JSON, with a description of each."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Draw = random.Random

TEXTS = (
    "",
    " ",
    "x",
    "nan",
    "-1",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "a\r\nb\tc",
    "\x00",
    "\u202egnp.exe",
    "é" * 300,
    "=1+1",
    "[a](javascript:alert(1))",
    "<script>alert(1)</script>",
    "{{7*7}}",
    "%s%n",
    "../../etc/passwd",
    "\ud800",
)
NUMBERS = (0, -1, 1, 3, 2**31, 2**63, 2**64, 10**400, -(10**30), 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308)


def flip_bits(draw: Draw, content: bytes) -> tuple[bytes, str]:
    """Flip one to eight bits."""
    damaged = bytearray(content)
    places = [draw.randrange(len(content)) for _ in range(draw.choice((1, 1, 2, 8)))] if content else []
    for place in places:
        damaged[place] ^= 1 << draw.randrange(8)
    return bytes(damaged), f"bits flipped in bytes {places}"


def cut_off(draw: Draw, content: bytes) -> tuple[bytes, str]:
    """Keep only the beginning."""
    kept = draw.randrange(len(content)) if content else 0
    return content[:kept], f"cut to {kept} of {len(content)} bytes"


def overwrite(draw: Draw, content: bytes) -> tuple[bytes, str]:
    """Overwrite a block with zeros, noise or bytes of another place, as a file system may."""
    length = min(len(content), draw.choice((1, 16, 512, 4096)))
    at = draw.randrange(len(content) - length + 1)
    start = draw.randrange(len(content) - length + 1)
    block, what = draw.choice(
        [
            (bytes(length), "zeros"),
            (draw.randbytes(length), "noise"),
            (content[start : start + length], f"byte {start}"),
        ]
    )
    return content[:at] + block + content[at + length :], f"{length} bytes at {at} overwritten with {what}"


def lines(draw: Draw, content: bytes) -> tuple[bytes, str]:
    """Delete, double, shuffle, join or end lines differently, or insert a foreign line."""
    parts = content.splitlines(keepends=True)
    at = draw.randrange(len(parts)) if parts else 0
    what = draw.choice(("deleted", "doubled", "shuffled", "a foreign line", "blank lines", "other ends", "joined"))
    if what == "deleted":
        del parts[at : at + 1]
    elif what == "doubled":
        parts[at:at] = parts[at : at + 1]
    elif what == "shuffled":
        draw.shuffle(parts)
    elif what == "a foreign line":
        parts.insert(at, draw.choice((b"{}\n", b"[]\n", b"5\n", b"null\n", b"x\n", b"\xff\xfe\n", b"{" * 5000 + b"\n")))
    elif what == "blank lines":
        parts.insert(at, b"\n \n\n")
    elif what == "other ends":
        parts = [part.replace(b"\n", b"\r\n") for part in parts]
    else:
        parts = [part.replace(b"\n", b"") for part in parts]
    return b"".join(parts), f"lines: {what} at {at + 1}"


BYTES: Sequence[Callable[[Draw, bytes], tuple[bytes, str]]] = (flip_bits, cut_off, overwrite, lines)


def any_value(draw: Draw, depth: int = 0) -> Any:
    """A JSON value of any type."""
    kind = draw.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice(TEXTS)
    if kind == 3:
        return draw.choice(([], {}, [None], [[]], {"": None}, [1, "a"], {"a": 1}, {"a": []}, {"a": [1], "b": [1, 2]}))
    if kind == 4:
        return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 5:
        return {draw.choice(TEXTS): any_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return nested(draw.choice((50, 500, 900, 2000, 100_000)))


def nested(depth: int) -> str:
    """A mark that `unfolded` replaces by nested lists, which may be deeper than Python could write."""
    return f"nested lists: {depth}"


def unfolded(text: str) -> str:
    """The text of a document with its marks replaced by nested lists."""
    return re.sub(r'"nested lists: (\d+)"', lambda mark: "[" * int(mark[1]) + "]" * int(mark[1]), text)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value inside a document; of long lists only the first and last items."""
    if isinstance(value, dict):
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        items = [
            (index, value[index]) for index in {*range(min(len(value), 3)), *range(max(0, len(value) - 2), len(value))}
        ]
    else:
        return
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def any_place(draw: Draw, document: Any) -> tuple[Any, Any, str]:
    """A mapping or list in the document, one of its keys, and the path as text. An empty document gets a value first."""
    if not document:
        document.update({"x": 1}) if isinstance(document, dict) else document.append(1)
    *above, last = path = draw.choice(list(places(document)))
    holder = document
    for key in above:
        holder = holder[key]
    return holder, last, ".".join(map(str, path))


def json_value(draw: Draw, document: Any) -> str:
    """Change one value in a document of dicts and lists: replace, remove, rename or shorten it, or add another value beside it."""
    holder, last, path = any_place(draw, document)
    what = draw.choice(("replaced", "replaced", "replaced", "removed", "renamed", "added", "shortened"))
    if what == "replaced":
        holder[last] = any_value(draw)
        what = f"replaced by {_short(holder[last])}"
    elif what == "removed":
        del holder[last]
    elif what == "renamed" and isinstance(holder, dict):
        holder[draw.choice(TEXTS)] = holder.pop(last)
    elif what == "shortened" and isinstance(holder[last], list | str):
        holder[last] = holder[last][: len(holder[last]) // 2]
    elif isinstance(holder, dict):
        holder[draw.choice(TEXTS)] = any_value(draw)
    else:
        holder.insert(0, any_value(draw))
    return f"{path} {what}"


def dumped(document: Any) -> bytes:
    """The document as JSON; a lone surrogate stays an escape."""
    return unfolded(json.dumps(document, separators=(",", ":"))).encode()


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 60 else f"{text[:40]}... ({type(value).__name__})"
