"""The answer of a workload with peers: ours against the fastest right peer of each configuration, wrong results, errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainstep.grouping import grouped
from trainstep.records.record import Samples
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import listed, ratio_words, seconds_words, times_words
from trainstep.report.kit.peers import OURS, TIME, Configuration, implementation, mean_ratio, median_s
from trainstep.report.kit.ranking import Ratio, interval_words, is_judged, no_verdict_words, ratio_of
from trainstep.report.kit.rows import PROVENANCE, Row, host_limit, needless
from trainstep.traces.verdict import LAUNCH_BOUND

PLAIN_ERRORS: Mapping[str, str] = {"error_output": "error_same_dtype"} | {
    f"error_{name}": f"error_same_dtype_{name}" for name in ("dq", "dk", "dv", "lse", "dx", "dresidual", "dweight")
}
"""An implementation's error -> that of plain PyTorch in the same dtype."""
_WRONG = 10
"""A result whose error is over this many times plain PyTorch's counts as wrong, not as less accurate."""
_LEAST_WRONG = 1e-3
"""The least error of a wrong result: long sums in fp32 have over ten times the error of short ones, and are right."""
HOW_TIMED = ("steps", "warmups")
_UNNAMED = ("implementation", *HOW_TIMED)
"""Names of a point that a configuration's label leaves out."""


def fastest_right(works: Sequence[Configuration]) -> list[Ratio]:
    """In each configuration with a right peer, our time over that of the peer with the least median."""
    right = [[ratio for ratio in work.ratios.values() if not is_wrong(ratio.base)] for work in works]
    return [min(ratios, key=lambda ratio: median_s(ratio.base) or 0.0) for ratios in right if ratios]


def peer_answer(
    workload: str, rows: Sequence[Row], works: Sequence[Configuration], without_peers: Callable[[Sequence[Row]], str]
) -> Answer | None:
    """Our implementation against the fastest peers of the configurations of these rows, then the largest errors.

    `without_peers`: the verdict on right rows where no peer ran.
    """
    best = fastest_right(works)
    wrong = [row for row in rows if is_wrong(row)]
    if best:
        verdict = f"{_against_best(best, works)}{_apart_words(best)}{_wrong_words(wrong)}"
        suggestion = _where_slower(best, works)
    else:
        verdict = f"{without_peers([row for row in rows if row not in wrong])}{_wrong_words(wrong)}".strip()
        suggestion = ""
    if not verdict:
        return None
    return Answer(
        workload=workload,
        verdict=" ".join(filter(None, (verdict, _errors(rows)))),
        suggestion=suggestion or _launches(rows) or _repeat_words(best),
    )


def _repeat_words(best: Sequence[Ratio]) -> str:
    """The option that may decide configurations without a verdict; empty if there are none."""
    unsure = [ratio for ratio in best if not is_judged(ratio) or (ratio.known and ratio.known.word == "cannot tell")]
    if not unsure:
        return ""
    if any(ratio.known is None or ratio.known.interleaving == "none" for ratio in unsure):
        return "`--compare implementation` interleaves the implementations, which may decide it."
    return "More `--steps` may decide it."


def is_wrong(row: Row) -> bool:
    """Whether a result has NaN, or an error far above plain PyTorch's in the same dtype; a fast wrong result is no peer."""
    fact = row.record.fact
    return bool(fact("has_nan")) or any(
        (fact(name) or 0.0) > max(_WRONG * plain, _LEAST_WRONG)
        for name, plain_name in PLAIN_ERRORS.items()
        if (plain := fact(plain_name)) is not None
    )


