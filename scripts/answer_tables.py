"""The tables of docs/answers.md: for each the records under results/ that it is made of, and the function that makes its lines.

A line is a mapping from titles of columns to values in SI. How a value is written follows from the unit in its title, so that
no column is declared twice; a value that is not there is absent, and a cell that failed has the word of its failure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any, NamedTuple

from answer_rows import Line, config_of, done, fact, median, named, over, ratio, where

from trainstep.records.derive import bandwidth
from trainstep.records.tables import table_lines
from trainstep.report.kit.forms import COUNT, DIGITS, ERROR, GIGA, MS, TEXT, Form, in_gib, in_percent
from trainstep.report.kit.rows import PHASES, Row, grouped
from trainstep.report.kit.tables import Column, Entry, Table
from trainstep.report.parallel.tables import StrategyRow, strategies_of

RATIO = Form(text=lambda ratio: f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}")
_FORMS = {
    "(ms)": MS,
    "(s)": Form(text=lambda seconds: f"{seconds:.0f}"),
    "(GiB)": Form(text=lambda size: DIGITS.text(in_gib(size))),
    "(MiB)": Form(text=lambda size: f"{size / 2**20:,g}"),
    "(GB/s)": GIGA,
    "(%)": Form(text=lambda share: DIGITS.text(in_percent(share))),
    "(error)": ERROR,
}
"""The end of a title -> how the values below it are written. Without one of these a whole number is a count, any other a ratio."""
_WEIGHTS = ("parameters", "gradients", "optimizer state")
_WHOLE_GRADIENTS = ("naive", "flat", "overlapped", "bucketed")
_BACKENDS = {
    "nccl 2": "NCCL, 2 GPUs",
    "nccl 4": "NCCL, 4 GPUs",
    "gloo 2": "gloo, 2 ranks",
    "gloo 4": "gloo, 4 ranks",
    "gloo 6": "gloo, 6 ranks",
}
_COMPILED = {"none": "eager", "block": "block by block", "model": "as a whole"}
_SUMS = {
    ("mean of squares", "activations"): "mean of squares of activations",
    ("mean of squares", "scaled to 1,000 at most"): "the same of activations scaled to 1,000 at most",
    ("softmax's sum", "logits"): "softmax's sum over the logits",
}
"""(What is summed, which values) of a numerics record -> the name of that sum in the answer."""


class Shown(NamedTuple):
    """A table of the answers: the function that makes its lines, and the names of the records that it reads."""

    lines: Callable[[Sequence[Row]], Iterable[Line]]
    records: Sequence[str]


def table_of(lines: Iterable[Line]) -> Table:
    """The table of these lines, with every title that a line has."""
    rows = list(lines)
    titles = dict.fromkeys(title for line in rows for title in line)
    return Table.of("", rows, [Column(title, _form(title, [line.get(title) for line in rows])) for title in titles])


def _form(title: str, values: Iterable[Any]) -> Form:
    known = [value for value in values if value is not None and not isinstance(value, Entry)]
    if any(isinstance(value, str) for value in known):
        return TEXT
    plain = COUNT if all(isinstance(value, int) for value in known) else RATIO
    return _FORMS.get(title[title.rfind("(") :], plain)


def phases(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per model and context: medians of the phases, and how much the step varies."""
    for row in where(rows, model=("small", "large", "2.7B"), context=(256, 1024)):
        times = {name: median(row, name) for name in (*PHASES, "step")}
        steps = row.record.samples["step"].values if row.record.failure is None else ()
        yield {
            **named(row, "model", "context"),
            **{f"{name} (ms)": times[name] for name in ("forward", "backward", "optimizer", "step")},
            "backward / forward": over(times["backward"], times["forward"]),
            "standard deviation of the step (%)": stdev(steps) / mean(steps) if steps else None,
        }


