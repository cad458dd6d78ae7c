"""Every fact that trainstep's workloads write, declared once with its unit, type and meaning.

    facts_of(tokens=4096, loss=loss)   # name -> Fact with the declared unit; None is left out

Facts are checked against these declarations when a record is read. A user's workload may write other facts, which are shown
unchanged.

A declared type is `int`, `float` (which accepts whole numbers too), `str`, `bool`, `object` (anything), a union of them with
`None`, or `list[float]`. Numbers are finite, and what has a unit is within the limits of records/amounts.py. records/tables.py
declares columns with the same types.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_origin

from trainstep.records.amounts import limits_of

_LARGEST = sys.float_info.max
_LONGEST_WHOLE = 10**20
"""Python refuses to write a whole number of thousands of digits, and nobody would read it."""
_TYPE_WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    type(None): "nothing",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One measured value. `unit`: `s`, `bytes`, `flops`, `bytes/s`, `flop/s`, `count`, `ratio`, `Hz`, `W`, `C` or empty (text)."""

    value: Any
    unit: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.value, Mapping | list | tuple):
            raise ValueError(f"a fact is one value, not a {type(self.value).__name__}; put several values into a table")


class FactKind(NamedTuple):
    """The declaration of a fact. `signed`: it may be negative although its unit is not, as a difference of two readings."""

    unit: str
    type: Any
    meaning: str
    signed: bool = False


