"""The answer and the tables of a predicted step: time, memory at each moment, activations by op, the formulas behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.costs.traced_step import TracedStep
from trainstep.plan.activations import every_kept
from trainstep.plan.fleet.fleet_time import FleetTime
from trainstep.plan.live_tensors import CATEGORIES
from trainstep.plan.model_ops import symbols_of
from trainstep.plan.prediction import CONTEXT_BYTES, Cut, Prediction
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import StepTime
from trainstep.plan.traced_memory import HELD, kept_by_label
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import MS, ROUGH_SIZE, SIZE, TEXT, WHOLE, listed, milliseconds, needed_words
from trainstep.report.kit.tables import Column, Table, filled
from trainstep.report.plan.fleet import fleet_columns, fleet_row, fleet_tables, fleet_words
from trainstep.report.plan.fleet import plain as fleet_plain
from trainstep.report.plan.time import time_plain, time_tables, time_words


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A prediction of memory, and of time where the machine is known. `gpu`: the name of the GPU, or none."""

    prediction: Prediction
    gpu: str | None = None
    cuts: Sequence[Cut] = ()
    time: StepTime | None = None
    fleet: FleetTime | None = None
    """The part of `time` that depends on nodes and links; None without them."""
    no_time: str = ""
    """The reason why no time is predicted."""
    tokens: float | None = None
    """Tokens to train on."""


def plan_answer(planned: Planned) -> Answer:
    """Whether it fits and by how much, and what to cut first."""
    prediction = planned.prediction
    need = f"{needed_words(prediction.needed_bytes)} a GPU ({_interval(prediction)})"
    if prediction.fits is None:
        verdict = f"The step needs {need}."
    else:
        spare = needed_words(abs(prediction.spare_bytes))
        where = f"{planned.gpu or 'the GPU'} ({needed_words(prediction.gpu_memory_bytes or 0)})"
        if not prediction.fits:
            verdict = f"Does not fit: the step needs {need}, and on {where} {spare} are missing for its tensors alone."
        elif prediction.spare_bytes < 0:
            verdict = (
                f"Just fits: the step would take {need}, {spare} more than {where} has, so the allocator returns cached memory "
                "and asks again, which takes time."
            )
        elif prediction.is_tight:
            verdict = f"Probably fits: the step needs {need} of {where}, with {spare} to spare."
        else:
            verdict = f"Fits: the step needs {need} of {where}, with {spare} to spare."
    largest = _largest(prediction)
    words = f"Largest at its peak, in {prediction.memory.peak.name}: {largest}."
    if planned.cuts:
        words += f" {_cut_words(prediction, planned.cuts)}"
    if planned.time is not None:
        verdict += f" {time_words(planned.time, planned.tokens, fits=prediction.fits is not False)}"
        verdict += fleet_words(planned.fleet)
    elif planned.no_time:
        words += f" No time: {planned.no_time}."
    return Answer(workload="plan", verdict=verdict, suggestion=words)


def plan_tables(planned: Planned) -> list[Table]:
    """Memory by category at each moment, activations by op at the peak, memory outside the allocator; time first, if known."""
    memory = filled(_moments(planned.prediction), _by_op(planned.prediction), _outside(planned.prediction))
    return memory if planned.time is None else [*time_tables(planned.time), *fleet_tables(planned.fleet), *memory]


def comparison_answer(planned: Sequence[Planned], points: Sequence[Mapping[str, Any]]) -> Answer:
    """How many of several steps fit, and the fastest of these; without a time for any, the one that needs least memory."""
    steps = list(zip(planned, points, strict=True))
    fitting = [(item, point) for item, point in steps if item.prediction.fits is not False]
    count, fits = len(steps), len(fitting)
    known = planned[0].prediction.fits is not None
    where = planned[0].gpu or f"the GPU ({needed_words(planned[0].prediction.gpu_memory_bytes or 0)})"
    share = "All" if fits == count else f"{fits} of" if fits else "None of"
    counted = f"{share} {count} {'fits' if fits < 2 else 'fit'} {where}" if known else f"{count} steps"
    timed = [(item.time, item, point) for item, point in fitting if item.time is not None]
    if timed:
        time, item, point = max(timed, key=lambda one: one[0].tokens_per_s)
        doubt = f", which {_word(item.prediction)} fits" if _word(item.prediction) in ("just", "probably") else ""
        title = "fastest" if fits == count else "fastest that fits"
        result = f"{title}: {_point_words(point)}, {time.tokens_per_s:,.0f} tokens/s{doubt}"
    else:
        item, point = min(fitting or steps, key=lambda one: one[0].prediction.needed_bytes)
        result = f"least memory: {_point_words(point)}, {needed_words(item.prediction.needed_bytes)} a GPU"
    return Answer(workload="plan", verdict=f"{counted}; {result}.")


