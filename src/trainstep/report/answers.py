"""Makes the answers of a report: for each workload a verdict and a suggestion. Every verb and page begins with them.

`answers(rows)` returns an answer for each workload. The workload's entry in config/instruments.py names the function that makes it
from the cells that ran; failures and what to do about them are added here. kit/ranking.py decides which cell is fastest.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainstep.config.instruments import INSTRUMENTS, resolve, says
from trainstep.records.record import Failure
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import failure_sentence
from trainstep.report.kit.notes import failure_counts
from trainstep.report.kit.ranking import against_words, fastest_words, ranking_of, ranking_words, timed_quantity
from trainstep.report.kit.rows import Row, of_workload
from trainstep.report.kit.tables import instruments_of
from trainstep.report.step.comparison import compared_ratios

_WAYS_OUT = {
    "out_of_memory": "`trainstep memory{model} --fit batch_size` finds the largest batch that fits; a smaller --batch-size, or "
    "--recompute block, needs less.",
    "timeout": "A larger --timeout-s gives a cell more time.",
    "crash": "The last lines that the cell printed say why: they are in its record.",
    "import_error": "Install what the message names, or leave that value out.",
    "node_lost": "The same sweep, or the command with --out FILE --resume, measures it again once the node is back.",
    "divergence": "The replicas no longer train one model: fix what the message names before you use any time.",
}
"""Kind of failure -> what to do; the message of an unsupported value says what to do itself."""
_IMPORT_ERROR = "import_error"
_IN_BRACKETS = re.compile(r" \((?:[^()]|\([^()]*\))*\)$")
"""The end of a message that has Python's words in brackets."""
_FITTED = ("train_step", "profile", "memory", "parallel")
"""Workloads for which `memory --fit` can find the largest batch."""


def answers(rows: Sequence[Row], axis: str | None = None) -> list[Answer]:
    """An answer for each workload, in the order of its tables. `axis`: the axis that the command line asked to compare."""
    workloads = dict.fromkeys(
        [*(instrument.name for instrument in instruments_of(rows)), *(row.record.workload for row in rows)]
    )
    every_answer = (_answer(workload, of_workload(rows, workload), axis) for workload in workloads)
    return [answer for answer in every_answer if answer.text]


def fastest_call(rows: Sequence[Row]) -> Answer:
    """Which cell is fastest: the answer of a workload without an answer of its own."""
    ranking = ranking_of(rows, timed_quantity(rows))
    return Answer(workload=rows[0].record.workload, verdict=ranking_words(ranking, per=" a call") if ranking else "")


def _answer(workload: str, rows: Sequence[Row], axis: str | None) -> Answer:
    done = [row for row in rows if row.record.failure is None or _is_trial(row)]
    answer = Answer(workload=workload, verdict="")
    if done and workload in INSTRUMENTS:
        answer = resolve(INSTRUMENTS[workload].answer)(done) or answer
    elif done:
        answer = fastest_call(done)
    if done and not says(workload, "ratios"):
        compared = compared_ratios(rows, axis)
        verdicts = [words_of(name, ratios) for name, ratios in compared for words_of in (against_words, fastest_words)]
        answer = replace(answer, verdict=_joined([*verdicts, answer.verdict]))
    failed = [(row, row.record.failure) for row in rows if row.record.failure and not _is_trial(row)]
    if not failed:
        return answer
    return replace(
        answer,
        verdict=_joined([answer.verdict, _failure_words(rows, failed)]),
        suggestion=_joined([answer.suggestion, *_ways_out(workload, failed)]),
    )


def _is_trial(row: Row) -> bool:
    """Whether the cell ran out of memory in a search of `memory --fit`: that is a result and not a failure."""
    failure = row.record.failure
    return failure is not None and failure.kind == "out_of_memory" and row.record.fact("fit_of") is not None


def _failure_words(rows: Sequence[Row], failed: Sequence[tuple[Row, Failure]]) -> str:
    """`1 of 3 cells failed: 1 OOM (xl 1024: OOM in backward: asked for ...).`"""
    row, failure = failed[0]
    counts = failure_counts([row for row in rows if not _is_trial(row)])
    if (
        failure.kind == _IMPORT_ERROR
    ):  # the package is what matters, not which of its cells failed first, nor Python's words
        return f"{counts} ({_IN_BRACKETS.sub('', failure.message)})."
    name = f"{row.label()}: " if len(rows) > 1 else ""
    return f"{counts} ({name}{failure_sentence(failure)})."


def _ways_out(workload: str, failed: Sequence[tuple[Row, Failure]]) -> list[str]:
    """What to do about each kind of failure."""
    first_rows = {failure.kind: row for row, failure in reversed(failed) if failure.kind in _WAYS_OUT}
    sentences = []
    for kind, row in first_rows.items():
        if kind == "out_of_memory" and workload not in _FITTED:
            sentences.append("Out of memory: take a shorter sequence or a smaller batch.")
            continue
        model = row.point.get("model")
        sentences.append(_WAYS_OUT[kind].format(model=f" --model {model}" if model else ""))
    return sentences


def _joined(sentences: Iterable[str]) -> str:
    return " ".join(filter(None, sentences))