IN_EVERY_ROW: Mapping[str, FactKind] = {
    "peak_allocated_bytes": FactKind("bytes", float, "the most that tensors occupied on the GPU"),
    "peak_reserved_bytes": FactKind("bytes", float, "the most that torch's allocator reserved on the GPU"),
    "driver_bytes": FactKind("bytes", float, "GPU memory of the process, by the driver"),
    "peak_rss_bytes": FactKind("bytes", float, "the most resident memory of a CPU's process"),
    "import_s": FactKind("s", float, "time to import the workload"),
    "forked": FactKind("", bool, "the process was forked from one that had imported torch"),
    "context_s": FactKind("s", float, "time to create the CUDA context"),
    "build_s": FactKind("s", float, "time to build the step"),
    "compile_s": FactKind("s", float, "time spent on compilation so far"),
    "compile_cache": FactKind("", str, "warm: every graph came from the cache on disk; cold: otherwise"),
    "captured": FactKind("", str, "what one CUDA graph contains: step, forward and backward, or nothing"),
    "capture_left_out": FactKind("", str, "why a part of the step, or all of it, is in no graph"),
    "capture_s": FactKind("s", float, "time to capture the step, without its warm-ups"),
    "capture_pool_bytes": FactKind("bytes", float, "GPU memory of the graph's pool"),
    "recompute_choice": FactKind("", str, "how many blocks recompute in which mode, as chosen for the budget"),
    "recompute_peak_bytes": FactKind("bytes", float, "the peak of the chosen recomputation, as predicted"),
    "recompute_measured_peak_bytes": FactKind(
        "bytes", float, "the peak of a step with it: reserved on a GPU, of tensors on a CPU; with the optimizer's state"
    ),
    "recompute_added_s": FactKind("s", float, "time of a step that the chosen recomputation adds, as predicted"),
    "timing": FactKind("", str, "which clock times the phases: cuda_events or host_clock"),
    "tokens": FactKind("count", int, "tokens of a step, of all ranks"),
    "parameters": FactKind("count", int, "parameters of the model"),
    "model_source": FactKind(
        "", str, "SHA-256 of the one file with the function that builds the user's model, its first 12 digits"
    ),
    "model_flops": FactKind("flops", float, "FLOPs of a step, by flops_convention"),
    "flops": FactKind("flops", float, "FLOPs of a call"),
    "bytes": FactKind("bytes", float, "bytes that a call moves"),
    "rate": FactKind("flop/s", float, "FLOP/s of a call; bytes/s of a call that copies"),
    "launch_bound": FactKind("", bool, "the device waited for the host"),
    "power_w": FactKind("W", float, "the GPU's power right after timed work"),
    "throttle_reasons": FactKind("", str, "why the GPU's clock was lowered, read after timed work"),
    "peak_bytes": FactKind(
        "bytes", float, "the most allocated during a pass, beyond what was allocated before", signed=True
    ),
    "held_bytes": FactKind("bytes", float, "bytes that forward leaves allocated", signed=True),
    "error_output": FactKind("ratio", float, "max |x - ref| / max |ref| of the output"),
    "error_dq": FactKind("ratio", float, "max |x - ref| / max |ref| of the queries' gradient"),
    "error_dk": FactKind("ratio", float, "max |x - ref| / max |ref| of the keys' gradient"),
    "error_dv": FactKind("ratio", float, "max |x - ref| / max |ref| of the values' gradient"),
    "error_lse": FactKind("ratio", float, "max |x - ref| / max |ref| of the log-sum-exp"),
    "error_same_dtype": FactKind("ratio", float, "the output's error when the reference computes in the same dtype"),
    "has_nan": FactKind("count", int, "1: the result contains a NaN or an infinity"),
    "deterministic": FactKind("count", int, "1: two runs were bitwise equal"),
    "which_ran": FactKind("", str, "the kernels or the backend that ran"),
    "error_checked": FactKind("", str, "which part was compared, and with what"),
    "afterwards_failed": FactKind("", str, "what could not be inspected after the timed steps, and why"),
}
"""Facts that raw rows (CSV, JSON) of every workload show, in this order; config/instruments.py names further ones by workload."""
FACTS: Mapping[str, FactKind] = {
    **IN_EVERY_ROW,
    # How the cell was run
    "command": FactKind("", str, "the command line"),
    "defaults_from": FactKind("", str, "options that came from files, and which files"),
    "interleaving": FactKind("", str, "how compared cells were interleaved: none, live or rounds"),
    "interleaving_group": FactKind("", str, "the same for cells that were interleaved with each other"),
    "turn_steps": FactKind("count", int, "values of `step` in a turn"),
    "process_steps": FactKind("count", int, "values of `step` that each of the cell's processes gave, in order"),
    "cpu_busy_before": FactKind("ratio", float, "share of all cores that other processes used just before the cell"),
    "gpu_busy_before": FactKind("ratio", float, "the GPU's utilisation just before the cell"),
    "round": FactKind("count", int, "index, from 0, of a part of a cell that is not complete yet"),
    "rounds": FactKind("count", int, "number of parts of a cell that is not complete yet"),
    # A training step
    "loss": FactKind("", float | str | None, "loss of the last step; `nan` or `inf` as text, because JSON has neither"),
    "compiled_graphs": FactKind("count", int, "number of compiled graphs"),
    "device_busy_s": FactKind("s", float, "time that the device worked in one profiled step or pass"),
    "reallocated_step_s": FactKind("s", float, "time of a step right after the allocator's cache was emptied"),
    "profiling_s": FactKind("s", float, "retired: time to inspect the device after the timed steps"),
    "flops_source": FactKind("", str, "how FLOPs were counted"),
    "flops_convention": FactKind("", str, "which FLOPs count"),
    "flops_dtype": FactKind("", str, "dtype of the matmuls whose FLOPs are counted"),
    "sm_clock_max_hz": FactKind("Hz", float, "the GPU's highest clock"),
    "temperature_c": FactKind("C", float, "the GPU's temperature right after timed work"),
    "allocation_retries": FactKind("count", int, "times that the allocator ran out, emptied its cache and waited"),
    "trace_file": FactKind("", str, "file with the trace of one step"),
    "trace_split": FactKind("", str, "how a trace that marks no steps was split into steps"),
    # Several ranks
    "context_bytes": FactKind("bytes", float, "GPU memory of the CUDA context, by the driver", signed=True),
    "nccl_bytes": FactKind("bytes", float, "GPU memory that the driver gave while the ranks connected", signed=True),
    "gpu_other_processes": FactKind(
        "count", int, "processes of others on the GPU; with several ranks, the most on any rank's GPU"
    ),
    "agreement": FactKind("", str, "what was checked to be equal on all ranks"),
    "wire_bytes": FactKind("bytes", float, "the most that a rank sends in a step, with ring collectives"),
    "expected_wire_bytes": FactKind("bytes", float, "the most that a rank sends in a step, by formula"),
    "expected_peak_bytes": FactKind("bytes", float, "the peak by formula"),
    "expected_peak_point": FactKind("", str, "point of a step at which the peak by formula occurs"),
    "communication_s": FactKind("s", float, "time in one profiled step in which a message was in flight"),
    "waiting_s": FactKind("s", float, "time in which a message was in flight and the last rank had not joined yet"),
    "transfer_s": FactKind("s", float, "time in which a message was in flight and every rank had joined"),
    "exposed_s": FactKind("s", float, "time in which a message was in flight and nothing computed"),
    "tail_s": FactKind("s", float, "time from the end of computing to the end of the last gradient message"),
    "trace_failed": FactKind("", str, "why there is no result from a trace"),
    "node": FactKind("", str, "name of the node on which a rank ran, where there are several"),
    "fullest_rank": FactKind("", int, "rank with the highest peak of memory, which the record's facts describe"),
    # Memory
    "peak_requested_bytes": FactKind("bytes", float, "the most that tensors requested, by the allocator"),
    "timeline_peak_bytes": FactKind("bytes", float, "the most that tensors requested, by the history of allocations"),
    "timeline_peak_phase": FactKind("", str, "phase of the peak by the history of allocations"),
    "kernels_bytes": FactKind("bytes", float, "GPU memory that the driver gave for loaded kernels", signed=True),
    "allocated_residual_share": FactKind("ratio", float, "share of allocated memory without a category"),
    "allocated_residual_bytes": FactKind("bytes", float, "allocated bytes without a category", signed=True),
    "driver_residual_share": FactKind("ratio", float, "share of the driver's figure that is unexplained"),
    "driver_residual_bytes": FactKind("bytes", float, "bytes of the driver's figure that are unexplained", signed=True),
    "parameter_bytes_each": FactKind("bytes", float, "bytes of weights per parameter"),
    "gradient_bytes_each": FactKind("bytes", float, "bytes of gradients per parameter"),
    "optimizer_state_bytes_each": FactKind("bytes", float, "bytes of optimizer state per parameter"),
    "residual_stream_bytes": FactKind("bytes", float, "one tensor of batch x context x d_model"),
    "residual_stream": FactKind("", str, "how residual_stream_bytes is computed"),
    "history_full": FactKind("", bool, "the beginning of the allocation history is lost"),
    "process_group": FactKind("", str, "backend of a process group that the model opened, or none"),
    "process_data_bytes": FactKind("bytes", float, "data memory of a CPU's process at the peak", signed=True),
    "snapshot": FactKind("", str, "file with the history of allocations"),
    "fit_of": FactKind("", str, "the field whose largest fitting value was searched for"),
    "memory_limit_bytes": FactKind("bytes", float, "memory limit of the cell's process"),
    # A profile
    "verdict": FactKind("", str, "what limits the step"),
    "idle_s": FactKind("s", float, "idle time of the device, median of the profiled steps"),
    "kernels_s": FactKind("s", float, "device time of a step"),
    "pieces": FactKind("count", float, "kernels and copies in a step; ops on a CPU"),
    "launches": FactKind("count", float, "kernel launches in a step"),
    "profiler_slowdown": FactKind("ratio", float, "time of a profiled step over that of an unprofiled step"),
    "assigned_share": FactKind("ratio", float, "share of device time that was assigned to a phase"),
    "fallback_share": FactKind(
        "ratio", float, "share of device time whose phase only the main thread's phase determines"
    ),
    "attention_split": FactKind("", str, "why attention's parts can or cannot be separated"),
    "replayed_share": FactKind(
        "ratio", float, "share of device time of a captured step that an eager step's order places"
    ),
    "replay_idle_share": FactKind(
        "ratio",
        float,
        "idle share of the device from a graph launch's first kernel to its last, median of the launches",
    ),
    "graph_replay_s": FactKind("s", float, "mean time of a step replayed as one CUDA graph"),
    "graph_replay_kernels_s": FactKind("s", float, "kernel time of the replayed phases, by the profiler"),
    "graph_replay_phases": FactKind("", str, "which phases were replayed as one CUDA graph"),
    "graph_replay_left_out": FactKind("", str, "what the CUDA graph could not contain, and why"),
    "graph_replay_failed": FactKind("", str, "why no graph was replayed"),
    # Numerics
    "error_logits": FactKind("ratio", float, "|x - ref| / |ref| of the logits"),
    "error_loss": FactKind("ratio", float, "|x - ref| / |ref| of the loss"),
    "error_gradient_median": FactKind("ratio", float, "|x - ref| / |ref| of the parameters' gradients, median"),
    "error_gradient_max": FactKind("ratio", float, "|x - ref| / |ref| of the worst gradient"),
    "gradients_without_error": FactKind("count", int, "parameters whose gradient is not finite or is all zero"),
    "reference": FactKind("", str, "dtype of the reference that errors are relative to"),
    "reference_reason": FactKind("", str, "why the reference is not fp64"),
    "logits_module": FactKind("", str, "the module whose output is taken as the logits"),
    "gradient_scale": FactKind("", float, "factor by which the loss was multiplied"),
    "settled_scale": FactKind("", float, "the largest power of two without an infinite gradient"),
    "no_effect": FactKind("", str, "why autocast changed nothing"),
    # Attention
    "first_call_s": FactKind("s", float, "time of the first pass, compilation included"),
    "inputs_bytes": FactKind("bytes", float, "bytes of q, k and v"),
    "output_bytes": FactKind("bytes", float, "bytes of the output"),
    "scores_bytes": FactKind("bytes", float, "bytes of the scores in memory"),
    "softmax_bytes": FactKind("bytes", float, "bytes of the softmax in memory"),
    "gradients_bytes": FactKind("bytes", float, "bytes that backward adds"),
    "lse_bytes": FactKind("bytes", float, "bytes of the log-sum-exp"),
    "needed_bytes": FactKind("bytes", float, "the least bytes that the pass needs"),
    "error_same_dtype_dq": FactKind("ratio", float, "error_dq when the reference computes in the same dtype"),
    "error_same_dtype_dk": FactKind("ratio", float, "error_dk when the reference computes in the same dtype"),
    "error_same_dtype_dv": FactKind("ratio", float, "error_dv when the reference computes in the same dtype"),
    "error_same_dtype_lse": FactKind("ratio", float, "error_lse when the reference computes in the same dtype"),
    # One op
    "error_dx": FactKind("ratio", float, "max |x - ref| / max |ref| of the input's gradient"),
    "error_same_dtype_dx": FactKind("ratio", float, "error_dx when the reference computes in the same dtype"),
    "error_dresidual": FactKind("ratio", float, "max |x - ref| / max |ref| of the residual's gradient"),
    "error_same_dtype_dresidual": FactKind(
        "ratio", float, "error_dresidual when the reference computes in the same dtype"
    ),
    "error_dweight": FactKind("ratio", float, "max |x - ref| / max |ref| of the weight's gradient"),
    "error_same_dtype_dweight": FactKind("ratio", float, "error_dweight when the reference computes in the same dtype"),
    # Tiles of attention's kernels
    "architecture": FactKind("", str, "the GPU's architecture, such as sm_90"),
    "device_shared_bytes": FactKind("bytes", float, "shared memory that a block can have"),
    "check_s": FactKind("s", float, "time to check every tile"),
    "best": FactKind("", str, "the fastest tile"),
    "in_use": FactKind("", str, "the tile in the table"),
    "in_use_record": FactKind("", str, "the measurement that the table's tile rests on"),
    "in_use_time": FactKind("s", float, "time of the table's tile"),
    "tiles_tried": FactKind("count", int, "number of tiles tried"),
    "error": FactKind("ratio", float, "max |x - ref| / max |ref| of one tile"),
    "error_ratio": FactKind("ratio", float, "the error over the allowed error"),
    "wrong": FactKind("", str, "why the tile is wrong"),
    "registers": FactKind("count", int, "registers per thread of the compiled kernel"),
    "spilled_bytes": FactKind("bytes", float, "bytes of spilled registers"),
    "shared_bytes": FactKind("bytes", float, "shared memory of the compiled kernel"),
    # Ceilings and collectives
    "counted": FactKind("", str, "which FLOPs or bytes count"),
    "route": FactKind("", str, "path of a copy between GPUs"),
    "multiprocessors": FactKind("count", int, "multiprocessors of the GPU; 1 of a CPU"),
    "payload_bytes": FactKind("bytes", float, "bytes of the whole tensor"),
    "node_bytes": FactKind(
        "bytes", float, "bytes that a node sends to the next node in a call, if messages go in rings"
    ),
    "ring_bytes": FactKind("bytes", float, "bytes of the whole tensor that a ring's busiest rank sends"),
    "messages": FactKind("count", int, "number of messages sent"),
    "message_bytes": FactKind("bytes", float, "bytes of all messages together"),
    # A run of somebody's own script
    "steps_seen": FactKind("count", int, "steps of the run until the end of this record"),
    "forward_passes": FactKind("count", int, "forward passes of outermost modules with gradients, in this record"),
    "backward_passes": FactKind("count", int, "calls of backward in this record"),
    "skipped_updates": FactKind("count", int, "updates that a gradient scaler left out, in this record"),
    "optimizers": FactKind("count", int, "optimizers that make one step"),
    "watching_s": FactKind("s", float, "time that inspecting and writing took, in this record"),
    "recompilations": FactKind("count", int, "compilations of a function that was compiled before, so far"),
    "graph_breaks": FactKind("count", int, "graph breaks so far"),
    "inspected_step": FactKind("count", int, "number of the inspected step"),
    "profiled_step_s": FactKind("s", float, "time of the inspected step, which its inspection makes slower"),
    "core_wait_s": FactKind(
        "s", float, "the most that a thread waited for a core although it could run, in this record"
    ),
    "others_cpu_share": FactKind("ratio", float, "share of all cores that other processes used, in this record"),
    "gpu_others": FactKind("count", int, "other processes on the GPU"),
    "gpu_others_share": FactKind("ratio", float, "share of the GPU's multiprocessors that they used, in this record"),
    "interrupted_share": FactKind(
        "ratio", float, "share of an inspected step's time on the GPU by which ops took longer than others like them"
    ),
    "trained_elements": FactKind("count", int, "elements of the trained parameters"),
    "matmul_flops": FactKind(
        "flops", float, "FLOPs of the 16-bit matmuls of an inspected step, as far as their shapes are known"
    ),
    "matmul_flops_s": FactKind("s", float, "the device's time for them"),
    "matmul_precision": FactKind("", str, "torch's precision of fp32 matmuls: highest, high or medium"),
    "gradient_messages": FactKind("count", float, "all-reduces of a step that backward started"),
    "gradient_message_elements": FactKind("count", float, "elements of a step's all-reduces that backward started"),
    "gradient_messages_asked_s": FactKind("s", float, "host time of asking for them, in a step"),
    "gradient_message_fixed_s": FactKind("s", float, "time of a message beside that of its elements"),
    "script_folder": FactKind("", str, "folder in which the script was started"),
    "script_source": FactKind("", str, "SHA-256 of the script's file, its first 12 digits"),
    "local_ranks": FactKind("count", int, "ranks on this machine"),
    "launch": FactKind("", str, "word that the ranks that one launcher started on a machine share"),
    "compared_runs": FactKind("count", int, "runs of a script that compare has made one cell of"),
    "applied": FactKind("", str, "changes that trainstep made of the script, as --apply takes them"),
    "not_applied": FactKind("", str, "changes among them that found nothing to change, with the reason"),
    "stopped_after": FactKind("count", int, "steps after which trainstep ended the script"),
    "timed_steps": FactKind("count", int, "steps of the window whose ends wait for the device"),
    "timed_s": FactKind("s", float, "time of that window"),
    "timed_windows": FactKind(
        "count", int, "windows that this process has ended; timed_s and timed_steps are the last one's"
    ),
    "update_share": FactKind(
        "ratio",
        float,
        "share of the optimizer's time inside optimizer.step(); the rest is before it: clipping, unscaling by hand",
    ),
    "fusable_parts": FactKind(
        "count", int, "modules and compiled losses of the script that compute what one of trainstep's ops does"
    ),
    "loader_batch_size": FactKind("count", int, "sequences in a batch of the data loader that was read first"),
    "loader_workers": FactKind("count", int, "worker processes of the data loader that was read first"),
    "script_precision": FactKind("", str, "autocast's dtype, else the weights', else that of fp32 matmuls"),
    "process": FactKind("", str, "which window of a proof the record is of"),
    "turn": FactKind("count", int, "windows before this one, of the processes of a proof that started together"),
    "own_profiler": FactKind("", bool, "the script started torch's profiler itself, after which no step was inspected"),
    "ending": FactKind("", str, "how the script ended; a run without it was killed, or still goes on"),
    "ending_part": FactKind("", str, "part of the step in which the script ended"),
}


