"""The answer of `compare`: in how many cells the second file is faster or slower, and what would settle what cannot be told."""

from collections.abc import Sequence

from trainstep.report.answers import Answer
from trainstep.report.before_after import Change
from trainstep.report.forms import failure_word
from trainstep.report.ranking import counted_words, is_judged
from trainstep.report.ratios import Ratio

_TURNS = (
    "`trainstep bench --compare` lets variants of one field take turns, which takes out what changed between two runs."
)


def changes_answer(changes: Sequence[Change], quantity: str) -> Answer:
    """The verdict on all cells that both files hold."""
    broken = [change for change in changes if change.after.failure and not change.row.record.failure]
    judged = [change for change in changes if change.row.record.failure is None and change.after.failure is None]
    ratios = [_ratio(change) for change in judged]
    said = [f"The second file's {quantity} {counted_words(ratios)}"] if ratios else []
    if broken:
        change, failure = broken[0], broken[0].after.failure
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        said.append(f"{change.label}{more} fails in it ({failure_word(failure) if failure else ''}), which ran before")
    unclear = any(not is_judged(ratio) or (ratio.known and ratio.known.verdict == "cannot tell") for ratio in ratios)
    apart = any(change.found.interleaving == "none" for change in judged)
    return Answer(
        workload=changes[0].row.record.workload,
        verdict=f"{'; '.join(said) or 'No common cell ran in both files'}.",
        suggestion=_TURNS if unclear and apart else "",
    )


def _ratio(change: Change) -> Ratio:
    trouble = "" if change.found.ratio else change.found.reason
    return Ratio(base=change.row, row=change.row, found=change.found, trouble=trouble)
