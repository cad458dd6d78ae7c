"""Words for runs of scripts: what a run is called, and what a comparison of two scripts' runs leaves open.

`trainstep compare` makes one cell of a script's runs (report/run/compared.py), whose fact `compared_runs` counts them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainstep.records.compare import MINIMUM_PAIRS, NOT_INTERLEAVED, Comparison
from trainstep.records.record import Record
from trainstep.report.kit.rows import words

MORE_RUNS = (
    f"`trainstep run --out FILE` appends to its file: with at least {MINIMUM_PAIRS} runs in each, made alternately, `compare` "
    "has a verdict. How far two runs of one script lie apart is not known from one."
)


def script_words(config: Mapping[str, Any]) -> str:
    """`train.py --lr 1`"""
    return f"{config['script']} {config['arguments']}" if config.get("arguments") else str(config["script"])


def rank_words(config: Mapping[str, Any]) -> str:
    """` (rank 1 of 2)`; empty for one rank."""
    return f" (rank {config['rank']} of {config['ranks']})" if config["ranks"] > 1 else ""


def with_doubts(before: Record, after: Record, comparison: Comparison) -> Comparison:
    """The comparison of two such cells; its reason says what a value is, what the interval leaves out, and what else differs."""
    counts = [record.fact("compared_runs", 1) for record in (before, after)]
    reason = comparison.reason.removesuffix(NOT_INTERLEAVED)  # made alternately or not: their order is not known
    if not all(record.samples["step"].values for record in (before, after)):
        reason = "a side has no timed step, only warm-ups"
    doubt = f"a value is the median of one run's steps, and there are {counts[0]} and {counts[1]} runs"
    pairs = {name: (before.config.get(name), after.config.get(name)) for name in {**before.config, **after.config}}
    differing = [f"{name} ({words(a) or 'none'}; {words(b) or 'none'})" for name, (a, b) in pairs.items() if a != b]
    more = f"; they differ in {', '.join(differing)}" if differing else ""
    return replace(comparison, reason=f"{reason}; {doubt}{more}")


def is_of_runs(record: Record) -> bool:
    """Whether `compare` made the record of a script's runs."""
    return record.fact("compared_runs") is not None


def has_few_runs(record: Record) -> bool:
    """Whether the cell has fewer runs than a verdict by runs needs."""
    return bool(record.fact("compared_runs", MINIMUM_PAIRS) < MINIMUM_PAIRS)


def cell_words(record: Record) -> str:
    """`train.py --lr 1 with workers=8`, with the rank if there are several."""
    applied = f" with {record.config['applied']}" if record.config.get("applied") else ""
    return f"{script_words(record.config)}{applied}{rank_words(record.config)}"
