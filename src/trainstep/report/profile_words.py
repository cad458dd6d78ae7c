"""What a profile says in words: `sentences(record.tables, record.fact)`, of a record or of a trace read just now."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.report.forms import percent, ratio_words, seconds_words
from trainstep.report.rows import table_lines
from trainstep.traces import host_track, verdict
from trainstep.traces.launch_bound import BUSY_SHARE, NEAR_THE_LINE, host_launches

Columns = Mapping[str, Sequence[Any]]
Row = Mapping[str, Any]
GetFact = Callable[[str], Any]
"""A fact's value by its name, or None."""


def sentences(tables: Mapping[str, Columns], fact: GetFact) -> list[str]:
    """The verdict first, then why, then what the profiler itself did to the numbers."""
    found = [verdict_sentence(limit) for limit in table_lines(tables.get("verdict"))]
    found += _alike(table_lines(tables.get("alike")))
    found += map(_stall, table_lines(tables.get("stall")))
    found += [str(fact("attention_split"))] if fact("attention_split") else []
    return [*found, *_graph_replay(fact), *_profiler(fact)]


def verdict_sentence(limit: Row) -> str:
    """`Launch-bound: the device works ...`, by today's rule from the numbers of a verdict's row."""
    kinds = verdict_kinds(limit)
    what = kinds[0].capitalize() if len(kinds) == 1 else f"Near the line between {' and '.join(kinds)}"
    return f"{what}: {verdict_reason(limit)}"


def verdict_word(limit: Row) -> str:
    """The same for a column: one of the four, or `near the line`."""
    kinds = verdict_kinds(limit)
    return kinds[0] if len(kinds) == 1 else NEAR_THE_LINE


def verdict_kinds(limit: Row) -> tuple[str, ...]:
    """The verdict that the row's numbers give; two near a line."""
    return verdict.kinds_of(verdict.Verdict(**limit))


def verdict_reason(limit: Row) -> str:
    """Why the verdict is that, from its row of numbers."""
    kinds = verdict_kinds(limit)
    if len(kinds) > 1:
        return _near_reason(limit, kinds)
    kind = kinds[0]
    if kind == verdict.COMMUNICATING:
        return f"{percent(limit['exposed_share'])} % of the step is communication with no computing beside it."
    if limit["on_device"]:
        if kind == verdict.LAUNCH:
            return _launch_reason(limit)
        busy = f"the device works for {_share(limit, 'busy_s')} of {_step(limit)}"
    else:
        overhead = limit["overhead_share"]
        if kind == verdict.LAUNCH:
            between = f"on the CPU {percent(overhead)} % of the profiled step passes between ops"
            return f"{between}: Python, autograd, views, the profiler."
        busy = f"on the CPU {percent(1 - overhead)} % of the step passes in ops"
    share = percent(limit["matmul_share"])
    if kind == verdict.COMPUTE:
        return f"{busy}, {share} % of that in matmuls and fused attention."
    return f"{busy}, only {share} % of that in matmuls and fused attention; the rest moves bytes more than it computes."


def _near_reason(limit: Row, kinds: Sequence[str]) -> str:
    """The share that is too close to its line, with that line."""
    if verdict.COMMUNICATING in kinds:
        share, line, what = limit["exposed_share"], verdict.EXPOSED_SHARE, "of the step is exposed communication"
    elif verdict.LAUNCH not in kinds:
        share, line, what = limit["matmul_share"], verdict.MATMUL_SHARE, "of its time is matmuls and fused attention"
    elif not limit["on_device"]:
        share, line, what = limit["overhead_share"], verdict.OVERHEAD_SHARE, "of the step passes between ops"
    else:
        works = (
            f"the device works for {_share(limit, 'busy_s')} of {_step(limit)} (under {percent(BUSY_SHARE)} % it waits)"
        )
        return works + (f", the host launches for {_share(limit, 'enqueue_s')}." if limit["enqueue_s"] else ".")
    return f"{percent(share)} % {what}, and the line is at {percent(line)} %."


