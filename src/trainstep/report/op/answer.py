"""The answer for ops: our kernels against the fastest right peers, or their rates where no peer ran."""

from collections.abc import Sequence

from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import rate_words, seconds_words
from trainstep.report.kit.peer_answer import HOW_TIMED, peer_answer
from trainstep.report.kit.peers import TIME, implementation, median_s
from trainstep.report.kit.ranking import ranking_of, ranking_words
from trainstep.report.kit.rows import Row, needless
from trainstep.report.op.rows import bytes_per_s, flops_per_s, named_rows, works_of


def op_answer(rows: Sequence[Row]) -> Answer | None:
    """Our kernels against the fastest peer of each configuration, or without peers the rates; then the largest errors."""
    named = named_rows(rows)
    return peer_answer("op", named, works_of(named), _without_peers)


def _without_peers(rows: Sequence[Row]) -> str:
    """The ranking of a single configuration, or the best and the least rate of each unit."""
    if len(rows) > 1 and len(works_of(rows)) == 1:
        ranking = ranking_of(rows, TIME)
        return ranking_words(ranking, per=" a call", name=implementation) if ranking else ""
    moved = [(rate, row) for row in rows if (rate := bytes_per_s(row))]
    computed = [(rate, row) for row in rows if (rate := flops_per_s(row))]
    return " ".join(_rates_words(rated, unit) for rated, unit in ((moved, "bytes/s"), (computed, "flop/s")) if rated)


def _rates_words(rated: Sequence[tuple[float, Row]], unit: str) -> str:
    """`trainstep reaches 3,912.0 GB/s in rms_norm 8192 x 4096 both bf16 (0.086 ms a call), and at least ... in ...`."""
    rows = [row for _, row in rated]
    unnamed = [*HOW_TIMED, *needless(rows), *(("implementation",) if len(set(map(implementation, rows))) == 1 else ())]
    (high, best), (low, least) = (choose(rated, key=lambda pair: pair[0]) for choose in (max, min))
    call = seconds_words(median_s(best) or 0.0)
    subject = implementation(best) if "implementation" in unnamed else "The best rate"
    verb = "reaches" if "implementation" in unnamed else "is"
    words = f"{subject} {verb} {rate_words(high, unit)} in {best.label(without=unnamed)} ({call} a call)"
    return (
        f"{words}, and at least {rate_words(low, unit)} in {least.label(without=unnamed)}."
        if low < high
        else f"{words}."
    )
