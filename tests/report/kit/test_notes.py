"""Sentences under the tables: where phases hold more than their names say."""

from dataclasses import replace
from typing import Any

import pytest

from sources import ROOT
from trainstep.records.store import Store
from trainstep.report.kit.notes import notes
from trainstep.report.kit.rows import rows_of

BY_COPIES = {"update": "by_bucket", "transport": "copies", "device": "cuda"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"update": "in_backward"}, "With update in_backward the time of backward holds the updates"),
        (BY_COPIES, "grad_sync is what is left of messages and updates"),
        ({**BY_COPIES, "transport": "library"}, ""),
        ({**BY_COPIES, "device": "cpu"}, ""),
    ],
)
def test_a_phase_that_holds_updates_is_told(changed: dict[str, Any], words: str):
    [record, *_] = [one for one in Store(ROOT / "results/h200/ddp_xl_messages.jsonl").read() if not one.failure]
    told = [
        text
        for text in notes(rows_of([("r.jsonl", replace(record, config={**record.config, **changed}))]))
        if "With update" in text
    ]
    assert len(told) == bool(words)
    assert all(words in text for text in told)
