"""The answer for runs of scripts: how long a step takes, what of it waits, and what to look at first."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainstep.config.script import Part
from trainstep.explain.budget import step_budget
from trainstep.explain.evidence import is_generated
from trainstep.explain.script_evidence import script_evidence
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.finding_words import change_words, evidence_words, excess_words
from trainstep.report.kit.forms import listed, ms_words, percent
from trainstep.report.kit.notes import Configs
from trainstep.report.kit.rows import Row
from trainstep.report.run.runs import Run, is_installed, main_runs, place_words, runs_of

WORDS = {
    Part.DATA: "waiting for data",
    Part.FORWARD: "forward",
    Part.BACKWARD: "backward",
    Part.OPTIMIZER: "optimizer",
    Part.EVALUATION: "forward without gradients",
    Part.OTHER: "other code of yours",
}
"""Part -> its words in tables and sentences."""
_NAMED = 0.01
"""The least share at which a part is named."""
_WORTH = 0.05
"""The least share of the step for which a change is suggested."""
_ENOUGH = 10
"""The fewest timed steps from which something is suggested: one collection of garbage is half of a short run."""
_MOST_RUNS = 3
_FAR = 1.1
"""If mean and median of the steps' times differ by more than this factor, shares would mislead without the mean."""


def run_answer(rows: Sequence[Row]) -> Answer | None:
    """The answer for these runs; None without a step."""
    runs = [run for run in main_runs(runs_of(rows)) if run.step_s is not None]
    if not runs:
        return None
    several = len(runs) > 1
    verdict = " ".join(verdict_of(run, f"of {run.name}" if several else "") for run in runs[:_MOST_RUNS])
    more = f" {len(runs) - _MOST_RUNS} more runs are in the table." if len(runs) > _MOST_RUNS else ""
    return Answer(workload="run", verdict=verdict + more, suggestion=suggestion_of(runs[-1]))


def run_words(configs: Configs) -> str:
    """`your own scripts: train.py`."""
    scripts = dict.fromkeys(str(config["script"]) for config in configs)
    return f"your own scripts: {listed(scripts, most=_MOST_RUNS)}"


def verdict_of(run: Run, name: str = "") -> str:
    """`Your step takes 12.3 ms (median of 400); of it 20.3 % waits for data. Backward 50.1 % and forward 24.0 %.`

    Shares are those of the steps' total time, because a loader may wait in only one step of a hundred, which no median shows.
    """
    count = len(run.samples.get("step", ()))
    how_many = f"median of {count:,}{_mean_words(run)}" if count else "a warm-up: the run was too short for more"
    shares = [(WORDS[part], share) for part, share in run.shares() if share >= _NAMED and part is not Part.DATA]
    parts = listed(f"{words} {percent(share)} %" for words, share in shares) if shares else ""
    waits = [f"{percent(run.share(Part.DATA))} % waits for data"] if run.share(Part.DATA) else []
    if run.exposed_share >= _NAMED:
        waits.append(f"{percent(run.exposed_share)} % for messages of other ranks (in inspected steps)")
    of_it = f"; of it {' and '.join(waits)}" if waits else ""
    step = f"The step {name}" if name else "Your step"
    sentence = f"{step} takes {ms_words(run.step_s or 0.0)} ({how_many}){of_it}. "
    return (
        f"{sentence}{parts[:1].upper()}{parts[1:]}.{ending_words(run)}"
        if parts
        else f"{sentence.rstrip()}{ending_words(run)}"
    )


def _mean_words(run: Run) -> str:
    """`; 15.3 ms on average, to which the shares refer`, if mean and median differ enough for their shares to differ."""
    mean_s = _mean_s(run)
    apart = run.step_s and not 1 / _FAR < mean_s / run.step_s < _FAR
    return f"; {ms_words(mean_s)} on average, to which the shares refer" if apart else ""


def _mean_s(run: Run) -> float:
    times = run.samples.get("step", ())
    return sum(times) / len(times) if times else 0.0


def ending_words(run: Run) -> str:
    """How the run ended, unless it simply finished."""
    if run.ending == "finished":
        return ""
    if run.ending is None:
        return f" No record says how it ended: it was killed after step {run.steps:,}, or it still runs."
    part = run.last.fact("ending_part")
    where = f", in {WORDS[Part(part)]}" if part in list(Part) else ""
    return f" It ended after {run.steps:,} step{'s' if run.steps != 1 else ''}{where}: {run.ending}."


