"""Reads seconds of single kernels from results/h200: matmuls by shape, and kernels that move a known number of bytes.

Profiles of small, large and 2.7B are used, so that kernels of medium and xl are new shapes to the formulas.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainstep.records.record import Record
from trainstep.records.store import Store

RECORDS = Path(__file__).parents[1] / "results" / "h200"
USED_MODELS = ("small", "large", "2.7B")

Row = dict[str, Any]


def read(name: str) -> list[Record]:
    """The records of a file without those of failures."""
    return [record for record in Store(RECORDS / name).read() if record.failure is None]


def matmuls() -> Iterator[Row]:
    """Rows of the table `matmuls`."""
    yield from _fp32_matmuls()
    yield from _bf16_matmuls()


def kernel_traffic() -> Iterator[Row]:
    """Rows of the table `traffic`."""
    yield from _plain_traffic()
    yield from _compiled_traffic()
    yield from _fused_traffic()
    yield from _small_kernels()


def profiles() -> Iterator[tuple[Record, Row, list[Row]]]:
    """The profiles of whole steps of the models that are used: record, symbols, kernels."""
    for record in read("profile.jsonl"):
        model = record.config["model"]
        if record.config["mode"] == "step" and model["name"] in USED_MODELS:
            yield record, _symbols(record), rows(record, "kernels")


def _symbols(record: Record) -> Row:
    model, batch, context = record.config["model"], record.config["batch_size"], record.config["context"]
    return {
        "B": batch,
        "S": context,
        "N": batch * context,
        "d": model["d_model"],
        "f": model["d_ff"],
        "H": model["heads"],
        "D": model["d_model"] // model["heads"],
        "V": model["vocab_size"],
        "L": model["layers"],
    }


def rows(record: Record, table: str) -> list[Row]:
    columns = record.tables[table]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _matmul(dtype: str, m: int, n: int, k: int, batch: int, time_s: float, source: str) -> Row:
    return {"dtype": dtype, "m": m, "n": n, "k": k, "batch": batch, "time_s": time_s, "source": source}


def _fp32_matmuls() -> Iterator[Row]:
    """Products whose shape follows from span and number of calls; where one kernel's row has several shapes it is left out."""
    for record, s, kernels in profiles():
        source = f"profile.jsonl {record.key}"
        by_span = defaultdict[tuple[str, str], list[Row]](list)
        for row in kernels:
            if row["class"] == "matmul":
                by_span[row["phase"], row["span"]].append(row)
        head = by_span["forward", "head"]
        if len(head) == 1:
            yield _matmul("fp32", s["N"], s["V"], s["d"], 1, head[0]["mean_s"], source)
        for row in by_span["forward", "mlp"]:
            if row["calls"] == 2 * s["L"] or row["calls"] == 3 * s["L"]:
                yield _matmul("fp32", s["N"], s["f"], s["d"], 1, row["mean_s"], source)
        whole = [row for row in by_span["forward", "attention projections"] if row["calls"] == s["L"]]
        if len(whole) == 2:
            qkv, output = sorted(whole, key=lambda row: -row["mean_s"])
            yield _matmul("fp32", s["N"], 3 * s["d"], s["d"], 1, qkv["mean_s"], source)
            yield _matmul("fp32", s["N"], s["d"], s["d"], 1, output["mean_s"], source)
        batch = s["B"] * s["H"]
        for phase, span, shape in (
            ("forward", "attention scores", (s["S"], s["S"], s["D"])),
            ("forward", "attention values", (s["S"], s["D"], s["S"])),
            ("backward", "attention scores", (s["S"], s["D"], s["S"])),
        ):
            for row in by_span[phase, span]:
                yield _matmul("fp32", *shape, batch, row["mean_s"], source)


