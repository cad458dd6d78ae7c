"""Make the calibration of an H200 that comes with trainstep, from the records in results/h200: `python scripts/h200_calibration.py`.

It uses kernels, attention, ops, collectives and ceilings, and no time of a step, with these exceptions, which
`trainstep plan --grade` therefore does not grade:

    profile.jsonl             the host's time per launch (small at 128 tokens), and the gaps between kernels
    profile_captured.jsonl    a graph's launch, and the gaps between its kernels
    end_to_end.jsonl          the host's time per launch, of small at 128 tokens alone
    compile.jsonl             the host's time per compiled block, of small alone

Kernels of small, large and 2.7B are used, so that those of medium and xl are new shapes to the formulas.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainstep.records.record import Record, record_to_plain
from trainstep.records.facts import facts_of
from trainstep.records.store import Store

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "h200"
TARGET = ROOT / "src" / "trainstep" / "plan" / "time" / "calibrations" / "h200.json"
_USED_MODELS = ("small", "large", "2.7B")
_MULTIPROCESSORS = 132
"""Of an H200 SXM, by its data sheet."""
_ADAMW_FUSED = "multi_tensor_apply_kernel FusedAdamMathFunctor"

Row = dict[str, Any]


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text())
    print(f"wrote {TARGET.relative_to(ROOT)}")


def text() -> str:
    """The calibration as it is shipped."""
    return json.dumps(record_to_plain(calibration()), indent=None, separators=(",", ":")).replace("},", "},\n") + "\n"


def calibration() -> Record:
    """A record of the workload `calibration`, in the environment of the copy ceiling."""
    first = read("ops.jsonl")[0]
    tables = {
        "matmuls": [*_fp32_matmuls(), *_bf16_matmuls()],
        "traffic": [*_plain_traffic(), *_compiled_traffic(), *_fused_traffic(), *_small_kernels()],
        "attention": [*_attention()],
        "optimizers": [*_optimizers()],
        "collectives": [*_collectives()],
        "host": [*_host(), *_gaps()],
    }
    return replace(
        first,
        workload="calibration",
        key="0" * 16,
        config={"device": "cuda", "seed": 0},
        duration_s=0.0,
        samples={},
        facts=facts_of(multiprocessors=_MULTIPROCESSORS),
        tables={name: _columns(rows) for name, rows in tables.items()},
    )


def read(name: str) -> list[Record]:
    return [record for record in Store(RECORDS / name).read() if record.failure is None]


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Rows as a table, times rounded to the nanosecond."""
    return {
        name: [float(f"{row[name]:.4g}") if isinstance(row[name], float) else row[name] for row in rows]
        for name in rows[0]
    }


def _profiles() -> Iterator[tuple[Record, Row, list[Row]]]:
    """The profiles of whole steps of the models that are used: record, symbols, kernels."""
    for record in read("profile.jsonl"):
        model = record.config["model"]
        if record.config["mode"] == "step" and model["name"] in _USED_MODELS:
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
    for record, s, kernels in _profiles():
        source = f"profile.jsonl {record.key}"
        by_span = defaultdict[tuple[str, str], list[Row]](list)
        for row in kernels:
            if row["class"] == "matmul":
                by_span[row["phase"], row["span"]].append(row)
        head = by_span["forward", "head"]
        if len(head) == 1:
            yield _matmul("fp32", s["N"], s["V"], s["d"], 1, head[0]["mean_s"], source)
        for row in by_span["forward", "mlp"]:
            if row["calls"] == 2 * s["L"]:
                yield _matmul("fp32", s["N"], s["f"], s["d"], 1, row["mean_s"], source)
            elif row["calls"] == 3 * s["L"]:  # gate, up and down are as many FLOPs
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


