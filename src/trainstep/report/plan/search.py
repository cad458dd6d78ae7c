"""The answer, tables, page and JSON of a search of options: the best, why the others lost, and what memory costs in time."""

from collections.abc import Mapping
from typing import Any

from trainstep.plan.prediction import Prediction
from trainstep.plan.search.difference import Difference, difference
from trainstep.plan.search.search import MEMORY, RANKS, Alternative, Candidate, Found, differs
from trainstep.plan.time.step_time import StepTime
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.charts import SERIES, Chart, Panels, Section, line
from trainstep.report.kit.forms import MS, SIZE, TEXT, WHOLE, in_gib, in_ms, listed, milliseconds, needed_words
from trainstep.report.kit.tables import Column, Table, filled
from trainstep.report.plan.time import interval_words, time_plain

_MOST_SHOWN = 24
_NOT_PREDICTED = "\N{EN DASH}"
_FITS_MEANING = {
    "just": "just: it would take more memory than the GPU has, so the allocator returns cached memory and asks again, which takes "
    "time.",
    _NOT_PREDICTED: f"{_NOT_PREDICTED}: its memory was not predicted, because it would be no better in any case.",
}
"""Meaning of those words of the column `fits` that do not explain themselves."""


def search_answer(found: Found, gpu: str | None, commands: tuple[str, ...] = ()) -> Answer:
    """The best options and the runner-up, or that nothing fits. `commands`: how to measure both."""
    best = found.best
    if best is None:
        return _nothing_fits(found, gpu)
    what = {MEMORY: "Least memory", RANKS: f"Fewest ranks: {best.config.ranks}, with the fastest that fits"}
    doubt = "" if best.fits_surely else "probably " if best.prediction.spare_bytes >= 0 else "just "
    title = what.get(found.minimize, f"Fastest that {doubt}fits")
    where = gpu or needed_words(best.prediction.gpu_memory_bytes or 0)
    chosen = found.space.options(best.config)
    if found.minimize == RANKS:
        chosen.pop("ranks", None)  # the title has them
    verdict = (
        f"{title} {where}: {words_of(chosen)}; {interval_words(best.time.step)}, "
        f"{best.time.tokens_per_s:,.0f} tokens/s, {needed_words(best.needed_bytes)} of "
        f"{needed_words(best.prediction.gpu_memory_bytes or 0)}."
    )
    if found.minimize == MEMORY:
        verdict = verdict.replace(f"{title} {where}", f"{title} on {where}")
    for ranks, needed_bytes in found.fewer_ranks:
        verdict += f" On {ranks} at least {needed_words(needed_bytes)} are needed."
    return Answer(workload="plan", verdict=verdict, suggestion=_runner_up_words(found, commands))


def search_tables(found: Found) -> list[Table]:
    """The tables: single changes of the best, the frontier, and the options that were searched."""
    return filled(_changes(found), _frontier(found), _searched(found))


def search_section(found: Found) -> Section:
    """The page's section: the frontier as a chart, and the tables."""
    return Section(title="Memory against time", charts=(frontier_chart(found),), tables=tuple(search_tables(found)))


def frontier_chart(found: Found) -> Chart:
    """The chart of the frontier's points: time against memory."""
    panels = Panels(titles=[""], columns=1, x_title="memory needed (GiB)", y_title="time of a step (ms)")
    panels.axis = {"rangemode": "normal"}  # on an axis from zero, differences of a few per cent would be invisible
    points = sorted(found.frontier, key=lambda candidate: candidate.needed_bytes)
    hover = [
        f"{words_of(found.space.options(candidate.config))}: {interval_words(candidate.time.step)}"
        for candidate in points
    ]
    panels.add(
        0,
        line(
            "frontier",
            [in_gib(candidate.needed_bytes) for candidate in points],
            [in_ms(candidate.time_s) for candidate in points],
            style=(SERIES[0], "solid"),
            hover=hover,
        ),
    )
    caption = "Each point fits and was predicted; no combination that was predicted is faster and needs less."
    return panels.chart("What less memory costs in time", caption)


def words_of(options: Mapping[str, Any]) -> str:
    """`sync fsdp, recompute none`"""
    return ", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in options.items())


