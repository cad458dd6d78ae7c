"""The answers of a report: for each workload what was found, and what to do about it. Every verb and page begins with them.

`answers(rows)` has an answer for each workload; which function makes it from the cells that ran stands in the workload's row of
config/instruments.py. What failed, and the way out, is said here for all. The rule of what is quicker is ranking.py's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainstep.config.instruments import INSTRUMENTS, resolve, says
from trainstep.records.record import Failure
from trainstep.report.all_tables import instruments_of
from trainstep.report.comparison_page import compared_ratios
from trainstep.report.forms import failure_sentence
from trainstep.report.notes import failure_counts
from trainstep.report.ranking import against_words, ranking_of, ranking_words, timed_quantity
from trainstep.report.rows import Row, of_workload

_WAYS_OUT = {
    "out_of_memory": "`trainstep memory{model} --fit batch_size` finds the largest batch that fits; a smaller --batch-size, or "
    "--recompute block, needs less.",
    "timeout": "A larger --timeout-s gives a cell longer.",
    "crash": "The last lines that the cell printed say why: they are in its record.",
    "import_error": "Install what the message names, or take that value out.",
    "divergence": "Replicas that differ train another model: look at what the message names before any time.",
}
"""Kind of failure -> what to do; what is unsupported says so itself."""
_FITTED = ("train_step", "profile", "memory", "parallel")
"""Workloads whose batch `memory --fit` can look for."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What stands over the tables of a workload, on a terminal, in Markdown, in JSON and on the page."""

    workload: str
    verdict: str
    """What was found, in a sentence or two."""
    suggestion: str = ""
    """What to do, with what it should gain; empty where nothing follows."""

    @property
    def text(self) -> str:
        """Both."""
        return f"{self.verdict} {self.suggestion}".strip()


def answers(rows: Sequence[Row], axis: str | None = None) -> list[Answer]:
    """An answer for each workload, in the order of its tables. `axis`: what was compared, if the command line said so."""
    workloads = dict.fromkeys([*(one.name for one in instruments_of(rows)), *(row.record.workload for row in rows)])
    made = (_answer(workload, of_workload(rows, workload), axis) for workload in workloads)
    return [answer for answer in made if answer.text]


def _is_trial(row: Row) -> bool:
    """Whether it ran out of memory where `memory --fit` looked for that: a result, and no failure."""
    failure = row.record.failure
    return failure is not None and failure.kind == "out_of_memory" and row.record.fact("fit_of") is not None


def quickest_call(rows: Sequence[Row]) -> Answer:
    """Which cell is the quickest: the answer of a workload that says no more of itself."""
    ranking = ranking_of(rows, timed_quantity(rows))
    return Answer(workload=rows[0].record.workload, verdict=ranking_words(ranking, of=" a call") if ranking else "")


def _answer(workload: str, rows: Sequence[Row], axis: str | None) -> Answer:
    done = [row for row in rows if row.record.failure is None or _is_trial(row)]
    made = Answer(workload=workload, verdict="")
    if done and workload in INSTRUMENTS:
        made = resolve(INSTRUMENTS[workload].answer)(done) or made
    elif done:
        made = quickest_call(done)
    if done and not says(workload, "ratios"):
        compared = [against_words(name, ratios) for name, ratios in compared_ratios(rows, axis)]
        made = replace(made, verdict=_joined([*compared, made.verdict]))
    failed = [(row, row.record.failure) for row in rows if row.record.failure and not _is_trial(row)]
    if not failed:
        return made
    return replace(
        made,
        verdict=_joined([made.verdict, _failures(rows, failed)]),
        suggestion=_joined([made.suggestion, *_ways_out(workload, failed)]),
    )


def _failures(rows: Sequence[Row], failed: Sequence[tuple[Row, Failure]]) -> str:
    """`1 of 3 cells failed: 1 OOM (xl 1024: OOM in backward: asked for ...).`"""
    row, failure = failed[0]
    name = f"{row.label()}: " if len(rows) > 1 else ""
    return f"{failure_counts([row for row in rows if not _is_trial(row)])} ({name}{failure_sentence(failure)})."


def _ways_out(workload: str, failed: Sequence[tuple[Row, Failure]]) -> list[str]:
    """A sentence for each kind of failure that has one."""
    ways = {failure.kind: row for row, failure in reversed(failed) if failure.kind in _WAYS_OUT}
    said = []
    for kind, row in ways.items():
        if kind == "out_of_memory" and workload not in _FITTED:
            said.append("Out of memory: take a shorter sequence or a smaller batch.")
            continue
        model = row.point.get("model")
        said.append(_WAYS_OUT[kind].format(model=f" --model {model}" if model else ""))
    return said


def _joined(sentences: Iterable[str]) -> str:
    return " ".join(filter(None, sentences))