def _bf16_matmuls() -> Iterator[Row]:
    """Rows of one shape, or of shapes that are told apart by their shortest and longest call."""
    for record in read("profile_captured.jsonl"):
        s = _symbols(record) | {"3d": 3 * _symbols(record)["d"]}
        source = f"profile_captured.jsonl {record.key}"
        for row in rows(record, "kernels"):
            if row["class"] != "matmul":
                continue
            calls = round(row["calls"] / s["L"])
            if row["span"] == "head" and row["phase"] == "forward":
                yield _matmul("bf16", s["N"], s["V"], s["d"], 1, row["mean_s"], source)
            elif row["phase"] == "forward" and calls == 1:
                yield _matmul("bf16", s["N"], s["3d"], s["d"], 1, row["mean_s"], source)
            elif row["phase"] == "forward" and calls == 2 and row["min_s"] > 0.8 * row["mean_s"]:
                yield _matmul("bf16", s["N"], s["f"], s["d"], 1, row["mean_s"], source)
            elif row["phase"] == "forward" and calls == 2:
                yield _matmul("bf16", s["N"], s["d"], s["d"], 1, row["min_s"], source)
                yield _matmul("bf16", s["N"], s["d"], s["f"], 1, 2 * row["mean_s"] - row["min_s"], source)
            elif row["phase"] == "backward" and calls == 3:
                yield _matmul("bf16", s["f"], s["d"], s["N"], 1, row["mean_s"], source)
            elif row["phase"] == "backward" and calls == 4:
                yield _matmul("bf16", s["N"], s["d"], s["d"], 1, row["min_s"], source)
    for record in read("matmul_ceiling.jsonl"):
        n = record.config["n"]
        time_s = statistics.median(record.samples["time"].values)
        yield _matmul("bf16", n, n, n, 1, time_s, f"matmul_ceiling.jsonl {record.key}")


def _point(kind: str, nbytes: float, time_s: float, source: str) -> Row:
    return {"kind": kind, "bytes": float(nbytes), "time_s": time_s, "source": source}


def _plain_traffic() -> Iterator[Row]:
    """Kernels of the plain model in fp32, whose elements are known."""
    for record, s, kernels in profiles():
        source = f"profile.jsonl {record.key}"
        matrix = s["B"] * s["H"] * s["S"] ** 2
        stream, inner = s["N"] * s["d"], s["N"] * s["f"]
        known = {
            ("forward", "mlp", "vectorized_elementwise_kernel MulFunctor"): ("contiguous", 12 * inner),
            ("forward", "mlp", "vectorized_elementwise_kernel silu"): ("contiguous", 8 * inner),
            ("forward", "", "vectorized_elementwise_kernel CUDAFunctor_add"): ("contiguous", 12 * stream),
            ("forward", "attention scores", "vectorized_elementwise_kernel MulFunctor"): ("contiguous", 8 * matrix),
            ("forward", "attention scores", "elementwise_kernel masked_fill"): ("broadcast", 8 * matrix),
            ("forward", "norm", "elementwise_kernel MulFunctor"): ("broadcast", 8 * stream),
            ("forward", "rotary", "elementwise_kernel MulFunctor"): ("strided", 4 * stream),
            ("forward", "rotary", "elementwise_kernel direct_copy"): ("strided", 4 * stream),
            ("forward", "attention values", "elementwise_kernel direct_copy"): ("strided", 8 * stream),
            ("forward", "norm", "reduce_kernel MeanOps"): ("rows", 4 * stream),
            ("backward", "norm", "reduce_kernel sum_functor"): ("columns", 4 * stream),
            ("forward", "attention softmax", "softmax_warp_forward"): ("softmax", 8 * matrix),
        }
        for row in kernels:
            if (key := (row["phase"], row["span"], row["name"])) in known:
                kind, nbytes = known[key]
                yield _point(kind, nbytes, row["mean_s"], source)
        logits = s["N"] * s["V"]
        spans = {
            ("forward", "loss"): ("loss", 8 * logits),
            ("backward", "loss"): ("loss backward", 16 * logits),
            ("backward", "embedding"): ("embedding backward", 8 * stream),
        }
        for row in rows(record, "spans"):
            if (span := (row["phase"], row["span"])) in spans:
                yield _point(*spans[span], row["time_s"], source)