def facts_of(**values: Any) -> dict[str, Fact]:
    """Facts with the units declared for their names; None is left out. KeyError for a name that is not declared."""
    return {name: Fact(value=value, unit=FACTS[name].unit) for name, value in values.items() if value is not None}


def wrong_fact(name: str, value: Any) -> str | None:
    """Why this cannot be the value of that fact, or None. A fact that is not declared may have any value."""
    kind = FACTS.get(name)
    if kind is None:
        return None
    if not is_a(value, kind.type):
        return f"cannot be {value_words(value)}: it must be {type_words(kind.type)} ({kind.meaning})"
    if kind.unit and not (limits := limits_of(kind.unit, signed=kind.signed)).allow(value):
        return f"cannot be {value_words(value)}: it must be {limits} ({kind.meaning})"
    return None


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that floating point can represent."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def is_type(hint: Any) -> bool:
    """Whether this is a type that `is_a` can check."""
    return all(kind in _TYPE_WORDS or get_origin(kind) is list for kind in get_args(hint) or (hint,))


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value has a declared type."""
    if type(value) in _classes_of(kind):
        return type(value) not in (int, float) or bool(-_LARGEST <= value <= _LARGEST)
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and first_wrong(value, *get_args(kind)) is None
    return kind is object


def first_wrong(values: Sequence[Any], kind: Any) -> int | None:
    """Index of the first value that does not have the declared type; None where all have it."""
    if kind is object:
        return None
    classes = _classes_of(kind)
    if set(map(type, values)) <= classes:
        # Columns are long, so built-in functions check the whole column at the speed of C.
        if classes.isdisjoint((int, float)):
            return None
        numbers = [value for value in values if value is not None and type(value) is not str]
        if not numbers or (min(numbers) >= -_LARGEST and max(numbers) <= _LARGEST):
            return None
    return next((index for index, value in enumerate(values) if not is_a(value, kind)), None)


def type_words(kind: Any) -> str:
    """A declared type in words: `a whole number or nothing`."""
    if get_origin(kind) is list:
        return f"a list, each of it {type_words(*get_args(kind))}"
    return " or ".join(_TYPE_WORDS.get(member, "a mapping") for member in get_args(kind) or (kind,))


def value_words(value: Any) -> str:
    """The value if it is short, else its type: `'x'`, `a value of type list`."""
    is_short = abs(value) < _LONGEST_WHOLE if isinstance(value, int) else len(ascii(value)) < 80
    if isinstance(value, str | int | float | None) and is_short:
        return repr(value)
    names = {"tuple": "list", "mappingproxy": "mapping", "dict": "mapping"}  # a record's lists and mappings are frozen
    return f"a value of type {names.get(type(value).__name__, type(value).__name__)}"


@functools.cache
def _classes_of(kind: Any) -> frozenset[type]:
    """The classes that values of a declared type have; none for a list, whose elements are checked instead."""
    kinds = set() if get_origin(kind) is list else set(get_args(kind) or (kind,))
    return frozenset(kinds | {int} if float in kinds else kinds)
