"""What each of several ranks held, as one record: of all ranks the tables, of the fullest the facts.

Every table has a first column `rank` and all ranks' rows, rank by rank; `expected` among them, the formula's bytes (none for
torch's ways). The record's facts are those of the rank that held most, `fullest_rank`, for that one decides what fits; all ranks'
are in the table `rank_facts`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.workload import Findings
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks
from trainstep.plan.peak_memory import expected_memory
from trainstep.records.facts import Fact, facts_of
from trainstep.records.tables import RANK_FACTS
from trainstep.traces.ledger import SAVED_FOR_BACKWARD

Columns = Mapping[str, Sequence[Any]]
_LINES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_MOMENTS = {
    "init": "after_init",
    "after forward": "after_forward",
    "after backward": "after_backward",
    "after step": "after_step",
}
"""The ledger's moments, and the formula's. Where a step peaks is between them: there the sums alone are compared."""


def expected_tables(
    config: RanksConfig, sizes: Sequence[ParameterSize], rank: int, ledger: Columns
) -> tuple[dict[str, Fact], dict[str, Columns]]:
    """This rank's bytes by formula, beside its ledger; nothing for torch's ways. What forward saved for backward (the ledger's
    activations, logits and autocast copies) goes into the formula as measured."""
    lines = dict(zip(ledger["line"], ledger["after forward"], strict=True))
    saved_bytes = sum(lines.get(line) or 0 for line in SAVED_FOR_BACKWARD)
    expected = expected_memory(config, sizes, rank=rank, activations_bytes=saved_bytes)
    if expected is None:
        return {}, {}
    facts = facts_of(
        expected_peak_bytes=expected.peak.total_bytes,
        expected_peak_point=expected.peak_point.replace("_", " "),
    )
    held = {moment: getattr(expected, name) for moment, name in _MOMENTS.items()}
    columns = {
        moment: [getattr(one, f"{line.replace(' ', '_')}_bytes") for line in _LINES] for moment, one in held.items()
    }
    return facts, {"expected": {"line": list(_LINES), **columns}}


def together(ranks: Ranks, mine: Findings) -> Findings:
    """All ranks' findings as one, on every rank. All must ask."""
    plain = {"facts": {name: asdict(fact) for name, fact in mine.facts.items()}, "tables": mine.tables}
    each = [json.loads(text) for text in Collectives(ranks).gather_texts(json.dumps(plain))]
    facts = [{name: Fact(**fact) for name, fact in one["facts"].items()} for one in each]
    fullest = max(range(len(each)), key=lambda rank: _peak_bytes(facts[rank]))
    rows = [(rank, name, fact.value, fact.unit) for rank, its in enumerate(facts) for name, fact in its.items()]
    names = list(dict.fromkeys(name for one in each for name in one["tables"]))
    tables = {name: _stacked([one["tables"].get(name, {}) for one in each]) for name in names}
    tables[RANK_FACTS] = {
        name: [row[place] for row in rows] for place, name in enumerate(("rank", "fact", "value", "unit"))
    }
    return Findings(samples={}, facts=facts[fullest] | facts_of(fullest_rank=fullest), tables=tables)


def _peak_bytes(facts: Mapping[str, Fact]) -> int:
    return int(facts["peak_allocated_bytes"].value) if "peak_allocated_bytes" in facts else 0


def _stacked(tables: Sequence[Columns]) -> Columns:
    """A table a rank as one, with a column `rank`."""
    names = next(list(table) for table in tables if table)
    counts = [len(next(iter(table.values()))) if table else 0 for table in tables]
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    return {"rank": ranks, **{name: [value for table in tables for value in table.get(name, ())] for name in names}}