def _compiled_traffic() -> Iterator[Row]:
    """Inductor's kernels under autocast, by the ops that it fused."""
    for record in read("profile_captured.jsonl"):
        s = _symbols(record)
        stream, inner, square = s["N"] * s["d"], s["N"] * s["f"], s["d"] ** 2
        known = {
            ("forward", "to_copy_t_6"): ("compiled", 6 * s["d"] * s["f"]),
            ("forward", "to_copy_t_1"): ("compiled", 18 * square),
            ("forward", "to_copy_t_3"): ("compiled", 6 * square),
            ("forward", "unsafe_view_mul_silu_7"): ("compiled", 6 * inner),
            ("forward", "unsafe_view_add_8"): ("compiled", 12 * stream),
            ("forward", "add_mean_mul_pow_rsqrt_0"): ("compiled", 6 * stream),
            ("forward", "add_mean_mul_pow_rsqrt_5"): ("compiled", 8 * stream),
            ("backward", "to_copy_10"): ("compiled", 6 * s["d"] * s["f"]),
            ("backward", "to_copy_9"): ("compiled", 18 * square),
            ("backward", "silu_silu_backward"): ("compiled", 12 * inner),
            ("backward", "select_select_backward"): ("compiled pairs", 8 * stream),
            ("forward", "permute_select_stack"): ("compiled permuted", 8 * stream),
            ("backward", "clone_permute_view"): ("compiled permuted", 12 * stream),
            ("backward", "unsafe_view_add_mul_sum_view_5"): ("columns", 8 * stream),
            ("backward", "fused__to_copy__unsafe_view_add_div_expand"): ("compiled columns", 18 * stream),
            ("backward", "fused__to_copy_add_div_expand"): ("compiled columns", 14 * stream),
        }
        for row in rows(record, "kernels"):
            for (phase, end), (kind, nbytes) in known.items():
                if row["phase"] == phase and end in row["name"].split(" ")[0] and row["span"] == "compiled":
                    yield _point(kind, nbytes, row["mean_s"], f"profile_captured.jsonl {record.key}")
            if row["span"] == "loss" and row["name"].startswith("unrolled_elementwise_kernel direct_copy"):
                yield _point("widened", 6 * s["N"] * s["V"], row["mean_s"], f"profile_captured.jsonl {record.key}")


def _op_bytes(config: Row) -> tuple[int, int]:
    """Bytes of forward and of backward, in bf16, as block_kernels.py counts them."""
    if config["op"] == "rotary":
        elements = config["tokens"] * config["heads"] * config["head_dim"]
        return 8 * elements, 8 * elements
    elements = config["tokens"] * config["width"]
    return {
        "rms_norm": (4 * elements, 6 * elements),
        "add_rms_norm": (8 * elements, 8 * elements),
        "swiglu": (6 * elements, 12 * elements),
    }[config["op"]]


def _ops(implementation: str) -> Iterator[tuple[str, str, int, float, str]]:
    for record in read("ops.jsonl"):
        config = record.config
        if record.workload != "op" or config["implementation"] != implementation or config["direction"] == "both":
            continue
        if config["op"] in ("rms_norm", "add_rms_norm", "rotary", "swiglu"):
            forward, backward = _op_bytes(config)
            nbytes = forward if config["direction"] == "forward" else backward
            yield config["op"], config["direction"], nbytes, record.fact("device_busy_s"), f"ops.jsonl {record.key}"


def _fused_traffic() -> Iterator[Row]:
    for op, direction, nbytes, time_s, source in _ops("trainstep"):
        columns = direction == "backward" and "norm" in op
        yield _point("fused columns" if columns else "fused", nbytes, time_s, source)
    for op, direction, nbytes, time_s, source in _ops("compile"):
        if direction == "forward":
            yield _point("compiled permuted" if op == "rotary" else "compiled", nbytes, time_s, source)
        elif op == "rotary":
            yield _point("compiled pairs", nbytes, time_s, source)
        elif "norm" in op:
            yield _point("compiled columns", nbytes, time_s, source)


_SUMS = "triton_per_fused__to_copy__unsafe_view_add_mul_sum_view"


def _small_kernels() -> Iterator[Row]:
    """The shortest kernels: those of a few bytes in AdamW's count of steps."""
    names = ("CompareEqFunctor", "logical_not", "MulFunctor", "AbsFunctor")
    for record in read("profile_captured.jsonl"):
        times_s = [
            row["mean_s"]
            for row in rows(record, "kernels")
            if row["phase"].startswith("optim") and row["name"].split(" ")[-1] in names
        ]
        time_s = statistics.mean(times_s)
        for kind in ("contiguous", "broadcast", "strided", "widened", "compiled", "compiled permuted", "fused"):
            yield _point(kind, 4096, time_s, f"profile_captured.jsonl {record.key}")
        sums = [row["mean_s"] for row in rows(record, "kernels") if row["name"].startswith(_SUMS)]
        for kind in ("compiled columns", "fused columns"):
            yield _point(kind, 4096, statistics.mean(sums), f"profile_captured.jsonl {record.key}")