_BF16_ROWS = (
    # phase, start of the kernel's layout, calls per block, shapes of the calls
    ("forward", "TNT", 2, [("N", "f", "d")] * 2),
    ("forward", "TNN", 2, [("N", "d", "f"), ("N", "d", "d")]),
    ("backward", "NNT", 1, [("N", "f", "d")]),
    ("backward", "NT", 3, [("f", "d", "N")] * 3),
    ("backward", "NN", 4, [("N", "d", "f")] * 2 + [("N", "d", "d"), ("N", "d", "3d")]),
)


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
    for record, s, kernels in _profiles():
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
            ("backward", "fused__to_copy__unsafe_view_add_div_expand"): ("compiled columns", 18 * stream),
            ("backward", "fused__to_copy_add_div_expand"): ("compiled columns", 14 * stream),
        }
        for row in rows(record, "kernels"):
            for (phase, end), (kind, nbytes) in known.items():
                if row["phase"] == phase and end in row["name"].split(" ")[0] and row["span"] == "compiled":
                    yield _point(kind, nbytes, row["mean_s"], f"profile_captured.jsonl {record.key}")


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
            yield _point("compiled", nbytes, time_s, source)
        elif op == "rotary":
            yield _point("compiled pairs", nbytes, time_s, source)
        elif "norm" in op:
            yield _point("compiled columns", nbytes, time_s, source)


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
        for kind in ("contiguous", "broadcast", "strided", "compiled", "fused"):
            yield _point(kind, 4096, time_s, f"profile_captured.jsonl {record.key}")
        sums = [row["mean_s"] for row in rows(record, "kernels") if row["name"].startswith("triton_per_fused__to_copy__unsafe_view_add_mul_sum_view")]  # fmt: skip
        for kind in ("compiled columns", "fused columns"):
            yield _point(kind, 4096, statistics.mean(sums), f"profile_captured.jsonl {record.key}")


_ATTENTION_FILES = {
    "attention_hopper.jsonl": ("trainstep", "sdpa_cudnn", "sdpa_flash"),
    "attention_hopper_widths.jsonl": ("trainstep", "sdpa_cudnn", "sdpa_flash"),
    "attention_peers.jsonl": ("sdpa_flash", "flex"),
    "attention_fp32.jsonl": ("trainstep", "sdpa_efficient", "flex"),
}
"""Files of attention with the implementations that are today's."""


def _attention() -> Iterator[Row]:
    seen = set()
    for name, implementations in _ATTENTION_FILES.items():
        for record in read(name):
            config = record.config
            if record.workload != "attention" or config["implementation"] not in implementations:
                continue
            if config["mask"] != "causal" or config["direction"] == "both" or config["key_heads"] is not None:
                continue
            if config.get("fp32_precision") not in (None, "tf32x3"):
                continue
            time_s = record.fact("device_busy_s") or statistics.median(record.samples["time_s"].values)
            row = {
                "implementation": config["implementation"],
                "dtype": config["dtype"],
                "direction": config["direction"],
                "batch_heads": config["batch"] * config["heads"],
                "context": config["seq"],
                "head_dim": config["head_dim"],
            }
            if (key := tuple(row.values())) not in seen:
                seen.add(key)
                yield row | {"time_s": time_s, "source": f"{name} {record.key}"}


def _optimizers() -> Iterator[Row]:
    """AdamW's fused kernels in profiles; ours as adamw_chunks.txt has it, with the chunks of ops/adamw_kernel.py."""
    for record, s, kernels in _profiles():
        time_s = sum(row["time_s"] for row in kernels if row["name"] == _ADAMW_FUSED)
        yield _updated("fused", 28 * record.fact("parameters"), time_s, f"profile.jsonl {record.key}")
    line = next(
        line for line in (RECORDS / "adamw_chunks.txt").read_text().splitlines() if line.startswith("efcs chunk 2048 warps 8:")
    )
    time_s = float(line.split(":")[1].split(" ms")[0]) / 1e3
    rate = float(line.split(",")[1].split(" TB/s")[0]) * 1e12
    yield _updated("trainstep", rate * time_s, time_s, "adamw_chunks.txt")
    yield _updated("trainstep", 4096, 10e-6, "profile_captured.jsonl: its small kernels")


