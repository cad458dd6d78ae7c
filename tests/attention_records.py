"""Constructed records of the workload `attention`: plausible times of an H200, with failures and doubts."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from record_maker import ENVIRONMENT
from trainstep.config.attention import AttentionConfig
from trainstep.config.parsing import config_hash, to_plain
from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.records.record import Fact, Failure, Record, Samples

PEERS = (
    *("plain", "plain_compiled", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex"),
    *("flash_attn", "flash_attn_4"),
)
OURS = "trainstep"
CAPACITY_BYTES = 140 * 2**30
_TFLOPS = {
    "plain": 30,
    "plain_compiled": 75,
    "sdpa_math": 24,
    "sdpa_efficient": 190,
    "sdpa_flash": 290,
    "sdpa_cudnn": 450,
    "flex": 370,
    "flash_attn": 280,
    "flash_attn_4": 520,
    OURS: 410,
}
_QUADRATIC = ("plain", "plain_compiled", "sdpa_math")
_DEFAULTS: dict[str, Any] = {"batch": 1, "heads": 16, "dtype": "bf16", "direction": "forward", "device": "cuda"}
_UNITS = {"flops": "flops", "has_nan": "count", "deterministic": "count", "launch_bound": "", "which_ran": ""}


def attention(
    *,
    time_s: Sequence[float] | None = None,
    facts: dict[str, Any] | None = None,
    failure: Failure | None = None,
    **values: Any,
) -> Record:
    """The record of a cell: its time follows from its FLOPs unless given; it fails if memory is too small or a peer refuses."""
    attention_config = AttentionConfig(**{**_DEFAULTS, **values})
    config = to_plain(attention_config)
    failure = failure or _failure(attention_config)
    times = (
        [_time_s(attention_config) * (1 + 0.004 * (step % 5)) for step in range(20)] if time_s is None else list(time_s)
    )
    values_of_facts = {**_facts(attention_config), **(facts or {})}
    if failure:
        values_of_facts = {
            name: value for name, value in values_of_facts.items() if name.endswith("_bytes") and name not in _MEASURED
        }
    samples = {"time_s": times, "host_s": [3.1e-5] * len(times)}
    return Record(
        workload="attention",
        key=config_hash("attention", config),
        config=config,
        environment=ENVIRONMENT,
        started_at="2026-11-21T08:00:00Z",
        duration_s=3.0,
        samples={} if failure else {n: Samples(unit="s", values=tuple(v), warmups=(1.0,)) for n, v in samples.items()},
        facts={
            name: Fact(value=value, unit=_unit(name)) for name, value in values_of_facts.items() if value is not None
        },
        failure=failure,
    )


def lengths(
    seqs: Iterable[int] = (256, 1024, 4096, 16384, 65536),
    head_dims: Iterable[int] = (64, 128),
    dtypes: Iterable[str] = ("bf16", "fp32"),
    directions: Iterable[str] = ("forward", "backward"),
    implementations: Sequence[str] = (*PEERS, OURS),
) -> list[Record]:
    """A sweep over lengths, with the implementations interleaved in each configuration."""
    return [
        attention(
            implementation=name,
            seq=seq,
            head_dim=head_dim,
            dtype=dtype,
            direction=direction,
            facts={
                "interleaving": "live",
                "turn_steps": 1,
                "interleaving_group": f"{seq} {head_dim} {dtype} {direction}",
            },
        )
        for dtype in dtypes
        for direction in directions
        for head_dim in head_dims
        for seq in seqs
        for name in implementations
    ]


def tiles(seqs: Iterable[int] = (1024, 4096, 16384)) -> list[Record]:
    """Our kernel with query and key tiles of 16 to 128; the largest pair needs more shared memory than there is."""
    sizes = (16, 32, 64, 128)
    return [_tile(seq, query, key) for seq in seqs for query in sizes for key in sizes]


def _tile(seq: int, query: int, key: int) -> Record:
    chosen = {"seq": seq, "block_q": query, "block_k": key, "num_warps": 4, "num_stages": 2}
    need = 4 * (query + 2 * key) * 128
    if query * key == 128 * 128:
        reason = f"illegal tile: 128 x 128 needs {need:,} bytes of shared memory, and a block of this GPU has 166,912"
        return attention(**chosen, failure=Failure(kind="unsupported", phase="build", message=reason))
    slower = 1 + 0.22 * abs(math.log2(query / 128)) + 0.15 * abs(math.log2(key / 64))
    return attention(
        **chosen,
        time_s=[slower * _time_s(AttentionConfig(**_DEFAULTS, **chosen)) * (1 + 0.01 * (i % 3)) for i in range(9)],
    )


def _flops(config: AttentionConfig) -> int:
    shape = (config.batch * config.heads, config.seq, config.key_count, config.head_dim)
    causal = config.mask == "causal"
    parts = {"forward": attention_flops, "backward": attention_backward_flops}
    directions = parts if config.direction == "both" else [config.direction]
    return sum(parts[direction](*shape, causal=causal) for direction in directions)


def _time_s(config: AttentionConfig) -> float:
    slow = {"bf16": 1.0, "fp16": 1.0, "fp32": 8.0}[config.dtype] * (1.2 if config.direction == "backward" else 1)
    return 1.2e-5 + slow * _flops(config) / (_TFLOPS.get(config.implementation, 100) * 1e12)


def _unit(name: str) -> str:
    return "bytes" if name.endswith("_bytes") else "ratio" if name.startswith("error") else _UNITS.get(name, "")


_MEASURED = ("peak_bytes", "held_bytes")
"""Bytes that are known only after a run."""


def _facts(config: AttentionConfig) -> dict[str, Any]:
    element = 4 if config.dtype == "fp32" else 2
    rows = config.batch * config.heads * config.seq
    tensor_bytes = rows * config.head_dim * element
    quadratic = rows * config.key_count * element if config.implementation in _QUADRATIC else 0
    backward = config.direction != "forward"
    gradients = 4 * tensor_bytes if backward else 0
    needed = 3 * tensor_bytes + 2 * quadratic + tensor_bytes + gradients
    epsilon = 1e-6 if config.dtype == "fp32" else 4e-3
    ours = config.implementation == OURS
    gradient_errors = {f"error_{name}": 1.4 * epsilon if backward else None for name in ("dq", "dk", "dv")}
    return {
        "flops": _flops(config),
        "peak_bytes": needed,
        "held_bytes": 4 * tensor_bytes + quadratic if backward else None,
        "inputs_bytes": 3 * tensor_bytes,
        "scores_bytes": quadratic,
        "softmax_bytes": quadratic,
        "output_bytes": tensor_bytes,
        "gradients_bytes": gradients,
        "needed_bytes": needed,
        "error_output": epsilon,
        "error_lse": epsilon / 10 if ours else None,
        **gradient_errors,
        "error_same_dtype": 1.1 * epsilon,
        "has_nan": 0,
        "deterministic": int(ours or not (backward and config.implementation in ("sdpa_flash", "sdpa_efficient"))),
        "launch_bound": config.seq < 512,
        "which_ran": {"sdpa_flash": "pytorch_flash::flash_fwd_kernel"}.get(config.implementation, "triton_kernel"),
    }


def _failure(config: AttentionConfig) -> Failure | None:
    if config.refusal:
        return Failure(kind="unsupported", phase="build", message=config.refusal)
    needed = _facts(config)["needed_bytes"]
    if needed <= CAPACITY_BYTES:
        return None
    asked_bytes = config.seq**2 * config.heads * 2
    return Failure(
        kind="out_of_memory",
        phase="forward",
        message=f"ran out of memory in forward asking for {asked_bytes:,} bytes",
        asked_bytes=asked_bytes,
        allocated_bytes=CAPACITY_BYTES // 2,
        capacity_bytes=CAPACITY_BYTES,
    )