def plain(found: Found, gpu: str | None, commands: tuple[str, ...] = ()) -> dict[str, Any]:
    """The result for programs, in bytes and seconds."""
    space, effort = found.space, found.effort
    return {
        "minimize": found.minimize,
        "gpu": gpu,
        "global_batch": space.global_batch,
        "fixed": dict(space.fixed),
        "choices": {name: list(values) for name, values in space.choices.items()},
        "free": list(space.free),
        "best": None if found.best is None else _plain_candidate(found, found.best),
        "runner_up": None if found.runner_up is None else _plain_candidate(found, found.runner_up),
        "measure": list(commands),
        "leanest": _plain_candidate(found, found.leanest),
        "frontier": [_plain_candidate(found, candidate) for candidate in found.frontier],
        "alternatives": [_plain_alternative(found, alternative) for alternative in found.alternatives],
        "fewer_ranks": [{"ranks": ranks, "needed_bytes": needed} for ranks, needed in found.fewer_ranks],
        "effort": {
            "combinations": effort.candidates,
            "timed": effort.timed,
            "replayed": effort.replayed,
            "too_large": effort.too_large,
            "refused": sum(space.refused.values()),
            "refusals": dict(space.refused.most_common(_MOST_SHOWN)),
            "without_prediction": dict(effort.unknown),
        },
    }


def _nothing_fits(found: Found, gpu: str | None) -> Answer:
    least = found.leanest
    memory_bytes = least.prediction.gpu_memory_bytes or 0
    words = words_of(found.space.options(least.config))
    missing = needed_words(max(0, least.needed_bytes - memory_bytes))
    verdict = (
        f"Nothing fits {gpu or 'the GPU'} ({needed_words(memory_bytes)}): the least that was found is "
        f"{needed_words(least.needed_bytes)} a GPU, {missing} more, with {words}."
    )
    for ranks, needed_bytes in found.fewer_ranks:
        if ranks != least.config.ranks:
            verdict += f" On {ranks} it is {needed_words(needed_bytes)}."
    more = "a larger --global-batch divided among " if least.config.run.batch_size == 1 else ""
    return Answer(
        workload="plan",
        verdict=verdict,
        suggestion=f"It needs a GPU with more memory, {more}more ranks (--ranks {2 * least.config.ranks}), or a shorter context.",
    )


def _runner_up_words(found: Found, commands: tuple[str, ...]) -> str:
    """`The runner-up, sync fsdp instead, is 4.1 % slower because of exposed messages (+120 ms).`"""
    best, other = found.best, found.runner_up
    if best is None or other is None:
        return "No different combination fits."
    changes = words_of(_changed(found, best, other))
    if found.minimize == MEMORY:
        more = other.needed_bytes - best.needed_bytes
        return f"The runner-up, {changes} instead, needs {needed_words(more)} more."
    apart = difference(best.time, other.time)
    share = 100 * apart.time_s / best.time_s
    words = f"The runner-up, {changes} instead, "
    if apart.is_sure:
        words += f"is {_share(share)} slower because of {_because(apart)}"
    else:
        words += (
            f"cannot be told apart from the best by prediction: {_signed_ms(apart.time_s)} ({_signed_ms(apart.low_s)} to "
            f"{_signed_ms(apart.high_s)}). Measure both: " + listed(f"`{command}`" for command in commands)
        )
    ties = [
        f"{alternative.field.replace('_', ' ')} {_text(alternative.value)}"
        for alternative in found.alternatives
        if not differs(best.time_s, alternative.time.step.time_s)
        and alternative.least_bytes <= (best.prediction.gpu_memory_bytes or 0)
    ]
    words += "." + (f" As fast: {listed(ties)}." if ties else "")
    if best.time.host_may_limit and not best.time.is_captured:
        words += " A slow host may make it longer, which a captured step (`--capture step`) would not wait for."
    return words


def _because(apart: Difference) -> str:
    """The terms that make most of the difference: up to three, each more than a third of the largest."""
    sign = 1 if apart.time_s >= 0 else -1
    largest = sign * apart.terms[0][1]
    parts = [f"{name} ({_signed_ms(part)})" for name, part in apart.terms[:3] if sign * part > largest / 3]
    return listed(parts)


def _changed(found: Found, before: Candidate, after: Candidate) -> dict[str, Any]:
    """The options of `after` that differ from those of `before`."""
    first, second = found.space.options(before.config), found.space.options(after.config)
    return {name: value for name, value in second.items() if first.get(name, value) != value} or second


def _changes(found: Found) -> Table:
    best = found.best
    rows = []
    for alternative in found.alternatives if best is not None else ():
        assert best is not None
        apart = difference(best.time, alternative.time)
        rows.append(
            {
                "change": f"{alternative.field.replace('_', ' ')} {_text(alternative.value)}",
                "time": alternative.time.step.time_s,
                "apart": _signed_ms(apart.time_s),
                "interval": f"{_signed_ms(apart.low_s)} to {_signed_ms(apart.high_s)}",
                "because": _because(apart) if differs(best.time_s, alternative.time.step.time_s) else "",
                "fits": _fits(best.prediction, alternative),
            }
        )
    columns = [
        Column("change", TEXT, names=True),
        Column("step (ms)", MS, "time"),
        Column("against the best (ms)", TEXT, "apart"),
        Column("interval", TEXT),
        Column("because of", TEXT, "because"),
        Column("fits", TEXT),
    ]
    note = "The best with one option changed. The interval is that of the difference: what both share has the same error in both."
    words = {str(row["fits"]).partition(":")[0] for row in rows}
    note += "".join(f" {meaning}" for word, meaning in _FITS_MEANING.items() if word in words)
    return Table.of("Single changes of the best", rows, columns, note=note)


