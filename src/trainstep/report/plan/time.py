"""A predicted step time in words, tables and JSON: by phase and class, tokens per second, MFU, GPU-hours, and every term."""

from typing import Any

from trainstep.config.machine import matmul_dtype
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import GAPS, HOST, MESSAGES, StepTime
from trainstep.report.kit.forms import COUNT, MS, PERCENT, TEXT, listed, milliseconds, three_digits
from trainstep.report.kit.tables import Column, Table, filled

_OPTIONAL = (GAPS, HOST, MESSAGES)
_LONG_S = 10
"""Times from this one on are written in seconds."""


def time_words(predicted: StepTime, tokens: float | None, *, fits: bool = True) -> str:
    """`A step takes 152 ms (141 to 170): 53,900 tokens/s, MFU 41 %; most of it: matmul.`"""
    step = predicted.step
    words = f"A step {'takes' if fits else 'would take'} {interval_words(step)}: {predicted.tokens_per_s:,.0f} tokens/s"
    if (mfu := utilisation(predicted)) is not None:
        words += f", MFU {100 * mfu:.0f} %"
    classes = sorted(predicted.classes.items(), key=lambda item: -item[1])
    words += f"; most of it: {classes[0][0]} {_ms(classes[0][1])} and {classes[1][0]} {_ms(classes[1][1])}."
    if predicted.host_bound:
        faster = (
            "`--capture step` or `--compile block`" if predicted.config.run.compile == "none" else "`--capture step`"
        )
        words += f" The host is slower than the GPU, which {faster} would change."
    if tokens is not None:
        hours = predicted.gpu_hours(tokens)
        words += (
            f" {tokens:,.4g} tokens take {three_digits(hours.time_s)} GPU-hours ({three_digits(hours.low_s)} to "
            f"{three_digits(hours.high_s)})."
        )
    return words


def utilisation(predicted: StepTime) -> float | None:
    """MFU against the data sheet's peak of the matmuls' dtype; None where no peak is known."""
    peak = predicted.calibration.peaks.get(matmul_dtype(predicted.config.run.precision))
    return None if peak is None else predicted.mfu(peak)


def time_tables(predicted: StepTime) -> list[Table]:
    """Time by phase, and by class."""
    return filled(_by_phase(predicted), _by_class(predicted))


def time_terms_table(predicted: StepTime) -> Table:
    """Every term of the device's time with its formula."""
    rows = [
        {
            "phase": line.phase,
            "op": line.op,
            "kind": line.kind,
            "formula": line.formula,
            "count": line.count,
            "time_s": line.time_s,
            "spread": 2 * line.spread,
            "guess": line.guess,
        }
        for line in predicted.lines
    ]
    gaps = "graph" if predicted.is_captured else "eager"
    notes = [
        "Matmuls: fixed + work / rate, in waves of tiles (plan/time/matmul_work.py); attention: fixed + rows + FLOPs / rate; all "
        "else: seconds by bytes of its kind.",
        f"Between kernels: {1e6 * predicted.calibration.gaps.get(gaps, 0.0):.2f} µs.",
        f"Calibration: {predicted.calibration.origin}.",
    ]
    return Table.of(
        "Kernels of a step",
        rows,
        [
            Column("phase", TEXT, names=True),
            Column("op", TEXT, names=True),
            Column("kind", TEXT),
            Column("formula", TEXT),
            Column("kernels", COUNT, "count"),
            Column("time (ms)", MS, "time_s"),
            Column("± (%)", PERCENT, "spread"),
            Column("guessed", TEXT, "guess"),
        ],
        raw=rows,
        note=" ".join(notes),
    )


def time_plain(predicted: StepTime, tokens: float | None) -> dict[str, Any]:
    """The prediction for programs, in seconds."""
    return {
        "step_s": predicted.step.time_s,
        "interval_s": _ends(predicted.step),
        "phases_s": {
            phase: {"time_s": part.time_s, "interval_s": _ends(part)} for phase, part in predicted.phases.items()
        },
        "device_s": {
            phase: {"time_s": part.time_s, "interval_s": _ends(part)} for phase, part in predicted.device.items()
        },
        "host_s": {phase: {"time_s": part.time_s, "interval_s": _ends(part)} for phase, part in predicted.host.items()},
        "classes_s": dict(predicted.classes),
        "messages": {
            "sent_s": predicted.messages.sent_s,
            "payload_bytes": predicted.messages.payload_bytes,
            "exposed_s": predicted.messages.total.time_s,
            "exposed_interval_s": [predicted.messages.total.low_s, predicted.messages.total.high_s],
        },
        "tokens_per_s": predicted.tokens_per_s,
        "model_flops": predicted.model_flops,
        "mfu": utilisation(predicted),
        "gpu_hours": None if tokens is None else predicted.gpu_hours(tokens).time_s,
        "gpu_hours_interval": None if tokens is None else _ends(predicted.gpu_hours(tokens)),
        "calibration": predicted.calibration.origin,
        "guesses": list(predicted.guesses),
    }


def _by_phase(predicted: StepTime) -> Table:
    rows = [
        {
            "phase": phase,
            "time": part.time_s,
            "low": part.low_s,
            "high": part.high_s,
            "device": predicted.device[phase].time_s,
            "host": predicted.host[phase].time_s if phase in predicted.host else None,
            "messages": predicted.messages.of(phase).time_s or None,
        }
        for phase, part in predicted.phases.items()
    ]
    step = predicted.step
    rows.append({"phase": "step", "time": step.time_s, "low": step.low_s, "high": step.high_s})
    columns = [
        Column("phase", TEXT, names=True),
        *(Column(f"{name} (ms)", MS, name) for name in ("time", "low", "high", "device")),
        *(
            Column(f"{title} (ms)", MS, name)
            for title, name in (("host", "host"), ("exposed messages", "messages"))
            if any(row.get(name) for row in rows)
        ),
    ]
    notes = [f"Calibration: {predicted.calibration.origin}."]
    guesses = [*predicted.guesses, *([predicted.messages.guess] if predicted.messages.guess else [])]
    if guesses:
        notes.append(f"Not measured, and so wider: {listed(guesses)}.")
    return Table.of("Time of a step", rows, columns, note=" ".join(notes))


def _by_class(predicted: StepTime) -> Table:
    total = predicted.step.time_s
    rows = [
        {"class": name, "time": time_s, "share": f"{time_s / total:.1%}"}
        for name, time_s in predicted.classes.items()
        if time_s or name not in _OPTIONAL
    ]
    columns = [Column("class", TEXT, names=True), Column("time (ms)", MS, "time"), Column("of the step", TEXT, "share")]
    note = "host: how long the step waits for the host; the GPU works behind it."
    return Table.of("Time by class", rows, columns, note=note if predicted.classes[HOST] else "")


def interval_words(interval: Interval) -> str:
    if interval.time_s >= _LONG_S:
        return f"{_ms(interval.time_s)} ({three_digits(interval.low_s)} to {three_digits(interval.high_s)})"
    return f"{_ms(interval.time_s)} ({milliseconds(interval.low_s)} to {milliseconds(interval.high_s)})"


def _ms(time_s: float) -> str:
    return f"{three_digits(time_s)} s" if time_s >= _LONG_S else f"{milliseconds(time_s)} ms"


def _ends(interval: Interval) -> list[float]:
    return [interval.low_s, interval.high_s]
