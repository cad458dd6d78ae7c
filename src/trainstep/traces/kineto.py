"""Reads a trace that torch's profiler wrote (`export_chrome_trace`) into small records: `read_trace(path)`.

Events are decoded one by one, so that a file of 100 MB takes little more memory than its text. Times are whole nanoseconds
since the trace's own zero, so differences are exact.
"""

import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
"""About 146 years; times since 1970 are below it. Sums of larger times would not fit a float."""
_HOW_TO_RECORD = (
    "record one with `trainstep profile --keep-trace FOLDER`, or torch.profiler.profile(...) around the steps and "
    "export_chrome_trace"
)

Thread = tuple[int, int]
"""Process and thread number, as in the trace."""
Shapes = tuple[Any, ...]
"""One shape per input; for a list of tensors, the tuple of their shapes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Something with a name that takes time."""

    name: str
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity(Timed):
    """Work on the device. `correlation`: number of the runtime call that issued it; -1 if the trace does not say."""

    kind: str
    device: int
    stream: int
    correlation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Timed):
    """A call into the CUDA runtime or driver, on the host."""

    thread: Thread
    correlation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Range(Timed):
    """An op or an annotation on a host thread. `sequence` and `forward_thread` are autograd's numbers; -1 and 0 if absent.

    `shapes`, `dtypes`: those of its inputs, if recorded. A list of tensors has a tuple of shapes; what is no tensor has ().
    """

    thread: Thread
    annotation: bool = False
    sequence: int = -1
    forward_thread: int = 0
    shapes: Shapes = ()
    dtypes: tuple[str, ...] = ()

    @property
    def backward(self) -> bool:
        """Whether autograd ran this op for an op of the forward pass."""
        return self.forward_thread > 0 and self.sequence >= 0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of a trace, each list in order of start."""

    activities: tuple[Activity, ...]
    calls: tuple[Call, ...]
    ranges: tuple[Range, ...]
    gpu: str | None = None
    """Name of the first device, if the trace says it."""
    zero_ns: int = 0
    """The trace's zero on the machine's clock, which all its processes share; 0 if the trace does not say."""


def read_trace(path: Path, *, largest_bytes: int = LARGEST_BYTES) -> Trace:
    """The trace in a .json or .json.gz file of at most `largest_bytes`, unpacked.

    ValueError of one sentence if the file is not a trace, is cut off or holds no event.
    """
    try:
        text = read_file(path, largest_bytes=largest_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: is not a profiler trace: byte {error.start:,} is not text; {_HOW_TO_RECORD}"
        ) from None
    return parse_trace(text, str(path))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's collector of cycles while a trace is read: it would scan all of the trace's objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def parse_trace(text: str, where: str) -> Trace:
    """The trace in this text; `where` names it in errors."""
    start = _LIST.search(text)
    if start is None:
        raise ValueError(f"{where}: is not a profiler trace: it has no list traceEvents; {_HOW_TO_RECORD}")
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
                f"{where}: is not a profiler trace: an event before character {end_of_events[0]:,} lacks a name or times that "
                "can be read; record it again"
            ) from None
    if not activities and not ranges:
        raise ValueError(f"{where}: the trace is empty: it holds no op and no kernel; {_HOW_TO_RECORD}")
    return Trace(
        activities=tuple(sorted(activities, key=lambda event: event.start_ns)),
        calls=tuple(sorted(calls, key=lambda event: event.start_ns)),
        ranges=tuple(sorted(ranges, key=lambda event: event.start_ns)),
        gpu=_gpu(text, start.start()),
        zero_ns=_zero_ns(text, start.start(), end_of_events[0]),
    )


def _events(text: str, position: int, where: str, reached: list[int]) -> Iterator[Mapping[str, Any]]:
    """Every event of the list; `reached[0]` is set to the position in the text after each."""
    decode = json.JSONDecoder().raw_decode
    between = _BETWEEN.match
    while True:
        gap = between(text, position)
        position = gap.end() if gap else position
        if text[position : position + 1] == "]":
            return
        try:
            event, position = decode(text, position)
        except (ValueError, RecursionError):  # ValueError: not JSON, or a number with thousands of digits
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
        shapes=_tuples(arguments.get("Input Dims")),
        dtypes=tuple(map(str, _list(arguments.get("Input type")))),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tuples(value: Any) -> Shapes:
    """Nested lists as nested tuples; anything else than a list counts as an empty one."""
    return tuple(_tuples(entry) if isinstance(entry, list) else entry for entry in _list(value))


def _name(event: Mapping[str, Any], names: dict[str, str]) -> str:
    """The event's name, as one object for all events that have it."""
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
    return max(0, _ns(microseconds))  # a range ends before it begins if clocks disagree


def _gpu(text: str, end: int) -> str | None:
    """The name of the first device in `deviceProperties`, which stands before the events."""
    match = _PROPERTIES.search(text, 0, end)
    if match is None:
        return None
    try:
        properties, _ = json.JSONDecoder().raw_decode(text, match.end())
        name = properties[0]["name"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _zero_ns(text: str, start: int, end: int) -> int:
    """`baseTimeNanoseconds`, which stands before the events or after them."""
    match = _ZERO.search(text, 0, start) or _ZERO.search(text, end)
    return int(match[1]) if match else 0