def _fits(best: Prediction, one: Alternative) -> str:
    memory_bytes = best.gpu_memory_bytes or 0
    if one.prediction is None:
        return f"no: {needed_words(one.least_bytes)} at least" if one.least_bytes > memory_bytes else _NOT_PREDICTED
    needed = needed_words(one.prediction.needed_bytes)
    if not one.prediction.fits:
        return f"no: {needed}"
    if one.prediction.spare_bytes < 0:
        return f"just: {needed}"
    return f"probably: {needed}" if one.prediction.is_tight else f"yes: {needed}"


def _frontier(found: Found) -> Table:
    options = [found.space.options(candidate.config) for candidate in found.frontier]
    names = dict.fromkeys(name for item in options for name in item)
    varied = [name for name in names if len({str(item.get(name)) for item in options}) > 1]
    rows = [
        {
            **{name: _text(item[name]) if name in item else "" for name in varied},
            "step": candidate.time_s,
            "range": f"{milliseconds(candidate.time.step.low_s)} to {milliseconds(candidate.time.step.high_s)}",
            "rate": candidate.time.tokens_per_s,
            "needed": candidate.needed_bytes,
        }
        for candidate, item in zip(found.frontier, options, strict=True)
    ]
    columns = [
        Column("needed ({unit})", SIZE, "needed"),
        Column("step (ms)", MS, "step"),
        Column("interval", TEXT, "range"),
        Column("tokens/s", WHOLE, "rate"),
        *(Column(name.replace("_", " "), TEXT, name, names=True) for name in varied),
    ]
    note = (
        "Each needs at least 3 % less than the one before; options that are the same in all rows are those of the best."
    )
    return Table.of("What less memory costs in time", rows, columns, note=note)


def _searched(found: Found) -> Table:
    space, effort = found.space, found.effort
    rows = [
        {"what": name.replace("_", " "), "value": _values(values), "how": "free" if name in space.free else "named"}
        for name, values in space.choices.items()
    ]
    refused = sum(space.refused.values())
    note = (
        f"{effort.candidates:,} combinations are allowed. {effort.too_large:,} surely do not fit by their bounds; "
        f"{effort.timed:,} were timed, and of {effort.replayed:,} memory was replayed; the bounds of the others show that they are "
        "no better."
    )
    if refused:
        note += f" Configs refused {refused:,}, most of them: {space.refused.most_common(1)[0][0]}."
    for reason, count in effort.unknown.items():
        note += f" Left out, {count:,}: {reason}."
    return Table.of(
        "What was searched",
        rows,
        [Column("option", TEXT, "what", names=True), Column("values", TEXT, "value"), Column("given", TEXT, "how")],
        note=note,
    )


def _values(values: tuple[Any, ...]) -> str:
    return ", ".join(_text(value) for value in values)


def _text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _share(percent: float) -> str:
    return f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def _signed_ms(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{milliseconds(abs(seconds))} ms"


def _plain_candidate(found: Found, one: Candidate) -> dict[str, Any]:
    prediction = one.prediction
    out = {
        "options": found.space.options(one.config),
        "needed_bytes": one.needed_bytes,
        "interval_bytes": [prediction.low_bytes, prediction.high_bytes],
        "fits": prediction.fits,
        "tight": prediction.is_tight,
        "time": time_plain(one.time, None),
    }
    return out | (_plain_difference(found.best.time, one.time) if found.best is not None else {})


def _plain_alternative(found: Found, one: Alternative) -> dict[str, Any]:
    assert found.best is not None
    return {
        "field": one.field,
        "value": one.value,
        "step_s": one.time.step.time_s,
        "least_bytes": one.least_bytes,
        "needed_bytes": None if one.prediction is None else one.prediction.needed_bytes,
        "fits": False if one.least_bytes > (found.best.prediction.gpu_memory_bytes or 0) else _fits_or_none(one),
        **_plain_difference(found.best.time, one.time),
    }


def _fits_or_none(one: Alternative) -> bool | None:
    return None if one.prediction is None else one.prediction.fits


def _plain_difference(best: StepTime, other: StepTime) -> dict[str, Any]:
    apart = difference(best, other)
    return {
        "slower_s": apart.time_s,
        "slower_interval_s": [apart.low_s, apart.high_s],
        "told_apart": apart.is_sure,
        "slower_by_class_s": dict(apart.terms),
    }