def warmups(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per model: the first two steps of a process, and the average of ten steps after each number of warm-ups."""
    for model, model_rows in grouped(rows, lambda row: config_of(row, "model")).items():
        steps = {config_of(row, "warmups"): row.record.samples["step"].values for row in done(model_rows)}
        cold = steps.get(0, ())
        yield {
            "model": model,
            **{f"{name} step (ms)": step for name, step in zip(("first", "second"), cold, strict=False)},
            **{
                f"mean after {count} warm-up{'s' * (count != 1)} (ms)": mean(steps[count])
                for count in sorted(steps, reverse=True)
            },
            "standard deviation after 0 warm-ups (ms)": stdev(cold) if cold else None,
        }


def kernels(rows: Sequence[Row]) -> Iterable[Line]:
    """Two lines per model, forward and the whole step: the kernel that takes most time in any layer, and the share of matmuls.

    Shares come from the table of classes, which has every kernel; the table of kernels adds up the small ones of a phase.
    """
    for row in where(rows, context=256, mode="step"):
        for part, part_phases in {"forward": ("forward",), "whole step": PHASES}.items():
            classes, times, calls = Counter[str](), Counter[str](), Counter[str]()
            for line in table_lines(row.record.tables.get("classes")):
                if line["phase"] in part_phases and line["class"] != "idle":
                    classes[line["class"]] += line["time_s"]
            for line in table_lines(row.record.tables.get("kernels")):
                if line["phase"] in part_phases and line["class"] != "rest":
                    times[line["name"]] += line["time_s"]
                    calls[line["name"]] += line["calls"]
            for name, time_s in times.most_common(1):
                yield {
                    **named(row, "model"),
                    "part": part,
                    "kernel that takes most": _short(name),
                    "calls": round(calls[name]),
                    "kernel's time (ms)": time_s,
                    "kernel's share of the part (%)": over(time_s, classes.total()),
                    "share of all matmuls together (%)": over(classes["matmul"], classes.total()),
                }


def matmul_shares(rows: Sequence[Row]) -> Iterable[Line]:
    """Two lines per model, forward and the whole step: the share of all matmuls together at each context."""
    for model, steps in grouped(where(rows, mode="step"), lambda row: config_of(row, "model")).items():
        for part, part_phases in {"forward": ("forward",), "whole step": PHASES}.items():
            shares = {}
            for row in steps:
                times = Counter[str]()
                for line in table_lines(row.record.tables.get("classes")):
                    if line["phase"] in part_phases and line["class"] != "idle":
                        times[line["class"]] += line["time_s"]
                shares[f"{config_of(row, 'context'):,} tokens (%)"] = over(times["matmul"], times.total())
            yield {"model": model, "part": part, **shares}


def _short(kernel: str) -> str:
    """The short name of a matmul: family, which operand is transposed, tile: `cutlass_80_simt_sgemm nn 256x128x8`."""
    words = kernel.split("_")
    if kernel.startswith("sm80_xmma_gemm"):
        return f"sm80_xmma_gemm {words[6]} {kernel.partition('tilesize')[2].partition('_')[0]}"
    if kernel.startswith("cutlass_80_simt_sgemm"):
        return f"cutlass_80_simt_sgemm {words[6]} {words[4]}x{words[5].partition('x')[0]}"
    return kernel[:40]


def softmax(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per model and phase at context 256, and of large at every context: attention's matmuls against its softmax."""
    steps = where(rows, mode="step")
    for row in (
        *where(steps, context=256),
        *(row for row in where(steps, model="large") if config_of(row, "context") != 256),
    ):
        parts = {(line["phase"], line["part"]): line for line in table_lines(row.record.tables.get("attention"))}
        for phase in dict.fromkeys(phase for phase, _ in parts):
            matmul, exponential = parts[phase, "matmuls"], parts[phase, "softmax"]
            yield {
                **named(row, "model", "context"),
                "phase": phase,
                "matmuls (ms)": matmul["time_s"],
                "softmax (ms)": exponential["time_s"],
                "mask, scale and copies (ms)": parts[phase, "mask, scale and copies"]["time_s"],
                "time, matmuls / softmax": over(matmul["time_s"], exponential["time_s"]),
                "FLOPs, matmuls / softmax": over(matmul["flops"], exponential["flops"]),
            }


def dtypes(rows: Sequence[Row]) -> Iterable[Line]:
    """One line for all modules of a kind whose outputs have the same dtypes: these dtypes under each precision."""
    outputs: dict[tuple[str, str], Line] = {}
    for row in where(rows, model="small", precision=("fp32", "bf16_autocast", "fp16_autocast", "bf16")):
        for line in table_lines(row.record.tables.get("dtypes")):
            module = line["module"].rpartition("blocks.0-11.")[2], line["kind"]
            outputs.setdefault(module, {})[config_of(row, "precision")] = line["output"]
    leaves = [module for module in outputs if module[1] not in ("SelfAttention", "SwiGLU", "Block")]
    for modules in grouped(leaves, lambda module: (module[1] or module[0], *outputs[module].values())).values():
        yield {"modules": ", ".join(name for name, _ in modules), "kind": modules[0][1], **outputs[modules[0]]}


def sums(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per sum in the small model's fp32 cell (other cells have the same): its median error with each accumulator."""
    lines: dict[str, Line] = {name: {"sum": name} for name in _SUMS.values()}
    for row in where(rows, model="small", precision="fp32"):
        for line in table_lines(row.record.tables.get("reductions")):
            if (line["what"], line["values"]) in _SUMS:
                lost = line["error_median"] is None
                value = Entry(text="all lost") if lost else line["error_median"]
                title = f"{line['numbers']} numbers, {line['accumulator']} accumulator (error)"
                lines[_SUMS[line["what"], line["values"]]][title] = value
    return lines.values()


def peaks(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per context and precision: the peak of forward alone and of a whole step."""
    cells = grouped(rows, lambda row: tuple(named(row, "context", "precision").items()))
    for config, cell_rows in cells.items():
        by_mode = {config_of(row, "mode"): row for row in cell_rows}
        ledger = table_lines(by_mode["step"].record.tables.get("ledger")) if "step" in by_mode else []
        bytes_at_peak = {line["line"]: line["peak"] for line in ledger}
        yield {
            **dict(config),
            "forward alone (GiB)": fact(by_mode.get("forward_no_grad"), "peak_allocated_bytes"),
            "whole step (GiB)": fact(by_mode.get("step"), "peak_allocated_bytes"),
            "activations at that peak (GiB)": bytes_at_peak.get("activations"),
        }


def largest(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per context: a tensor of the residual stream, beside the largest allocations at the peak of a step."""
    for row in where(rows, mode="step", precision="fp32"):
        counts = Counter[tuple[str, int]]()
        for line in table_lines(row.record.tables.get("allocations")):
            counts["weight" if line["category"] in _WEIGHTS else line["category"], line["bytes"]] += line["count"]
        stream = fact(row, "residual_stream_bytes")
        shown: Line = {**named(row, "context"), "a tensor of the residual stream (MiB)": stream}
        for kind, name in {"weight": "weights, gradients and moments", "activations": "activations"}.items():
            sizes = [(size, count) for (of, size), count in counts.items() if of == kind]
            size, count = max(sizes, default=(None, None))
            shown |= {f"{name}: largest (MiB)": size, f"{name}: number of that size": count}
        yield {**shown, "largest activation / residual stream": over(shown["activations: largest (MiB)"], stream)}


def plain_memory(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per length: the matrices that attention written out holds, and its peak, 64 wide."""
    cells = where(rows, head_dim=64, implementation="plain", seq=(4096, 8192, 16384))
    for seq, length_rows in grouped(cells, lambda row: config_of(row, "seq")).items():
        by_direction = {config_of(row, "direction"): row for row in length_rows}
        matrix, peak = (fact(by_direction.get("backward"), name) for name in ("scores_bytes", "peak_bytes"))
        yield {
            "positions": seq,
            "a matrix of scores (GiB)": matrix,
            "held for backward (GiB)": fact(by_direction.get("forward"), "held_bytes"),
            "peak of forward (GiB)": fact(by_direction.get("forward"), "peak_bytes"),
            "peak of backward (GiB)": peak,
            "peak of backward / a matrix of scores": over(peak, matrix),
        }


def compiled_attention(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per length and width: attention written out, eager and compiled."""
    cells = where(rows, head_dim=(16, 128), seq=(1024, 4096, 16384))
    shapes = grouped(cells, lambda row: (config_of(row, "seq"), config_of(row, "head_dim")))
    for (seq, width), shape_rows in sorted(shapes.items()):
        by = {(config_of(row, "implementation"), config_of(row, "direction")): row for row in shape_rows}
        line: Line = {"positions": seq, "width": width}
        for direction in ("forward", "backward"):
            eager, compiled = (by.get((name, direction)) for name in ("plain", "plain_compiled"))
            eager_s, compiled_s = (median(row, "time_s") for row in (eager, compiled))
            line |= {f"{direction} (ms)": eager_s, f"compiled {direction} (ms)": compiled_s}
            line |= {f"{direction}, compiled / eager": over(compiled_s, eager_s)}
        peak_bytes = (fact(by.get((name, "backward")), "peak_bytes") for name in ("plain_compiled", "plain"))
        yield {**line, "peak of backward, compiled / eager": over(*peak_bytes)}


def compiled_model(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per model: the step eager, with each block compiled, and compiled as a whole."""
    for model, model_rows in grouped(rows, lambda row: config_of(row, "model")).items():
        by_compile = {config_of(row, "compile"): row for row in model_rows}
        ratios = {name: ratio(by_compile.get("none"), by_compile.get(name)) for name in ("block", "model")}
        yield {
            "model": model,
            **{f"{title} (ms)": median(by_compile.get(name), "step") for name, title in _COMPILED.items()},
            **{f"{_COMPILED[name]} / eager": known.ratio if known else None for name, known in ratios.items()},
            **{f"compiling {_COMPILED[name]} (s)": fact(by_compile.get(name), "compile_s") for name in ratios},
        }


def flash(rows: Sequence[Row], dtype: str) -> Iterable[Line]:
    """One line per length: forward and backward of plain attention and of ours in a dtype, and how many times as fast ours is."""
    lengths = (1024, 4096, 8192, 16384, 32768, 65536)
    cells = where(rows, dtype=dtype, direction="both", seq=lengths)
    for seq, length_rows in sorted(grouped(cells, lambda row: config_of(row, "seq")).items()):
        by = {
            (config_of(row, "implementation"), config_of(row, "head_dim")): median(row, "time_s") for row in length_rows
        }
        yield {
            "positions": seq,
            **{f"{name}, 64 wide (ms)": by.get((name, 64)) for name in ("plain", "trainstep")},
            **{
                f"times as fast, {width} wide": over(by.get(("plain", width)), by.get(("trainstep", width)))
                for _, width in sorted(by)
            },
        }


def all_reduce(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per size: time and bus bandwidth of an all-reduce by backend and number of ranks."""
    measured = [row for row in where(rows, operation="all_reduce") if row.record.failure is None]
    sizes = grouped(measured, lambda row: config_of(row, "mib"))
    for mib, size_rows in sorted(sizes.items()):
        if 0.001 < mib < 0.05:  # only latency, which the smallest size shows already
            continue
        by = {f"{config_of(row, 'backend')} {config_of(row, 'ranks')}": row for row in size_rows}
        speeds = {name: bandwidth(row.record) for name, row in by.items()}
        line: Line = {"size (MiB)": mib * 2**20}
        for name, title in _BACKENDS.items():
            speed = speeds.get(name)
            line |= {f"{title} (ms)": median(by.get(name), "time")}
            line |= {f"{title} (GB/s)": speed.bus_bytes_per_s if speed else None}
        yield line


def synchronised(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per parallel strategy that keeps whole gradients: its messages, and what they add to the step without them."""
    ways = {way.sync: way for way in strategies_of(where(rows, model="medium", context=256))}
    for way in (ways[name] for name in _WHOLE_GRADIENTS if name in ways):
        yield {
            "strategy": way.sync,
            "messages": sum(line["messages"] for line in way.lines("traffic")),
            "step of none (ms)": median(way.base, "step"),
            "step (ms)": median(way.row, "step"),
            **_against_none(way),
            "transfer (ms)": way.communication.get("transfer_s"),
            "exposed communication (ms)": way.communication.get("exposed_s"),
            "peak (GiB)": fact(way.row, "peak_allocated_bytes"),
        }


def sharded(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per parallel strategy: what rank 0 holds at points of a step, what a rank sends, and what that costs."""
    for way in strategies_of(rows):
        lines = [line for line in way.lines("memory_points") if line["rank"] == 0]
        bytes_at = {(line["point"], line["line"]): line["bytes"] for line in lines}
        points = ("after init", "after backward", "after step")
        yield {
            **named(way.row, "model"),
            "strategy": way.sync,
            "optimizer state (GiB)": bytes_at.get(("after forward", "optimizer state")),
            **{f"allocated {point} (GiB)": bytes_at.get((point, "allocated")) for point in points},
            "peak (GiB)": fact(way.row, "peak_allocated_bytes"),
            "sent per rank, at most (GiB)": fact(way.row, "wire_bytes"),
            **{f"{name} (ms)": median(way.row, name) for name in ("optimizer", "step")},
            **_against_none(way),
        }


def three_numbers(rows: Sequence[Row]) -> Iterable[Line]:
    """One line per whole step: what tensors held, what the allocator took, what nvidia-smi shows, and their differences."""
    cells = {tuple(named(row, "model", "context", "precision").values()): row for row in rows}
    for row in done(where(cells.values(), mode="step", context=256)):
        allocated, reserved, driver = (
            row.record.fact(name) for name in ("peak_allocated_bytes", "peak_reserved_bytes", "driver_bytes")
        )
        yield {
            **named(row, "model", "context", "precision"),
            "allocated (GiB)": allocated,
            "reserved (GiB)": reserved,
            "nvidia-smi (GiB)": driver,
            "reserved - allocated (GiB)": reserved - allocated,
            "CUDA context and kernels (GiB)": row.record.fact("context_bytes") + row.record.fact("kernels_bytes"),
            "unexplained (%)": row.record.fact("driver_residual_share"),
        }


TABLES: Mapping[str, Shown] = {
    "phases": Shown(phases, ["h200/end_to_end"]),
    "warmups": Shown(warmups, ["h200/warmup"]),
    "kernels": Shown(kernels, ["h200/profile"]),
    "matmul_shares": Shown(matmul_shares, ["h200/profile"]),
    "softmax": Shown(softmax, ["h200/profile"]),
    "dtypes": Shown(dtypes, ["h200/numerics"]),
    "sums": Shown(sums, ["h200/numerics"]),
    "peaks": Shown(peaks, ["h200/memory"]),
    "largest": Shown(largest, ["h200/memory"]),
    "plain_memory": Shown(plain_memory, ["h200/attention"]),
    "compiled_attention": Shown(compiled_attention, ["h200/attention"]),
    "compiled_model": Shown(compiled_model, ["h200/compile"]),
    "flash": Shown(partial(flash, dtype="bf16"), ["h200/flash"]),
    "flash_fp32": Shown(partial(flash, dtype="fp32"), ["h200/flash"]),
    "all_reduce": Shown(all_reduce, ["h200/all_reduce", "h200/all_reduce_four"]),
    "synchronised": Shown(synchronised, ["h200/ddp_medium_replicated", "h200/ddp_medium"]),
    "sharded": Shown(sharded, ["h200/sharded_optimizer"]),
    "three_numbers": Shown(three_numbers, ["h200/memory_sizes", "h200/memory"]),
}


def _against_none(way: StrategyRow) -> Line:
    """The step's ratio to that of ranks without communication."""
    known = ratio(way.base, way.row)
    interval = f"{known.low:.2f} to {known.high:.2f}" if known and known.low and known.high else None
    return {"step / none": known.ratio if known else None, "99 % interval": interval}