def _updated(name: str, nbytes: float, time_s: float, source: str) -> Row:
    return {"name": name, "bytes": float(nbytes), "time_s": time_s, "source": source}


def _collectives() -> Iterator[Row]:
    for name in ("all_reduce.jsonl", "all_reduce_four.jsonl"):
        for record in read(name):
            if record.config["backend"] == "nccl":
                yield {
                    "operation": record.config["operation"],
                    "ranks": record.config["ranks"],
                    "bytes": float(record.fact("payload_bytes")),
                    "time_s": statistics.median(record.samples["time"].values),
                    "source": f"{name} {record.key}",
                }


def _cost(what: str, values: Iterable[float], source: str, *, spread: float = 1.0) -> Row:
    """The middle of the range by ratio, and the range, which other hosts widen by `spread`."""
    ordered = sorted(values)
    return {
        "what": what,
        "time_s": statistics.geometric_mean([ordered[0], ordered[-1]]) if ordered[0] else statistics.mean(ordered),
        "low_s": ordered[0] / spread,
        "high_s": ordered[-1] * spread,
        "source": source,
    }


def _host() -> Iterator[Row]:
    """The host's seconds per launch of steps that wait for it, on a slow machine (profile) and on a fast one (end_to_end)."""
    found = defaultdict[str, list[float]](list)
    launches = {}
    for record in read("profile.jsonl"):
        if record.config["mode"] != "step" or record.config["context"] != 128 or record.config["model"]["name"] != "small":
            continue
        launches = {row["phase"]: row["launches"] for row in rows(record, "host")}
        for phase in ("forward", "backward"):
            found[phase].append(statistics.median(record.samples[phase].values) / launches[phase])
        host = {row["phase"]: row["host_s"] for row in rows(record, "host")}
        tensor_s = host["optimizer"] / record.fact("profiler_slowdown") / _SMALL_TENSORS
    for record in read("end_to_end.jsonl"):
        if record.config["context"] == 128 and record.config["model"]["name"] == "small":
            for phase in ("forward", "backward"):
                found[phase].append(statistics.median(record.samples[phase].values) / launches[phase])
    for phase, values in found.items():
        yield _cost(f"{phase} launch", values, "profile.jsonl and end_to_end.jsonl, small at 128", spread=1.3)
    yield _cost("optimizer tensor", [tensor_s], "profile.jsonl, small at 128", spread=2.0)
    blocks = defaultdict[str, list[float]](list)
    for record in read("compile.jsonl"):
        if record.config["model"]["name"] == "small" and record.config["compile"] == "block":
            for phase in ("forward", "backward"):
                blocks[phase] += [value / 12 for value in record.samples[phase].values]
    for phase, values in blocks.items():
        yield _cost(f"compiled block {phase}", values, "compile.jsonl, small", spread=1.8)


_SMALL_TENSORS = 12 * 7 + 3
"""Parameters of small."""


def _gaps() -> Iterator[Row]:
    """Between kernels, and a graph's launch by kernel: the host's time before the first one starts."""
    graph, launch = [], []
    for record in read("profile_captured.jsonl"):
        step_s, enqueue_s = (statistics.median(record.samples[name].values) for name in ("step", "enqueue"))
        launch.append(enqueue_s / record.fact("pieces"))
        graph.append(max(0.0, step_s - enqueue_s - record.fact("device_busy_s")) / record.fact("pieces"))
    yield _cost("graph", graph, "profile_captured.jsonl: step less busy time and launch, by kernel")
    yield _cost("graph launch", launch, "profile_captured.jsonl: enqueue, by kernel", spread=1.3)
    eager = []
    for record in read("profile.jsonl"):
        if record.fact("launch_bound") or record.config["mode"] != "step" or record.config["context"] < 512:
            continue
        idle = statistics.median(record.samples["step"].values) - record.fact("device_busy_s")
        eager.append(max(0.0, idle / record.fact("launches")))
    yield _cost("eager", eager, "profile.jsonl, device-bound: step less busy time, by launch")


if __name__ == "__main__":
    main()
