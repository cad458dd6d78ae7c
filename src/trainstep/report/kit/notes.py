"""Writes the notes and the provenance of a report: what was run, where, and by which conventions."""

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep import __version__
from trainstep.config.instruments import INSTRUMENTS, resolve, says
from trainstep.config.machine import machine_spec
from trainstep.config.model import size_names
from trainstep.config.parsing import build_run, fields_of, to_plain
from trainstep.config.run import RunConfig
from trainstep.records.record import FORMAT, Environment
from trainstep.report.kit.forms import failure_word, gibibytes, listed, percent, rate_words, ratio_words
from trainstep.report.kit.rows import Row, flat_config, known_mfu, machines, of_workload, words
from trainstep.report.kit.visible import one_line

_DISTURBED = 0.8
"""A profiler slows a step. If the profiled step takes less than this share of the timed steps' time, those were disturbed."""
Configs = Sequence[dict[str, object]]
_SUMMARISED = ("batch_size", "precision", "attention", "compile", "mode")
_ATTENTION = ("direction", "mask", "dtype", "head_dim", "seq")
Facts = list[tuple[str, str]]


def notes(rows: Sequence[Row]) -> list[str]:
    """One sentence each: failures, mixed machines, clocks, rates, what peak memory means, why steps were not captured, MFU."""
    failures = failure_counts(rows)
    sentences = [f"{failures}."] if failures else []
    sentences += mixed_machines(rows)
    if any(row.record.fact("timing") == "cuda_events" for row in rows):
        sentences.append(
            "Phases on a GPU are device time between CUDA events; the total step is host time with synchronisation, so the "
            "phases need not add up to it."
        )
    timed = [row for row in rows if "step" in row.record.samples and "tokens" in row.record.facts]
    if timed:
        tables_say = all(says(row.record.workload, "spread") for row in timed)
        what = "Rates" if tables_say else "Times are medians ± half the interquartile range, rates"
        sentences.append(f"{what} (tokens/s, TFLOP/s, MFU) are over the median step.")
    if any(row.record.config.get("update") == "in_backward" for row in timed):
        sentences.append(
            "With update in_backward the time of backward holds the updates that run in it; optimizer is what is left of them."
        )
    beside = {"update": "by_bucket", "transport": "copies", "device": "cuda"}
    if any(all(row.record.config.get(name) == value for name, value in beside.items()) for row in timed):
        sentences.append(
            "With update by_bucket and transport copies buckets are updated beside backward; grad_sync is what is left of messages "
            "and updates."
        )
    sentences += _peak_memory(rows)
    reasons = dict.fromkeys(row.record.fact("capture_left_out") for row in rows)
    sentences += [f"Not in a graph: {one_line(str(reason))}." for reason in reasons if reason is not None]
    return sentences + mfu_conventions(rows)


def mixed_machines(rows: Sequence[Row]) -> list[str]:
    """One sentence if the records come from several kinds of machine or software."""
    labels = list(machines(rows))
    if len(labels) < 2:
        return []
    return [
        f"These records come from {len(labels)} different environments ({'; '.join(labels)}): compare across them with care."
    ]


def failure_counts(rows: Sequence[Row]) -> str:
    """`3 of 20 cells failed: 2 OOM, 1 time-out`; empty if none failed."""
    failures = Counter(failure_word(row.record.failure) for row in rows if row.record.failure)
    if not failures:
        return ""
    kinds = ", ".join(f"{count} {word}" for word, count in failures.items())
    return f"{failures.total()} of {len(rows)} cells failed: {kinds}"


def mfu_conventions(rows: Sequence[Row]) -> list[str]:
    """MFU's convention and the peaks it is a share of, with their source; and GPUs without MFU, because their peak is unknown."""
    known = [utilisation for row in rows if (utilisation := known_mfu(row.record))]
    sentences = []
    if known:
        conventions = {use.convention for use in known}
        peaks = {f"{rate_words(use.peak_flops, 'flop/s')} in {use.dtype} ({use.peak_source})" for use in known}
        sentences = [f"MFU counts {'; '.join(sorted(conventions))}; its peak is {' and '.join(sorted(peaks))}."]
    flops = [row.record for row in rows if "model_flops" in row.record.facts]
    gpus = {record.environment.gpu for record in flops if record.config.get("device") == "cuda"} - {None}
    unknown = [gpu for gpu in sorted(filter(None, gpus)) if not machine_spec(gpu)]
    return [*sentences, *(f"No MFU for {gpu}: trainstep does not know its peak." for gpu in unknown)]