def _wrong_words(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    names = listed(dict.fromkeys(implementation(row) for row in rows))
    reason = f"NaN, or errors over {_WRONG} times plain PyTorch's"
    return f" Results of {names} are wrong in {len(rows)} and not compared there: {reason}."


def _apart_words(best: Sequence[Ratio]) -> str:
    """A sentence if compared cells were not interleaved, because a change between two processes is part of their ratio."""
    apart = [ratio for ratio in best if ratio.known and ratio.known.interleaving == "none"]
    some = f" in {len(apart)}" if len(apart) < len(best) else ""
    return f" Not interleaved{some}: one process after the other." if apart else ""


def _against_best(best: Sequence[Ratio], works: Sequence[Configuration]) -> str:
    """`Against sdpa_cudnn in 20 configurations, trainstep is faster in 12 and slower in 8; ...`"""
    judged = [ratio for ratio in best if is_judged(ratio)]
    peers = {implementation(ratio.base) for ratio in best}
    several = len({name for work in works for name in work.ratios}) > 1
    if len(best) == 1:
        return _against_one(best[0], ", the fastest peer" if several else "")
    by_word = grouped(judged, lambda ratio: ratio.known.word if ratio.known else "")
    unsure = {"cannot tell": by_word.pop("cannot tell")} if "cannot tell" in by_word else {}
    verdicts = sorted(by_word, key=lambda word: ("faster", "slower", word).index(word))
    counts = [
        f"{word if word in ('faster', 'slower') else f'apart by {word}'} in {len(by_word[word])}"
        f"{_shared_words(by_word[word], best)}"
        for word in verdicts
    ]
    parts = [f"trainstep is {listed(counts)}"] if counts else []
    parts += [f"cannot tell in {len(alike)}" for alike in unsure.values()]
    for reason, alike in grouped([ratio for ratio in best if ratio not in judged], no_verdict_words).items():
        parts.append(f"no verdict in {len(alike)} ({reason})")
    if judged:
        over = f" over the {len(judged)} with a verdict" if len(judged) < len(best) else ""
        peer_words = "theirs" if len(peers) > 1 else f"{next(iter(peers))}'s"
        parts.append(f"its time is {ratio_words(mean_ratio(judged))} of {peer_words} in the geometric mean{over}")
    unmet = f" ({len(works) - len(best)} more have no peer)" if len(works) > len(best) else ""
    peer = f"the fastest peer of each of {len(best)}" if several else f"{next(iter(peers))} in {len(best)}"
    return f"Against {peer} configurations, {'; '.join(parts)}{unmet}."


def _shared_words(ratios: Sequence[Ratio], among: Sequence[Ratio]) -> str:
    """` (all with dtype fp32)`: values that these configurations share, if there are several, and that not all of `among` have."""
    points = [ratio.row.point for ratio in ratios]
    shared = [
        f"{name} {value}"
        for name, value in points[0].items()
        if name not in (*_UNNAMED, *PROVENANCE)
        and all(point.get(name) == value for point in points)
        and any(ratio.row.point.get(name) != value for ratio in among)
    ]
    return f" (all with {listed(shared)})" if shared and len(ratios) > 1 else ""


def _against_one(ratio: Ratio, among: str) -> str:
    """The verdict on a single configuration. `among`: words behind the peer's name."""
    peer = f"{implementation(ratio.base)}{among}"
    if not is_judged(ratio):
        return f"No verdict on trainstep against {peer}: {ratio.reason}."
    word = ratio.known.word if ratio.known else ""
    if word == "cannot tell":
        return f"Cannot tell trainstep from {peer}: it takes {interval_words(ratio)} of its time."
    what = f"is {word} than" if word in ("faster", "slower") else f"differs by {word} from"
    return f"trainstep {what} {peer}: {interval_words(ratio)} of its time."


def _where_slower(best: Sequence[Ratio], works: Sequence[Configuration]) -> str:
    """The peers to use where our kernels are slower for training, and where our kernels are slower in one pass alone.

    Empty if our kernels are slower nowhere.
    """
    slower = [ratio for ratio in best if _is_slower(ratio) and not _is_wrong_elsewhere(ratio, works)]
    whole = {id(ratio): _over_both(ratio, works) for ratio in slower}
    alone = [
        (ratio, over) for ratio in slower if (over := whole[id(ratio)]) and is_judged(over) and not _is_slower(over)
    ]
    advised = [ratio for ratio in slower if not any(ratio is other for other, _ in alone)]
    sentences = [_take(advised, whole, best)] if advised else []
    if alone:
        ratio, over = max(alone, key=lambda pair: pair[0].ratio or 0.0)
        unnamed = [*_UNNAMED, "direction", *needless([ratio.row for ratio in best])]
        one_pass, peer = ratio.row.record.config["direction"], implementation(ratio.base)
        sentences.append(
            f"At {ratio.row.label(without=unnamed, named=True)} trainstep is slower in {one_pass} alone "
            f"({ratio_words(ratio.ratio or 0.0)} of {peer}'s time): {_both_words(over)}."
        )
        if len(alone) > 1:
            sentences.append(f"{len(alone) - 1} more {'is' if len(alone) == 2 else 'are'} slower in one pass alone.")
    return " ".join(filter(None, [*sentences, _host_words(slower)]))


def _take(slower: Sequence[Ratio], whole: Mapping[int, Ratio | None], best: Sequence[Ratio]) -> str:
    """`Take sdpa where trainstep is slower, by most at seq 64: sdpa is 1.32 times as fast there.`"""
    worst = max(slower, key=lambda ratio: ratio.ratio or 0.0)
    over = whole[id(worst)]
    unnamed = [*_UNNAMED, *needless([ratio.row for ratio in best])]
    peers = listed(dict.fromkeys(implementation(ratio.base) for ratio in slower))
    most = f": {times_words(worst.ratio or 1.0)} as fast"
    if len(best) > 1:
        name, peer = worst.row.label(without=unnamed, named=True), implementation(worst.base)
        most = f", {'by most ' if len(slower) > 1 else ''}at {name}: {peer} is {times_words(worst.ratio or 1.0)} as fast there"
    if over is not None and is_judged(over) and over.row is not worst.row:
        most += f", and {times_words(over.ratio or 1.0)} over forward and backward"
    return f"Take {peers} where trainstep is slower{most}."


def _is_slower(ratio: Ratio) -> bool:
    return is_judged(ratio) and ratio.known is not None and ratio.known.verdict == "slower"


def _is_wrong_elsewhere(ratio: Ratio, works: Sequence[Configuration]) -> bool:
    """Whether the peer's result is wrong in another pass of the same shape: training needs both passes."""
    shape, peer = ratio.row.rest("implementation", "direction"), implementation(ratio.base)
    passes = (work.cells[peer] for work in works if peer in work.cells)
    return any(is_wrong(row) for row in passes if row.rest("implementation", "direction") == shape)


def _over_both(ratio: Ratio, works: Sequence[Configuration]) -> Ratio | None:
    """Our time over the peer's for forward and backward of the same shape; None if the record does not have both passes.

    Without a cell that timed both together, call i of forward and call i of backward count as one.
    """
    own = next(work for work in works if work.cells.get(OURS) is ratio.row)
    shape, peer = own.row.rest("direction"), implementation(ratio.base)
    passes = {
        str(work.cells[OURS].record.config.get("direction")): work.cells
        for work in works
        if work.row.rest("direction") == shape and peer in work.ratios and not is_wrong(work.cells[peer])
    }
    if "both" in passes:
        return ratio_of(passes["both"][peer], passes["both"][OURS], TIME)
    if not {"forward", "backward"} <= passes.keys():
        return None
    peer_rows, our_rows = ([passes[direction][name] for direction in ("forward", "backward")] for name in (peer, OURS))
    return ratio_of(_added(peer_rows), _added(our_rows), TIME)


def _added(rows: Sequence[Row]) -> Row:
    """A row whose calls take the time of a call of each of these rows."""
    times = zip(*(row.record.samples[TIME].values for row in rows), strict=False)
    samples = {TIME: Samples(unit="s", values=tuple(map(sum, times)))}
    return replace(rows[0], record=replace(rows[0].record, samples=samples))


def _both_words(over: Ratio) -> str:
    """`forward and backward together take 2.40 ms for 2.68 ms, a ratio of ..., so keep trainstep for training`."""
    our_s, peer_s = (median_s(row) or 0.0 for row in (over.row, over.base))
    together = f"forward and backward together take {seconds_words(our_s)} for {seconds_words(peer_s)}"
    word = over.known.word if over.known else ""
    if word == "faster":
        return f"{together}, a ratio of {interval_words(over)}, so keep trainstep for training"
    unlike = "which cannot be told apart" if word == "cannot tell" else f"a difference of {word}"
    return f"{together}, {unlike}: ratio {interval_words(over)}"


def _host_words(slower: Sequence[Ratio]) -> str:
    """Where a call of ours takes longer although the GPU works less for it; empty if there is no such call."""
    busy = [(ratio, *(row.record.fact("device_busy_s") for row in (ratio.row, ratio.base))) for ratio in slower]
    host = [(ours_s, theirs_s) for _, ours_s, theirs_s in busy if ours_s and theirs_s and ours_s < theirs_s]
    if not host:
        return ""
    some = "there" if len(slower) == 1 else f"in {len(host)} of these {len(slower)}"
    ours_s, theirs_s = min(host, key=lambda pair: pair[0] / pair[1])
    most = "" if len(host) == 1 else "for instance "
    return (
        f"The GPU works less for trainstep {some} ({most}{seconds_words(ours_s)} of the call for "
        f"{seconds_words(theirs_s)}): the difference is the host's."
    )


def _errors(rows: Sequence[Row]) -> str:
    """The largest error of our kernels, and of the worst peer, against a reference in higher precision."""
    errors: dict[str, float] = {}
    for row in rows:
        row_errors = [error for name in PLAIN_ERRORS if (error := row.record.fact(name)) is not None]
        if row_errors:
            name = implementation(row)
            errors[name] = max([errors.get(name, 0.0), *row_errors])
    if not errors:
        return ""
    ours, others = errors.pop(OURS, None), errors
    peer = max(others, key=lambda name: others[name], default="")
    if ours is None:
        return f"Largest error against the reference: {others[peer]:.1e} of {peer}."
    worst = f"{peer}'s is {others[peer]:.1e}" if others else ""
    return f"Largest error against the reference: {ours:.1e}{f'; {worst}' if worst else ''}."


def _launches(rows: Sequence[Row]) -> str:
    """How many cells are launch-bound, and how to time their kernels alone; empty if none is."""
    bound = [row for row in rows if host_limit(row.record) == LAUNCH_BOUND]
    if not bound:
        return ""
    return (
        f"{len(bound)} of {len(rows)} cells are launch-bound, so they show the host's time; in a captured step "
        "(`trainstep bench --capture auto`) only the kernels' time counts."
    )
