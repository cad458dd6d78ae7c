"""Reads what torch's allocator wrote down (`torch.cuda.memory._dump_snapshot`) without running anything in the file.

    snapshot = read_snapshot(Path("snapshot.pickle.gz"))

A snapshot consists of dicts, lists, text and numbers, and nothing else is loaded: every other name in the pickle is refused.

[Note: the ring] The history is a ring buffer of `max_entries` events. A full buffer has lost its beginning, and the highest bytes
it shows are no peak.

[Note: limits] A pickle can do harm without naming anything: a memo index of four bytes makes Python ask for 64 GB, and a tuple that
is nested deeply enough ends the process when it is hashed or freed. So a pickle from outside is loaded in a child process
(`reading.read_within`), where memory and time are limited.
"""

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.reading import ReadLimits, read_file, read_within

HOW_TO_RECORD = (
    "record with torch.cuda.memory._record_memory_history(max_entries=1000000) before the model is built, and write with "
    "torch.cuda.memory._dump_snapshot(FILE) after a step"
)
_RING_SIZES = 1000
"""People give `max_entries` in thousands, so a history of a multiple of 1000 events is taken to be full."""
_MOST_ENTRIES = 10**7
"""The most events and blocks that are read: a pickle may refer to one list a thousand times, at two bytes each."""
_MOST_FRAMES = 1000
"""The most frames of one stack, as many as Python's recursion limit."""
_BYTES_END = 2**50
"""More bytes than any device has."""
_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What the unpickler raises for a damaged or hostile pickle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A line of Python on the stack of an event."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        where = f" ({self.file.rsplit('/', 1)[-1]}:{self.line})" if self.file else ""
        return f"{self.function}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something the allocator did. `action`: alloc, free_requested, free_completed, segment_alloc, oom...; `bytes` as requested."""

    action: str
    address: int
    bytes: int
    time_us: float
    stack: tuple[Frame, ...]
    """Innermost first; empty on autograd's threads, which run no Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of a segment. `active`: held by a tensor, or freed while another stream still uses it."""

    address: int
    bytes: int
    requested_bytes: int
    active: bool
    stack: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The memory of one cudaMalloc. `pool`: small (requests up to 1 MiB), large, or host. `expandable`: grows page by page."""

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
    """One device's memory at the end, and its history. `events` and `spans` are in the order of time."""

    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    spans: tuple[Span, ...] = ()
    ring_entries: int | None = None
    """The most events that the history could hold, if known."""

    @property
    def history_is_full(self) -> bool:
        """Whether the ring's beginning is lost, or seems lost if the ring's size is unknown. [Note: the ring]"""
        count = len(self.events)
        if self.ring_entries is not None:
            return count >= self.ring_entries
        return count > 0 and count % _RING_SIZES == 0


def read_snapshot(path: Path, limits: ReadLimits | None = None) -> Snapshot:
    """Read a snapshot's pickle, plain or gzipped, in a child process with limits of memory and time. [Note: limits]

    ValueError of one sentence if the file is no snapshot, or if reading it exceeds a limit.
    """
    limits = limits or ReadLimits()
    return read_within(limits, path, lambda: _read(path, limits))


def snapshot_of(document: Any, *, where: str, ring_entries: int | None = None) -> Snapshot:
    """The snapshot in a document of torch's form. Of several devices, the device with most events is read."""
    try:
        parts = _Parts()
        traces = [parts.entries(trace) for trace in parts.entries(document["device_traces"])]
        device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
        events = tuple(parts.event(event) for event in (traces[device] if traces else ()))
        segments = parts.entries(document["segments"])
        own_segments = tuple(parts.segment(segment) for segment in segments if segment.get("device", 0) == device)
        spans = _spans(parts.entries(document.get("external_annotations", ())), device)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: no memory snapshot ({type(error).__name__}: {_short(error)})") from None
    if not events:
        but = " but segments" if own_segments else ""
        raise ValueError(f"{where}: holds no history{but}: {HOW_TO_RECORD}")
    return Snapshot(segments=own_segments, events=events, spans=spans, ring_entries=ring_entries)


def plain_pickle(content: bytes) -> Any:
    """The content of a pickle. ValueError of one sentence if it is damaged or hostile. [Note: limits]"""
    try:
        return _RefusingUnpickler(io.BytesIO(content)).load()
    except _DAMAGED as error:
        raise ValueError(_short(error)) from None


def _read(path: Path, limits: ReadLimits) -> Snapshot:
    content = read_file(path, largest_bytes=limits.file_bytes)
    try:
        document = plain_pickle(content)
    except ValueError as error:
        raise ValueError(f"{path}: no memory snapshot: {error}") from None
    return snapshot_of(document, where=str(path))


class _Parts:
    """Reads and checks the parts of a document. Events that share a list of frames share its stack."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._entries_left = _MOST_ENTRIES

    def entries(self, plain: Any) -> Sequence[Any]:
        """The list, counted towards the most entries that one document may have."""
        if not isinstance(plain, list | tuple):
            raise TypeError(f"a list is expected, not {type(plain).__name__}")
        self._entries_left -= len(plain)
        if self._entries_left < 0:
            raise ValueError(f"over {_MOST_ENTRIES:,} entries, more than is read")
        return plain

    def event(self, plain: Mapping[str, Any]) -> Event:
        return Event(
            action=_text(plain["action"]),
            address=_natural(plain.get("addr", 0), 2**64),  # an oom event has no address
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
    """Ranges from their START and END marks; a range that is never closed is left out."""
    opened: dict[str, list[float]] = {}
    spans = []
    for mark in annotations:
        if mark.get("device", device) != device:
            continue
        name, time_us = _text(mark["name"]), _time_us(mark["time_us"])
        if mark["stage"] == "START":
            opened.setdefault(name, []).append(time_us)
        elif opened.get(name):
            spans.append(Span(name=name, start_us=opened[name].pop(), end_us=time_us))
    return tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us)))


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _RefusingUnpickler(pickle.Unpickler):
    """Loads only containers, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside it")