def disturbed_words(slowdown: float | None) -> str:
    """A sentence if the profiled step was much faster than the timed steps: then its shares are not those of the timed steps."""
    if slowdown is None or slowdown >= _DISTURBED:
        return ""
    return (
        f" This is of the profiled step, which took {ratio_words(slowdown)} of the time of the timed steps: something else slowed "
        "those down. Profile again on a quiet machine."
    )


def profiler_notes(fact: Callable[[str], Any]) -> list[str]:
    """How the profiler slowed the step, how work was assigned to phases, and where the trace is."""
    paragraphs = []
    if slowdown := fact("profiler_slowdown"):
        why = ": the profiler slows the host, not the kernels" if slowdown > 1 else ""
        paragraphs.append(f"A profiled step took {slowdown:.2f} times as long as an unprofiled step{why}.")
    replayed, fallback, assigned = (fact(f"{name}_share") for name in ("replayed", "fallback", "assigned"))
    if replayed is not None and fallback is not None:
        paragraphs.append(
            f"{percent(replayed)} % of all device time is of kernels that a graph replayed, whose phase follows from the "
            f"order of an eager step; {percent(fallback)} % has the phase of the work before it."
        )
    elif fallback is not None and assigned is not None:
        paragraphs.append(
            f"{percent(assigned)} % of all device time is assigned to a phase, {percent(fallback)} % only by what the "
            "main thread did at that time."
        )
    if (idle := fact("replay_idle_share")) is not None:
        paragraphs.append(
            f"Between a graph's first kernel and its last the GPU is idle for {percent(idle)} % of the time."
        )
    if split := fact("trace_split"):
        paragraphs.append(str(split))
    if path := fact("trace_file"):
        read = (
            "" if replayed is not None else ", or with --from"
        )  # without an eager step, a graph's kernels have no phases
        paragraphs.append(f"The trace of one step is in {path}: open it at https://ui.perfetto.dev{read}.")
    return paragraphs


