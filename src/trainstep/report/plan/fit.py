"""Shows the largest value that fits: in words, as a table, and for programs."""

from collections.abc import Mapping
from typing import Any

from trainstep.plan.search.fit import Fit, LargestFit
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import SIZE, TEXT, WHOLE, needed_words
from trainstep.report.kit.tables import Column, Table


def fit_answer(found: LargestFit, gpu: str | None, gpu_memory_bytes: int, trial: Mapping[str, Any] | None) -> Answer:
    """The largest value, its peak and its margin, and whether a trial agreed."""
    name = found.field.replace("_", " ")
    where = f"{gpu or 'the GPU'} ({needed_words(gpu_memory_bytes)})"
    best = found.surely or found.probably
    if best is None:
        assert found.above is not None
        needed = needed_words(found.above.prediction.needed_bytes)
        return Answer(
            workload="plan",
            verdict=f"No {name} fits {where}: even {found.above.value} needs {needed}.",
            suggestion="`trainstep plan --minimize memory` searches options that need less.",
        )
    least = "at least " if best.value == found.bound else ""
    doubt = "" if found.surely else "probably "
    prediction = best.prediction
    verdict = (
        f"The largest {name} that {doubt}fits {where} is {least}{best.value:,}: it needs {needed_words(prediction.needed_bytes)} "
        f"({needed_words(prediction.low_bytes)} to {needed_words(prediction.high_bytes)}), with "
        f"{needed_words(max(0, prediction.spare_bytes))} to spare."
    )
    if found.probably is not None and found.probably.value > best.value:
        verdict += f" Up to {found.probably.value:,} probably fit too."
    if least:
        verdict += f" The search ends at {found.bound:,}."
    return Answer(workload="plan", verdict=verdict, suggestion=_trial_words(trial))


def fit_table(found: LargestFit) -> Table:
    """The largest values that surely and that probably fit, and the first that does not fit."""
    sure = None if found.surely is None else found.surely.value
    probably = None if found.probably is None or found.probably.value == sure else found.probably
    named = (("surely", found.surely), ("probably", probably), ("no", found.above))
    rows = [
        {
            "fits": word,
            "value": fit.value,
            "needed": fit.prediction.needed_bytes,
            "low": fit.prediction.low_bytes,
            "high": fit.prediction.high_bytes,
        }
        for word, fit in named
        if fit is not None
    ]
    columns = [
        Column("fits", TEXT, names=True),
        Column(found.field.replace("_", " "), WHOLE, "value"),
        *(Column(f"{title} ({{unit}})", SIZE, title) for title in ("needed", "low", "high")),
    ]
    return Table.of(
        f"The largest {found.field.replace('_', ' ')}", rows, columns, note=f"{found.tried} values were predicted."
    )


def plain(found: LargestFit, gpu: str | None, gpu_memory_bytes: int, trial: Mapping[str, Any] | None) -> dict[str, Any]:
    """The result for programs, in bytes."""
    best = found.surely or found.probably
    return {
        "fit": found.field,
        "gpu": gpu,
        "gpu_memory_bytes": gpu_memory_bytes,
        "value": None if best is None else best.value,
        "at_least": best is not None and best.value == found.bound,
        "spare_bytes": None if best is None else best.prediction.spare_bytes,
        "surely": _plain(found.surely),
        "probably": _plain(found.probably),
        "above": _plain(found.above),
        "verified": trial,
    }


def _plain(fit: Fit | None) -> dict[str, Any] | None:
    if fit is None:
        return None
    prediction = fit.prediction
    return {
        "value": fit.value,
        "needed_bytes": prediction.needed_bytes,
        "interval_bytes": [prediction.low_bytes, prediction.high_bytes],
        "peak_allocated_bytes": prediction.allocated_bytes,
        "peak_moment": prediction.memory.peak.name,
    }


def _trial_words(trial: Mapping[str, Any] | None) -> str:
    if trial is None:
        return "By formula only: on a machine with this GPU, --verify runs one trial; `trainstep memory --fit` takes trials alone."
    if trial["failure"] is not None:
        return f"But a trial on {trial['gpu']} failed: {trial['failure']}"
    return (
        f"A trial on {trial['gpu']} ran: {needed_words(trial['peak_reserved_bytes'])} reserved, where "
        f"{needed_words(trial['predicted_reserved_bytes'])} were predicted."
    )