def _share(limit: Row, name: str) -> str:
    return f"{percent(limit[name] / (limit['step_s'] or math.inf))} %"


def _step(limit: Row) -> str:
    return f"a step of {seconds_words(limit['step_s'])}"


def _launch_reason(limit: Row) -> str:
    step_s, enqueue_s = limit["step_s"], limit["enqueue_s"]
    reason = f"the device works for {_share(limit, 'busy_s')} of {_step(limit)}"
    if limit["profiled_step"]:
        return f"{reason} and waits for the rest, though part of that is the profiler's own slowing of the host."
    if enqueue_s is not None and host_launches(enqueue_s=enqueue_s, step_s=step_s):
        return f"{reason} and waits for the host, which launches for {seconds_words(enqueue_s)}."
    return f"{reason} and waits for the rest, while the host is not launching all the time: see where it is blocked."


def _alike(rows: Sequence[Row]) -> list[str]:
    """Why forward and backward take alike although backward computes twice as much."""
    if not rows:
        return []
    forward, backward = rows
    return [
        f"Forward and backward take alike ({seconds_words(forward['time_s'])} and {seconds_words(backward['time_s'])}) because "
        f"each lasts as long as the host needs to launch it ({forward['pieces']:,.0f} and {backward['pieces']:,.0f} pieces of "
        f"work); on the device they take {seconds_words(forward['device_s'])} and {seconds_words(backward['device_s'])}."
    ]


def _stall(stall: Row) -> str:
    """Why a timeline shows the host standing still between backward and optimizer, or that it does not."""
    gap, behind = seconds_words(stall["gap_s"]), seconds_words(stall["behind_s"])
    if stall["kind"] == host_track.BLOCKED:
        waits = seconds_words(stall["blocked_s"])
        return f"Between backward and optimizer the host waits {waits} in a synchronisation, of {gap}."
    if stall["kind"] == host_track.ALLOCATION:
        takes = seconds_words(stall["allocation_s"])
        return f"Between backward and optimizer the host takes {gap}, {takes} of it in cudaMalloc."
    if stall["kind"] == host_track.QUEUE_FULL:
        return (
            f"The launch queue was full for {seconds_words(stall['queue_full_s'])} of the step: the host cannot run further "
            f"ahead, and a timeline shows it standing still; at the optimizer's first launch the device was {behind} behind."
        )
    return f"The host does not stall between backward and optimizer: {gap} pass on it, and the device is {behind} behind then."


def _graph_replay(fact: GetFact) -> list[str]:
    """Kernels by the profiler beside the same ones replayed with no host in between."""
    failed, replay_s, kernels_s = (fact(f"graph_replay_{name}") for name in ("failed", "s", "kernels_s"))
    if failed:
        return [f"No CUDA graph was replayed: {failed}"]
    if not replay_s or kernels_s is None:
        return []
    left_out = fact("graph_replay_left_out")
    return [
        f"Kernels of {fact('graph_replay_phases')}: {seconds_words(kernels_s)}; replayed as one CUDA graph: "
        f"{seconds_words(replay_s)} (ratio {ratio_words(kernels_s / replay_s)})." + (f" {left_out}" if left_out else "")
    ]


def _profiler(fact: GetFact) -> list[str]:
    found = []
    if slowdown := fact("profiler_slowdown"):
        found.append(
            f"A profiled step took {slowdown:.2f} times an unprofiled one: the profiler slows the host, not the kernels."
        )
    if (fallback := fact("fallback_share")) is not None and (assigned := fact("assigned_share")) is not None:
        found.append(
            f"{percent(assigned)} % of all device time has a phase, {percent(fallback)} % only by what the main thread did "
            "meanwhile."
        )
    if split := fact("trace_split"):
        found.append(str(split))
    if path := fact("trace_file"):
        found.append(f"The trace of one step is in {path}: open it at https://ui.perfetto.dev, or with --from.")
    return found