def _point_words(point: Mapping[str, Any]) -> str:
    """`context 256, sync fsdp`: the values that distinguish a step; ranks are left out where nodes imply them."""
    names = [name for name in point if name != "ranks" or "nodes" not in point]
    return ", ".join(f"{name.replace('_', ' ')} {_text_of(name)(point)}" for name in names) or "any of them"


def comparison_table(planned: Sequence[Planned], points: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each of several steps. `points`: what distinguishes them."""
    names = list(dict.fromkeys(name for point in points for name in point))
    rows = [
        {
            **point,
            "allocated": item.prediction.allocated_bytes,
            "reserved": item.prediction.reserved_bytes,
            "needed": item.prediction.needed_bytes,
            "verdict": _word(item.prediction),
            "largest": _largest(item.prediction, most=1),
            "step": None if item.time is None else item.time.step.time_s,
            "interval": "" if item.time is None else _range_words(item.time.step),
            "rate": None if item.time is None else item.time.tokens_per_s,
            **fleet_row(item.time, item.fleet, item.tokens),
        }
        for item, point in zip(planned, points, strict=True)
    ]
    columns = [
        *(Column(name.replace("_", " "), TEXT, _text_of(name), names=True) for name in names),
        *(Column(f"{name} ({{unit}})", SIZE, name) for name in ("allocated", "reserved", "needed")),
        Column("fits", TEXT, "verdict"),
        Column("largest at the peak", TEXT, "largest"),
    ]
    if any(item.time is not None for item in planned):
        columns += [Column("step (ms)", MS, "step"), Column("interval", TEXT), Column("tokens/s", WHOLE, "rate")]
    columns += fleet_columns(rows)
    return Table.of(
        "Planned steps",
        rows,
        columns,
        note=" ".join(
            f"No time: {reason}." for reason in dict.fromkeys(item.no_time for item in planned if item.no_time)
        ),
        raw=[plain(item) | dict(point) for item, point in zip(planned, points, strict=True)],
    )


def terms_table(prediction: Prediction) -> Table:
    """The formula of every tensor that forward keeps, with its source."""
    rows, note = _formulas(prediction) if prediction.traced is None else _traced_tensors(prediction.traced)
    return Table.of(
        "What forward keeps for backward",
        rows,
        [
            Column("op", TEXT, names=True),
            Column("tensor", TEXT, names=True),
            Column("formula", TEXT),
            Column("bytes ({unit})", SIZE, "bytes"),
            Column("source", TEXT),
        ],
        raw=rows,
        note=note,
    )


def _formulas(prediction: Prediction) -> tuple[list[dict[str, Any]], str]:
    run = prediction.config.run
    symbols = symbols_of(run)
    rows = [
        {
            "op": op,
            "tensor": tensor.name,
            "formula": f"{times} x {tensor.formula}" if times > 1 else tensor.formula,
            "bytes": times * tensor.nbytes(symbols),
            "source": tensor.source,
        }
        for op, tensor, times in every_kept(run)
    ]
    values = ", ".join(f"{name} = {symbols[name]:,}" for name in ("B", "S", "N", "d", "f", "H", "V", "R"))
    return rows, f"A tensor's formula: bytes of an element x its shape. {values}. Other terms: docs/guide/plan.md."


def _traced_tensors(traced: TracedStep) -> tuple[list[dict[str, Any]], str]:
    alike: dict[tuple[str, str, str, int, str], int] = {}
    for label, tensors in kept_by_label(traced).items():
        for tensor in tensors:
            shape = f"{tensor.dtype} {' x '.join(map(str, tensor.shape)) or 'scalar'}"
            source = "saved once" if tensor.saves == 1 else f"saved {tensor.saves} times" if tensor.saves else HELD
            row = label, tensor.made_by, shape, tensor.nbytes, source
            alike[row] = alike.get(row, 0) + 1
    rows = [
        {
            "op": label,
            "tensor": made_by,
            "formula": f"{times} x {shape}" if times > 1 else shape,
            "bytes": times * nbytes,
            "source": source,
        }
        for (label, made_by, shape, nbytes, source), times in alike.items()
    ]
    return rows, "Traced: a storage counts where autograd saves it first; `tensor` is the operator that made it."


def plain(planned: Planned) -> dict[str, Any]:
    """The prediction for programs, in bytes."""
    prediction, memory = planned.prediction, planned.prediction.memory
    return {
        "gpu": planned.gpu,
        "gpu_memory_bytes": prediction.gpu_memory_bytes,
        "fits": prediction.fits,
        "tight": prediction.is_tight,
        "spare_bytes": None if prediction.gpu_memory_bytes is None else prediction.spare_bytes,
        "peak_moment": memory.peak.name,
        "peak_allocated_bytes": prediction.allocated_bytes,
        "peak_reserved_bytes": prediction.reserved_bytes,
        "needed_bytes": prediction.needed_bytes,
        "interval_bytes": [prediction.low_bytes, prediction.high_bytes],
        "unmeasured": list(prediction.unmeasured),
        "time": None if planned.time is None else time_plain(planned.time, planned.tokens),
        "fleet": None if planned.fleet is None else fleet_plain(planned.fleet),
        "no_time": planned.no_time or None,
        "unseen": list(prediction.traced.unseen) if prediction.traced else [],
        "outside_bytes": prediction.outside,
        "moments": [
            {
                "moment": moment.name,
                "categories_bytes": moment.categories,
                "activations_by_op_bytes": moment.activations_by_op,
                "allocated_bytes": moment.allocated_bytes,
                "reserved_bytes": moment.reserved_bytes,
            }
            for moment in (*memory.moments, memory.peak)
        ],
        "cuts": [
            {
                "term": cut.term,
                "options": cut.options,
                "needed_bytes": cut.prediction.needed_bytes,
                "fits": cut.prediction.fits,
                "tight": cut.prediction.is_tight,
            }
            for cut in planned.cuts
        ],
    }


def _range_words(step: Interval) -> str:
    return f"{milliseconds(step.low_s)} to {milliseconds(step.high_s)}"


def _cut_words(prediction: Prediction, cuts: Sequence[Cut]) -> str:
    first, last = cuts[0], cuts[-1].prediction
    words = f"Cut {first.term} first: `{first.options}` saves {needed_words(first.saved_bytes(prediction))}"
    if len(cuts) > 1:
        words += f", then {listed(f'`{cut.options}`' for cut in cuts[1:])}"
    words += f"; then it needs {needed_words(last.needed_bytes)}"
    if last.fits is None:
        return f"{words}."
    if not last.fits:
        return f"{words}, which does not fit either."
    return f"{words}, which {'probably fits' if last.is_tight else 'fits'}."


def _interval(prediction: Prediction) -> str:
    return f"{needed_words(prediction.low_bytes)} to {needed_words(prediction.high_bytes)}"


def _largest(prediction: Prediction, most: int = 2) -> str:
    categories = prediction.memory.peak.categories
    ordered = sorted(categories, key=lambda name: -categories[name])[:most]
    return listed(f"{name} {needed_words(categories[name])}" for name in ordered)


def _word(prediction: Prediction) -> str:
    if prediction.fits is None:
        return ""
    if not prediction.fits:
        return "no"
    return "just" if prediction.spare_bytes < 0 else "probably" if prediction.is_tight else "yes"


def _text_of(name: str) -> Any:
    return lambda row: "none" if row.get(name) is None else str(row[name])


def _moments(prediction: Prediction) -> Table:
    memory = prediction.memory
    moments = {moment.name: moment for moment in memory.moments}
    peak = f"peak, in {memory.peak.name}"
    moments[peak] = memory.peak
    used = [name for name in CATEGORIES if any(moment.categories[name] for moment in moments.values())]
    rows: list[dict[str, Any]] = [
        {"term": name, **{title: moment.categories[name] for title, moment in moments.items()}} for name in used
    ]
    rows.append({"term": "allocated", **{title: moment.allocated_bytes for title, moment in moments.items()}})
    rows.append(
        {
            "term": "fragmentation, cache and pools",
            **{t: m.reserved_bytes - m.allocated_bytes for t, m in moments.items()},
        }
    )
    rows.append({"term": "reserved", **{title: moment.reserved_bytes for title, moment in moments.items()}})
    columns = [Column("({unit})", TEXT, "term", names=True), *(Column(title, ROUGH_SIZE, title) for title in moments)]
    unmeasured = (
        f"{listed(prediction.unmeasured)}: not measured yet, or further off, so the interval is wider."
        if prediction.unmeasured
        else ""
    )
    return Table.of("Memory at each moment of a step", rows, columns, note=unmeasured)


def _by_op(prediction: Prediction) -> Table:
    peak = prediction.memory.peak
    rows = [
        {"op": op, "bytes": nbytes, "share": f"{nbytes / max(1, peak.allocated_bytes):.1%}"}
        for op, nbytes in sorted(peak.activations_by_op.items(), key=lambda item: -item[1])
    ]
    columns = [
        Column("name", TEXT, "op", names=True),
        Column("kept ({unit})", SIZE, "bytes"),
        Column("of allocated", TEXT, "share"),
    ]
    note = " ".join(prediction.traced.unseen) if prediction.traced else ""
    kind = "op" if prediction.traced is None else "module"
    return Table.of(f"Activations at the peak, by {kind}", rows, columns, note=note)


def _outside(prediction: Prediction) -> Table:
    rows = [{"term": name, "bytes": nbytes} for name, nbytes in prediction.outside.items()]
    note = f"As measured on H200s; other GPUs differ by some 100 MiB from {needed_words(CONTEXT_BYTES)} of context."
    columns = [Column("term", TEXT, names=True), Column("({unit})", SIZE, "bytes")]
    return Table.of("Beside the allocator", rows, columns, note=note)
