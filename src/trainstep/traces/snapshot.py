"""What torch's allocator wrote down (`torch.cuda.memory._dump_snapshot`), read without running anything that is in it.

    snapshot = read_snapshot(Path("snapshot.pickle.gz"))

A snapshot is dicts, lists, text and numbers; traces/plain_pickle.py loads nothing else. [Note: the ring] The history is a
ring buffer of `max_entries` events; a full one has lost its beginning, and the highest bytes it shows are no peak.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.reading import ReadLimits, read_file, read_within
from trainstep.traces.plain_pickle import plain_pickle

HOW_TO_RECORD = (
    "record with torch.cuda.memory._record_memory_history(max_entries=1000000) before the model is built, and write with "
    "torch.cuda.memory._dump_snapshot(FILE) after a step"
)
_RING_SIZES = 1000
"""People give `max_entries` in thousands; a history of exactly so many events is taken for a full one."""
_MOST_ENTRIES = 10**7
"""Events, and blocks, that are read: a pickle may name one list a thousand times, at two bytes each."""
_MOST_FRAMES = 1000
"""Of one stack: Python's own limit of recursion."""
_BYTES_END = 2**50
"""No device has as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A line of Python at work."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        where = f" ({self.file.rsplit('/', 1)[-1]}:{self.line})" if self.file else ""
        return f"{self.function}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something the allocator did. `action`: alloc, free_requested, free_completed, segment_alloc, oom...; `bytes` as asked for."""

    action: str
    address: int
    bytes: int
    time_us: float
    stack: tuple[Frame, ...]
    """Innermost first; empty on autograd's threads, which run no Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of a segment. `active`: held by a tensor, or freed and awaited by another stream."""

    address: int
    bytes: int
    requested_bytes: int
    active: bool
    stack: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What one cudaMalloc brought. `pool`: small (requests up to 1 MiB), large, or host. `expandable`: grows page by page."""

    address: int
    bytes: int
    pool: str
    expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A `record_function` range, on the clock of the events."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One device's memory at the end, and how it came to that. `events` and `spans` in the order of time."""

    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    spans: tuple[Span, ...] = ()
    ring_entries: int | None = None
    """The most events the history could hold, where known."""

    @property
    def history_is_full(self) -> bool:
        """Whether the ring's beginning is lost, or, the ring's size not being known, looks it. [Note: the ring]"""
        count = len(self.events)
        if self.ring_entries is not None:
            return count >= self.ring_entries
        return count > 0 and count % _RING_SIZES == 0


def read_snapshot(path: Path, limits: ReadLimits | None = None) -> Snapshot:
    """Read a snapshot's pickle, plain or gzipped, in a child process that may take so much memory and so long.

    ValueError in one sentence for anything that is no snapshot, or takes more.
    """
    limits = limits or ReadLimits()
    return read_within(limits, path, lambda: _read(path, limits))


def _read(path: Path, limits: ReadLimits) -> Snapshot:
    content = read_file(path, largest_bytes=limits.file_bytes)
    try:
        document = plain_pickle(content)
    except ValueError as error:
        raise ValueError(f"{path}: no memory snapshot: {error}") from None
    return snapshot_of(document, where=str(path))


def snapshot_of(document: Any, *, where: str, ring_entries: int | None = None) -> Snapshot:
    """The snapshot in plain dicts and lists, as torch has it. Of several devices, the one with most events."""
    try:
        parts = _Parts()
        traces = [parts.entries(trace) for trace in parts.entries(document["device_traces"])]
        device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
        events = tuple(parts.event(event) for event in (traces[device] if traces else ()))
        segments = parts.entries(document["segments"])
        mine = tuple(parts.segment(segment) for segment in segments if segment.get("device", 0) == device)
        spans = _spans(parts.entries(document.get("external_annotations", ())), device)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: no memory snapshot ({type(error).__name__}: {_short(error)})") from None
    if not events:
        held = " but segments" if mine else ""
        raise ValueError(f"{where}: holds no history{held}: {HOW_TO_RECORD}")
    return Snapshot(segments=mine, events=events, spans=spans, ring_entries=ring_entries)


class _Parts:
    """Reads the parts of a document, each held to what it must be; stacks that are one list are read once."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._entries_left = _MOST_ENTRIES

    def entries(self, plain: Any) -> Sequence[Any]:
        """A list, counted: there is an end to what one document may hold."""
        if not isinstance(plain, list | tuple):
            raise TypeError(f"a list is expected, not {type(plain).__name__}")
        self._entries_left -= len(plain)
        if self._entries_left < 0:
            raise ValueError(f"over {_MOST_ENTRIES:,} entries, more than is read")
        return plain

    def event(self, plain: Mapping[str, Any]) -> Event:
        return Event(
            action=_text(plain["action"]),
            address=_natural(plain.get("addr", 0), 2**64),  # an oom has none
            bytes=_natural(plain["size"]),
            time_us=_time_us(plain.get("time_us", 0)),
            stack=self._stack(plain.get("frames", ())),
        )

    def segment(self, plain: Mapping[str, Any]) -> Segment:
        start = address = _natural(plain["address"], 2**64)
        blocks = []
        for block in self.entries(plain["blocks"]):
            size = _natural(block["size"])
            blocks.append(
                Block(
                    address=_natural(block.get("address", address), 2**64),
                    bytes=size,
                    requested_bytes=_natural(block.get("requested_size", size)),
                    active=_text(block["state"]).startswith("active"),
                    stack=self._stack(block.get("frames", ())),
                )
            )
            address += size
        return Segment(
            address=start,
            bytes=_natural(plain["total_size"]),
            pool=_text(plain.get("segment_type", "large")),
            expandable=bool(plain.get("is_expandable", False)),
            blocks=tuple(blocks),
        )

    def _stack(self, frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
        if id(frames) not in self._stacks:
            self._stacks[id(frames)] = tuple(
                Frame(function=_text(frame["name"]), file=_text(frame["filename"]), line=_natural(frame["line"]))
                for frame in frames[:_MOST_FRAMES]
            )
        return self._stacks[id(frames)]


def _text(plain: Any) -> str:
    if not isinstance(plain, str):
        raise TypeError(f"text is expected, not {type(plain).__name__}")
    return plain


def _natural(plain: Any, end: int = _BYTES_END) -> int:
    """A whole number from 0 to below `end`."""
    if not isinstance(plain, int) or not 0 <= plain < end:
        raise ValueError(f"a whole number from 0 to below {end} is expected")
    return plain


def _time_us(plain: Any) -> float:
    if not isinstance(plain, int | float) or not math.isfinite(plain):
        raise ValueError("a time is expected")
    return float(plain)


def _spans(annotations: Sequence[Mapping[str, Any]], device: int) -> tuple[Span, ...]:
    """Ranges from their START and END marks; one never closed is left out."""
    opened: dict[str, list[float]] = {}
    found = []
    for mark in annotations:
        if mark.get("device", device) != device:
            continue
        name, time_us = _text(mark["name"]), _time_us(mark["time_us"])
        if mark["stage"] == "START":
            opened.setdefault(name, []).append(time_us)
        elif opened.get(name):
            found.append(Span(name=name, start_us=opened[name].pop(), end_us=time_us))
    return tuple(sorted(found, key=lambda span: (span.start_us, -span.end_us)))


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