def suggestion_of(run: Run) -> str:
    """What to look at first; if no known excess takes 5 %, how to see more; empty if the run was too short.

    What the run says by itself names lines and functions; any other excess is one that `explain` finds in the same records.
    """
    if len(run.samples.get("step", ())) < _ENOUGH:
        return ""
    suggestions = {cause: said for cause, look in _LOOKS.items() for said in look(run)}
    suggestions = dict(_excesses(run)) | suggestions
    if suggestions:
        return max(suggestions.values())[1]
    return (
        f"No excess that is known takes {100 * _WORTH:.0f} % of the time: {_command(run)} divides the step into what its work "
        "needs and what a change would save."
    )


def _command(run: Run) -> str:
    return f"`trainstep explain {shlex.quote(run.row.file)}`"


def _excesses(run: Run) -> Iterator[tuple[str, tuple[float, str]]]:
    """Each cause that `explain` finds, with its share and the words for it."""
    try:
        budget = step_budget(script_evidence([row.record for row in run.rows]), None)
    except ValueError:
        return
    for finding in budget.findings:
        share = finding.excess.time_s / budget.measured_s
        if share >= _WORTH:
            change = change_words(finding, on_device=budget.on_device)
            words = (
                f"Longest excess: {excess_words(finding, budget.measured_s, 'step')}: {evidence_words(finding)}. "
                f"{change[:1].upper()}{change[1:]}; {_command(run)} has them all."
            )
            yield finding.cause, (share, words)


def _data(run: Run) -> Iterator[tuple[float, str]]:
    share = run.share(Part.DATA)
    if share >= _WORTH:
        yield (
            share,
            f"Look at the data loader first: without its waits a step would take {_without_words(run, share)}. "
            "More workers (num_workers), a cheaper transform, or batches made ahead of time.",
        )


def _without_words(run: Run, share: float) -> str:
    """The mean step's time without this share of it; the mean, because a loader may wait in only a few steps."""
    time_s = _mean_s(run) * (1 - share)
    return f"{ms_words(time_s)}{' on average' if _mean_words(run) else ''}"


def _waits(run: Run) -> Iterator[tuple[float, str]]:
    """The line that waits longest; on a CPU, where nothing waits, a line that reads a value in every inspected step."""
    if not run.waits:
        return
    wait, others = run.waits[0], len(run.waits) - 1
    share = min(1.0, wait["time_s"] / (run.step_s or 1.0))
    source = f" `{wait['source']}`" if wait["source"] and "`" not in wait["source"] else ""
    does, lines = ("does", "line") if others == 1 else ("do", "lines")
    more = f", and so {does} {others} more {lines}" if others else ""
    place = f"{place_words(wait)}{source}"
    if run.on_gpu and share >= _WORTH:
        yield (
            share,
            f"{place} makes the host wait for the GPU, {ms_words(wait['time_s'])} a step{more}: read values less often, or "
            "after the next step was launched.",
        )
    elif not run.on_gpu and wait["steps"] == len(run.inspected):
        yield (
            share,
            f"{place} reads a tensor's value in every inspected step{more}: nothing waits here on a CPU, but a GPU's host would.",
        )


def _collector(run: Run) -> Iterator[tuple[float, str]]:
    times = run.samples.get("garbage_collection", (0.0,))
    share = run.share_of(sum(times) - max(times))  # one long collection is no habit
    if share >= _WORTH:
        yield (
            share,
            f"Python's garbage collector takes {percent(share)} % of the time: gc.freeze() once the model is built, or "
            "gc.disable() and gc.collect() every some hundred steps.",
        )


def _compiler(run: Run) -> Iterator[tuple[float, str]]:
    repeated = [line for line in run.lines("compilations") if line["reason"]]
    share = run.share_of(sum(line["time_s"] for line in repeated))
    if share >= _WORTH:
        line = max(repeated, key=lambda line: (not is_generated(line["file"]), not is_installed(line), line["time_s"]))
        place = "" if is_generated(line["file"]) else f" ({place_words(line)})"
        yield (
            share,
            f"torch.compile compiled again {len(repeated)} time{'s' if len(repeated) != 1 else ''}, {line['function']}{place} "
            f"among them: {line['reason']}.",
        )


def _messages(run: Run) -> Iterator[tuple[float, str]]:
    if run.exposed_share >= _WORTH:
        yield (
            run.exposed_share,
            "Messages are not hidden: `trainstep parallel` compares strategies, and larger or fewer buckets may hide more.",
        )


_LOOKS: Mapping[str, Callable[[Run], Iterator[tuple[float, str]]]] = {
    "data": _data,
    "synchronisations": _waits,
    "garbage_collector": _collector,
    "recompiles": _compiler,
    "exposed_messages": _messages,
}
"""Cause -> what the run says of it by itself."""
