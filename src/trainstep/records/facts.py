"""Every fact that our own workloads write, declared once: its unit, the type of its value, what it is.

    facts_of(tokens=4096, loss=loss)   # name -> Fact, with the declared units; what is None is left out

A record's facts are held to this when it is read. A workload of one's own may write any others: they are shown as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainstep.records.values import is_a, type_words, value_words


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A value seen once. `unit`: `s`, `bytes`, `flops`, `bytes/s`, `flop/s`, `count`, `ratio`, `Hz`, `W`, `C` or empty (words)."""

    value: Any
    unit: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.value, Mapping | list | tuple):
            raise ValueError(
                f"a fact is one value, not a {type(self.value).__name__}; what has parts goes into a table"
            )


class FactKind(NamedTuple):
    """A declared fact. `type`: as records/values.py reads it."""

    unit: str
    type: Any
    meaning: str


IN_EVERY_ROW: Mapping[str, FactKind] = {
    "peak_allocated_bytes": FactKind("bytes", float, "the most that tensors held on the GPU"),
    "peak_reserved_bytes": FactKind("bytes", float, "the most that torch's allocator had of the GPU"),
    "driver_bytes": FactKind("bytes", float, "what the driver sees of the process"),
    "peak_rss_bytes": FactKind("bytes", float, "the most a CPU's process had resident"),
    "import_s": FactKind("s", float, "importing the workload"),
    "forked": FactKind("", bool, "the process was forked from one that had imported torch"),
    "context_s": FactKind("s", float, "making the CUDA context"),
    "build_s": FactKind("s", float, "building the step"),
    "compile_s": FactKind("s", float, "compiling, so far"),
    "compile_cache": FactKind("", str, "warm: every graph came from the cache on disk; else cold"),
    "captured": FactKind("", str, "what one CUDA graph takes: step, forward and backward, or nothing"),
    "capture_left_out": FactKind("", str, "why something of the step, or all of it, is in no graph"),
    "capture_s": FactKind("s", float, "capturing the step, its warm-ups aside"),
    "capture_pool_bytes": FactKind("bytes", float, "what the graph's memory has of the GPU"),
    "timing": FactKind("", str, "whose clock the phases are from: cuda_events or host_clock"),
    "tokens": FactKind("count", int, "tokens of a step, of all ranks"),
    "parameters": FactKind("count", int, "parameters of the model"),
    "model_flops": FactKind("flops", float, "FLOPs of a step, by flops_convention"),
    "flops": FactKind("flops", float, "FLOPs of a call"),
    "bytes": FactKind("bytes", float, "bytes that a call moves"),
    "rate": FactKind("flop/s", float, "FLOP/s of a call; bytes/s of one that copies"),
    "launch_bound": FactKind("", bool, "the device waited for the host"),
    "power_w": FactKind("W", float, "the GPU's power right behind timed work"),
    "throttle_reasons": FactKind("", str, "why the GPU's clock was held down, seen behind timed work"),
    "peak_bytes": FactKind("bytes", float, "the most allocated during a pass, beyond what was there"),
    "held_bytes": FactKind("bytes", float, "what forward leaves allocated"),
    "error_output": FactKind("ratio", float, "max |x - ref| / max |ref| of the output"),
    "error_dq": FactKind("ratio", float, "max |x - ref| / max |ref| of the queries' gradient"),
    "error_dk": FactKind("ratio", float, "max |x - ref| / max |ref| of the keys' gradient"),
    "error_dv": FactKind("ratio", float, "max |x - ref| / max |ref| of the values' gradient"),
    "error_lse": FactKind("ratio", float, "max |x - ref| / max |ref| of the log-sum-exp"),
    "error_same_dtype": FactKind("ratio", float, "the output's error when the reference computes in the same dtype"),
    "has_nan": FactKind("count", int, "1: a NaN or an infinity came out"),
    "deterministic": FactKind("count", int, "1: two runs were bitwise equal"),
    "which_ran": FactKind("", str, "the kernels or the backend that ran"),
    "error_checked": FactKind("", str, "which part was compared, and against what"),
    "afterwards_failed": FactKind("", str, "what could not be looked at after the timed steps, and why"),
}
"""Shown in the raw rows (CSV, JSON) of any workload, in this order; an instrument's row names what it shows beside them."""

