"""A trace as torch's profiler writes it (`export_chrome_trace`), read into small records: `read_trace(Path("trace.json.gz"))`.

Events are decoded one by one, so that a file of 100 MB takes little more memory than its text. Times are whole nanoseconds
since the trace's own zero: differences are exact.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.reading import LARGEST_BYTES, read_file

KERNEL, MEMCPY, MEMSET = "kernel", "memcpy", "memset"
_ACTIVITIES = {"kernel": KERNEL, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
_CALLS = ("cuda_runtime", "cuda_driver")
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_PROPERTIES = re.compile(r'"deviceProperties"\s*:\s*(?=\[)')
_ZERO = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d{1,19})(?!\d)')
_BETWEEN = re.compile(r"[\s,]*")
_TIME_END_NS = 2**62
"""About 146 years; times since 1970 are below it. Sums of larger times would be no floats."""
_HOW_TO_RECORD = (
    "record one with `trainstep profile --keep-trace FOLDER`, or torch.profiler.profile(...) around the steps and "
    "export_chrome_trace"
)

Thread = tuple[int, int]
"""Process and thread as the trace numbers them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Work on the device. `correlation`: the runtime call that issued it; -1 where the trace does not say."""

    kind: str
    name: str
    device: int
    stream: int
    start_ns: int
    duration_ns: int
    correlation: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call into the CUDA runtime or driver, on the host."""

    name: str
    thread: Thread
    start_ns: int
    duration_ns: int
    correlation: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """An op (`sequence`, `forward_thread`: autograd's; -1 and 0 where absent) or an annotation, on a host thread."""

    name: str
    thread: Thread
    start_ns: int
    duration_ns: int
    annotation: bool = False
    sequence: int = -1
    forward_thread: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def backward(self) -> bool:
        """Whether autograd ran it for an op of the forward pass."""
        return self.forward_thread > 0 and self.sequence >= 0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything read, each list in order of start."""

    activities: tuple[Activity, ...]
    calls: tuple[Call, ...]
    ranges: tuple[Range, ...]
    gpu: str | None = None
    """Name of the first device, where the trace says it."""
    zero_ns: int = 0
    """The trace's zero on the machine's clock, which all its processes share; 0 where the trace does not say."""


def read_trace(path: Path, *, largest_bytes: int = LARGEST_BYTES) -> Trace:
    """The trace in a .json or .json.gz file of at most `largest_bytes`, unpacked.

    ValueError in one sentence for what is none, is cut off or holds no event.
    """
    return parse_trace(_text(path, largest_bytes), str(path))


def parse_trace(text: str, where: str) -> Trace:
    """The trace in a text; `where` names it in errors."""
    start = _LIST.search(text)
    if start is None:
        raise ValueError(f"{where}: is no profiler trace: it has no list traceEvents; {_HOW_TO_RECORD}")
    end_of_events = [start.end()]
    activities: list[Activity] = []
    calls: list[Call] = []
    ranges: list[Range] = []
    names: dict[str, str] = {}
    for event in _events(text, start.end(), where, end_of_events):
        if event.get("ph") != "X":
            continue
        try:
            category = event.get("cat")
            if category in _ACTIVITIES:
                activities.append(_activity(event, _ACTIVITIES[category], names))
            elif category in _CALLS:
                calls.append(_call(event, names))
            elif category in ("cpu_op", "user_annotation"):
                ranges.append(_range(event, category == "user_annotation", names))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise ValueError(
                f"{where}: is no profiler trace: an event before character {end_of_events[0]:,} lacks a name or times that can be "
                "read; record it again"
            ) from None
    if not activities and not ranges:
        raise ValueError(f"{where}: the trace is empty: it holds no op and no kernel; {_HOW_TO_RECORD}")
    return Trace(
        activities=tuple(sorted(activities, key=lambda one: one.start_ns)),
        calls=tuple(sorted(calls, key=lambda one: one.start_ns)),
        ranges=tuple(sorted(ranges, key=lambda one: one.start_ns)),
        gpu=_gpu(text, start.start()),
        zero_ns=_zero_ns(text, start.start(), end_of_events[0]),
    )


def _text(path: Path, largest_bytes: int) -> str:
    try:
        return read_file(path, largest_bytes=largest_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no profiler trace: byte {error.start:,} is no text; {_HOW_TO_RECORD}") from None


def _events(text: str, position: int, where: str, reached: list[int]) -> Iterator[Mapping[str, Any]]:
    """Every event of the list; `reached[0]` follows the position in the text."""
    decode = json.JSONDecoder().raw_decode
    between = _BETWEEN.match
    while True:
        gap = between(text, position)
        position = gap.end() if gap else position
        if text[position : position + 1] == "]":
            return
        try:
            event, position = decode(text, position)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            raise ValueError(
                f"{where}: the trace is cut off or damaged at character {position:,} of {len(text):,}; record it again"
            ) from None
        reached[0] = position
        if isinstance(event, dict):
            yield event


def _activity(event: Mapping[str, Any], kind: str, names: dict[str, str]) -> Activity:
    arguments = event.get("args") or {}
    return Activity(
        kind=kind,
        name=_name(event, names),
        device=int(arguments.get("device", 0)),
        stream=int(arguments.get("stream", 0)),
        start_ns=_ns(event["ts"]),
        duration_ns=_duration_ns(event["dur"]),
        correlation=int(arguments.get("correlation", -1)),
    )


def _call(event: Mapping[str, Any], names: dict[str, str]) -> Call:
    arguments = event.get("args") or {}
    return Call(
        name=_name(event, names),
        thread=(int(event["pid"]), int(event["tid"])),
        start_ns=_ns(event["ts"]),
        duration_ns=_duration_ns(event["dur"]),
        correlation=int(arguments.get("correlation", -1)),
    )


def _range(event: Mapping[str, Any], annotation: bool, names: dict[str, str]) -> Range:
    arguments = event.get("args") or {}
    return Range(
        name=_name(event, names),
        thread=(int(event["pid"]), int(event["tid"])),
        start_ns=_ns(event["ts"]),
        duration_ns=_duration_ns(event["dur"]),
        annotation=annotation,
        sequence=int(arguments.get("Sequence number", -1)),
        forward_thread=int(arguments.get("Fwd thread id", 0)),
    )


def _name(event: Mapping[str, Any], names: dict[str, str]) -> str:
    """Its name, kept once for all events that have it."""
    name = event["name"]
    if not isinstance(name, str):
        raise TypeError(f"a name is text, not {type(name).__name__}")
    return names.setdefault(name, name)


def _ns(microseconds: Any) -> int:
    if not isinstance(microseconds, int | float):
        raise TypeError(f"a time is a number, not {type(microseconds).__name__}")
    time_ns = round(microseconds * 1000)
    if not -_TIME_END_NS < time_ns < _TIME_END_NS:
        raise OverflowError("no clock reaches this time")
    return time_ns


def _duration_ns(microseconds: Any) -> int:
    """At least 0: a range that ends before it begins is one whose clocks disagree."""
    return max(0, _ns(microseconds))


def _gpu(text: str, end: int) -> str | None:
    """The name of the first of `deviceProperties`, which stand before the events."""
    found = _PROPERTIES.search(text, 0, end)
    if found is None:
        return None
    try:
        properties, _ = json.JSONDecoder().raw_decode(text, found.end())
        name = properties[0]["name"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _zero_ns(text: str, start: int, end: int) -> int:
    """`baseTimeNanoseconds`, which stands before the events or after them."""
    found = _ZERO.search(text, 0, start) or _ZERO.search(text, end)
    return int(found[1]) if found else 0