def summary(rows: Sequence[Row]) -> str:
    """A paragraph: what was run, where, when, and how many cells failed."""
    parts = [_what(workload, rows) for workload in dict.fromkeys(row.record.workload for row in rows)]
    labels = machines(rows)
    where = " and ".join(labels) if len(labels) < 4 else f"{len(labels)} different machines"
    torch = sorted({row.record.environment.torch or "" for row in rows} - {""})
    software = f" with torch {' and '.join(torch)}" if torch else ""
    days = sorted({row.record.started_at[:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    failures = failure_counts(rows)
    return f"{'; '.join(parts)}. Run on {where}{software}, {when}. {failures + '.' if failures else 'No cell failed.'}"


def _what(workload: str, rows: Sequence[Row]) -> str:
    configs = [flat_config(row.record) for row in of_workload(rows, workload)]
    function = INSTRUMENTS[workload].summary if workload in INSTRUMENTS else ""
    description = resolve(function)(configs) if function else workload
    return f"{len(configs)} cell{'s' if len(configs) > 1 else ''} of {description}"


def attention_words(configs: Configs) -> str:
    """`attention (plain, trainstep): dtype bf16, seq 1024`."""
    by_name = [f"{name.replace('_', ' ')} {values}" for name in _ATTENTION if (values := _values(name, configs))]
    return f"attention ({_values('implementation', configs)}): {', '.join(by_name)}"


def step_words(configs: Configs) -> str:
    """`a training step: small at context 256, precision bf16, 5 warm-ups and 10 timed steps a cell`."""
    by_name = [f"{name.replace('_', ' ')} {values}" for name in _SUMMARISED if (values := _values(name, configs))]
    what = f"a training step: {_values('model', configs)} at context {_values('context', configs)}"
    how_long = f"{_values('warmups', configs)} warm-ups and {_values('steps', configs)} timed steps a cell"
    return ", ".join([what, *by_name, how_long])


def _values(name: str, configs: Configs) -> str:
    values = dict.fromkeys(words(config[name]) for config in configs if name in config)
    return listed(values) if values else ""


def _peak_memory(rows: Sequence[Row]) -> list[str]:
    others = [row for row in rows if not says(row.record.workload, "peak")]
    facts = {name for row in others for name in ("peak_allocated_bytes", "peak_rss_bytes") if name in row.record.facts}
    meanings = {
        "peak_allocated_bytes": "on a GPU, the most memory that tensors held at once",
        "peak_rss_bytes": "on a CPU, the most resident memory of the process",
    }
    return [f"Peak: {'; '.join(meanings[name] for name in sorted(facts))}."] if facts else []


def provenance(rows: Sequence[Row]) -> Facts:
    """(name, value) pairs about the records: commands, files, dates, format, MFU's convention and peak."""
    started = sorted(row.record.started_at for row in rows)
    counts = Counter(row.file for row in rows)
    return [
        *commands(rows),
        *(("record file", f"{file} ({count} record{'s' if count > 1 else ''})") for file, count in counts.items()),
        ("started", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"),
        ("measuring took", f"{sum(row.record.duration_s for row in rows):,.0f} s"),
        ("record format", f"{FORMAT}, read by trainstep {__version__}"),
        *(("model FLOPs", sentence) for sentence in mfu_conventions(rows)),
    ]


def environments(rows: Sequence[Row]) -> list[tuple[str, Facts]]:
    """The facts of each environment, by its label."""
    return [(label, _environment_facts(environment, rows)) for label, environment in machines(rows).items()]


def commands(rows: Sequence[Row]) -> Facts:
    """The commands that records name; for other training steps, the `trainstep bench` whose grid contains their cells."""
    named = dict.fromkeys(row.record.facts["command"].value for row in rows if "command" in row.record.facts)
    typed = [("command", str(command)) for command in named]
    files = dict.fromkeys(row.record.fact("defaults_from") for row in rows)
    typed += [("options from files", str(options)) for options in files if options is not None]
    steps = [row for row in of_workload(rows, "train_step") if "command" not in row.record.facts]
    if not steps:
        return typed
    configs = [flat_config(row.record) for row in steps]
    defaults = {name: value for name, value in to_plain(build_run({})).items() if name != "model"}
    names = [name for name in fields_of(RunConfig) if any(_differs(name, config, defaults) for config in configs)]
    values = {name: list(dict.fromkeys(words(config.get(name)) for config in configs)) for name in names}
    options = [f"--{name.replace('_', '-')} {shlex.quote(','.join(given))}" for name, given in values.items()]
    cells = math.prod(map(len, values.values()))
    more = "" if cells == len(steps) else f"  # a grid of {cells} cells, of which {len(steps)} are here"
    return [*typed, ("to measure again", " ".join(["trainstep bench", *options]) + more)]


def _differs(name: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether the command must name the field; it need not name the shape of a known size."""
    if name == "model":
        return True
    if name not in config:
        return False
    if name not in defaults:
        size = config.get("model")
        return size in size_names() and config[name] != to_plain(build_run({"model": size}))["model"].get(name)
    return bool(config[name] != defaults[name])


def _environment_facts(environment: Environment, rows: Sequence[Row]) -> Facts:
    """Every known field, with the names of all hosts whose environment is otherwise equal."""
    facts = {field.name: getattr(environment, field.name) for field in dataclasses.fields(environment)}
    hosts = {
        other.hostname
        for other in {row.record.environment for row in rows}
        if dataclasses.replace(other, hostname=environment.hostname) == environment
    }
    facts["hostname"] = ", ".join(sorted(hosts))
    for name in ("memory_bytes", "gpu_memory_bytes"):
        if facts[name]:
            facts[name] = f"{gibibytes(facts[name])} GiB"
    dirty = facts.pop("dirty")
    if facts["commit"] is not None:
        facts["commit"] += {True: ", with uncommitted changes", False: ", clean", None: ""}[dirty]
    return [
        (name.removesuffix("_bytes").replace("_", " "), words(value))
        for name, value in facts.items()
        if value not in (None, "", 0)  # a foreign trace does not say where it was recorded
    ]