FACTS: Mapping[str, FactKind] = {
    **IN_EVERY_ROW,
    # How the cell was run
    "command": FactKind("", str, "the command line"),
    "defaults_from": FactKind("", str, "options that files gave, and which files"),
    "interleaving": FactKind("", str, "how compared cells took turns: none, live or rounds"),
    "interleaving_group": FactKind("", str, "the same for cells that took turns with each other"),
    "turn_steps": FactKind("count", int, "values of `step` a turn"),
    "process_steps": FactKind("count", int, "values of `step` that each of the cell's processes gave, end to end"),
    "cpu_busy_before": FactKind("ratio", float, "share of all cores that others kept busy just before the cell"),
    "gpu_busy_before": FactKind("ratio", float, "the GPU's utilisation just before the cell"),
    "round": FactKind("count", int, "of a part of a cell that is not whole yet, from 0"),
    "rounds": FactKind("count", int, "parts that a cell which is not whole yet is taken in"),
    # A training step
    "loss": FactKind("", float | str | None, "loss of the last step; `nan` or `inf` in words, for JSON has neither"),
    "compiled_graphs": FactKind("count", int, "graphs that were compiled"),
    "device_busy_s": FactKind("s", float, "the device was at work in one profiled step or pass"),
    "reallocated_step_s": FactKind("s", float, "a step after the allocator's cache was emptied"),
    "profiling_s": FactKind("s", float, "retired: looking at the device after the timed steps"),
    "flops_source": FactKind("", str, "how FLOPs were counted"),
    "flops_convention": FactKind("", str, "which FLOPs count"),
    "flops_dtype": FactKind("", str, "dtype of the matmuls whose FLOPs are counted"),
    "sm_clock_max_hz": FactKind("Hz", float, "the GPU's highest clock"),
    "temperature_c": FactKind("C", float, "the GPU's temperature right behind timed work"),
    "allocation_retries": FactKind("count", int, "the allocator ran out, emptied its cache and waited"),
    "trace_file": FactKind("", str, "where the trace of one step was kept"),
    "trace_split": FactKind("", str, "how a trace that marks no steps was split into them"),
    # Several ranks
    "context_bytes": FactKind("bytes", float, "what the driver gave for the CUDA context"),
    "nccl_bytes": FactKind("bytes", float, "what the driver gave while ranks met"),
    "gpu_other_processes": FactKind(
        "count", int, "processes of others on the GPU; of several ranks the most on any of theirs"
    ),
    "agreement": FactKind("", str, "what was checked to be equal on all ranks"),
    "wire_bytes": FactKind("bytes", float, "what a rank sends at most in a step, by a ring"),
    "expected_wire_bytes": FactKind("bytes", float, "what a rank sends at most in a step, by formula"),
    "expected_peak_bytes": FactKind("bytes", float, "the peak by formula"),
    "expected_peak_point": FactKind("", str, "at which point of a step the peak by formula is"),
    "communication_s": FactKind("s", float, "a message was under way in one profiled step"),
    "waiting_s": FactKind("s", float, "a message was under way, and the last rank had not joined yet"),
    "transfer_s": FactKind("s", float, "a message was under way, and every rank had joined"),
    "exposed_s": FactKind("s", float, "a message was under way and nothing computed"),
    "tail_s": FactKind("s", float, "from the end of computing to the last message of gradients"),
    "trace_failed": FactKind("", str, "why there is nothing from a trace"),
    "fullest_rank": FactKind("", int, "the rank that held most, whose facts the record's are"),
    # Memory
    "peak_requested_bytes": FactKind("bytes", float, "the most that tensors asked for, by the allocator"),
    "timeline_peak_bytes": FactKind("bytes", float, "the most that tensors asked for, by the history of allocations"),
    "timeline_peak_phase": FactKind("", str, "the phase of the peak by the history of allocations"),
    "kernels_bytes": FactKind("bytes", float, "what the driver gave for loaded kernels"),
    "allocated_residual_share": FactKind("ratio", float, "share of what is allocated, without a category"),
    "allocated_residual_bytes": FactKind("bytes", float, "what is allocated, without a category"),
    "driver_residual_share": FactKind("ratio", float, "share of what the driver sees, unexplained"),
    "driver_residual_bytes": FactKind("bytes", float, "what the driver sees, unexplained"),
    "parameter_bytes_each": FactKind("bytes", float, "bytes of weights for each parameter"),
    "gradient_bytes_each": FactKind("bytes", float, "bytes of gradients for each parameter"),
    "optimizer_state_bytes_each": FactKind("bytes", float, "bytes of optimizer state for each parameter"),
    "residual_stream_bytes": FactKind("bytes", float, "one tensor of batch x context x d_model"),
    "residual_stream": FactKind("", str, "how residual_stream_bytes is worked out"),
    "history_full": FactKind("", bool, "the beginning of the history is lost"),
    "process_group": FactKind("", str, "the backend of a group that the model opened, or none"),
    "process_data_bytes": FactKind("bytes", float, "what a CPU's process had at the peak"),
    "snapshot": FactKind("", str, "where the history was kept"),
    "fit_of": FactKind("", str, "the field whose largest value that fits was searched"),
    "memory_limit_bytes": FactKind("bytes", float, "what the cell's process might take"),
    # A profile
    "verdict": FactKind("", str, "what limits the step"),
    "idle_s": FactKind("s", float, "the device had nothing to do, median of the profiled steps"),
    "kernels_s": FactKind("s", float, "device time of a step"),
    "pieces": FactKind("count", float, "kernels and copies of a step; on a CPU ops"),
    "launches": FactKind("count", float, "launches of a step"),
    "profiler_slowdown": FactKind("ratio", float, "a profiled step over one that is not"),
    "assigned_share": FactKind("ratio", float, "share of device time that has a phase"),
    "fallback_share": FactKind("ratio", float, "share of device time that has a phase by the main thread's alone"),
    "attention_split": FactKind("", str, "why attention's parts can or cannot be told apart"),
    "graph_replay_s": FactKind("s", float, "a step replayed as one CUDA graph, mean"),
    "graph_replay_kernels_s": FactKind("s", float, "kernels of the replayed phases, by the profiler"),
    "graph_replay_phases": FactKind("", str, "which phases were replayed as one CUDA graph"),
    "graph_replay_left_out": FactKind("", str, "what the CUDA graph could not hold, and why"),
    "graph_replay_failed": FactKind("", str, "why no graph was replayed"),
    # Numerics
    "error_logits": FactKind("ratio", float, "|x - ref| / |ref| of the logits"),
    "error_loss": FactKind("ratio", float, "|x - ref| / |ref| of the loss"),
    "error_gradient_median": FactKind("ratio", float, "|x - ref| / |ref| of the parameters' gradients, median"),
    "error_gradient_max": FactKind("ratio", float, "|x - ref| / |ref| of the worst gradient"),
    "gradients_without_error": FactKind("count", int, "parameters whose gradient is not finite or zero throughout"),
    "reference": FactKind("", str, "the dtype that errors are held to"),
    "reference_reason": FactKind("", str, "why the reference is not fp64"),
    "logits_module": FactKind("", str, "the module whose output the logits are"),
    "gradient_scale": FactKind("", float, "the loss was multiplied by it"),
    "settled_scale": FactKind("", float, "the largest power of two without an infinite gradient"),
    "no_effect": FactKind("", str, "why autocast changed nothing"),
    # Attention
    "first_call_s": FactKind("s", float, "the first pass, compilation included"),
    "inputs_bytes": FactKind("bytes", float, "bytes of q, k and v"),
    "output_bytes": FactKind("bytes", float, "bytes of the output"),
    "scores_bytes": FactKind("bytes", float, "bytes of scores written out"),
    "softmax_bytes": FactKind("bytes", float, "bytes of softmax written out"),
    "gradients_bytes": FactKind("bytes", float, "bytes of what backward adds"),
    "lse_bytes": FactKind("bytes", float, "bytes of the log-sum-exp"),
    "needed_bytes": FactKind("bytes", float, "the least bytes that the pass needs"),
    "error_same_dtype_dq": FactKind("ratio", float, "error_dq when the reference computes in the same dtype"),
    "error_same_dtype_dk": FactKind("ratio", float, "error_dk when the reference computes in the same dtype"),
    "error_same_dtype_dv": FactKind("ratio", float, "error_dv when the reference computes in the same dtype"),
    "error_same_dtype_lse": FactKind("ratio", float, "error_lse when the reference computes in the same dtype"),
    # Tiles of attention's kernels
    "architecture": FactKind("", str, "the GPU's architecture, as sm_90"),
    "device_shared_bytes": FactKind("bytes", float, "shared memory that a block may have"),
    "check_s": FactKind("s", float, "checking every tile"),
    "best": FactKind("", str, "the fastest tile"),
    "in_use": FactKind("", str, "the tile that the table has"),
    "in_use_record": FactKind("", str, "which measurement the table's tile rests on"),
    "in_use_time": FactKind("s", float, "time of the table's tile"),
    "tiles_tried": FactKind("count", int, "tiles tried"),
    "error": FactKind("ratio", float, "max |x - ref| / max |ref|, of one tile"),
    "error_ratio": FactKind("ratio", float, "the error over what is allowed"),
    "wrong": FactKind("", str, "why the tile is wrong"),
    "registers": FactKind("count", int, "registers a thread of the compiled kernel"),
    "spilled_bytes": FactKind("bytes", float, "bytes of registers that were spilled"),
    "shared_bytes": FactKind("bytes", float, "shared memory of the compiled kernel"),
    # Ceilings and collectives
    "counted": FactKind("", str, "which FLOPs or bytes count"),
    "route": FactKind("", str, "how a peer's copy goes"),
    "payload_bytes": FactKind("bytes", float, "bytes of the whole tensor"),
    "ring_bytes": FactKind("bytes", float, "what a ring's busiest rank sends of the whole tensor"),
    "messages": FactKind("count", int, "messages sent"),
    "message_bytes": FactKind("bytes", float, "bytes of all messages together"),
}


def facts_of(**values: Any) -> dict[str, Fact]:
    """Facts with the units declared for their names; None is left out. KeyError for a name that is not declared."""
    return {name: Fact(value=value, unit=FACTS[name].unit) for name, value in values.items() if value is not None}


def wrong_fact(name: str, value: Any) -> str | None:
    """Why this cannot be the value of that fact, or None; of a fact that is not declared anything can."""
    kind = FACTS.get(name)
    if kind is None or is_a(value, kind.type):
        return None
    return f"cannot be {value_words(value)}: it is {type_words(kind.type)} ({kind.meaning})"
