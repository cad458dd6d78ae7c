"""A run of several ranks is shown once all of them have ended; a report that cannot be started is a sentence."""

import errno
import os
import subprocess
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from record_maker import a_record
from trainstep.measure.run.show import rank_path, shared_name, show_run, wait_for_ranks
from trainstep.records.facts import facts_of
from trainstep.records.store import Store


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_is_shown_when_every_rank_has_ended(ranks: int, tmp_path: Path):
    path = tmp_path / "r.jsonl"

    def end(rank: int) -> None:
        Store(rank_path(path, rank)).append(a_record(facts=facts_of(ending="ran to its end")))

    Store(rank_path(path, 1)).append(a_record())
    timers = [Timer(0.2 * rank, end, [rank]) for rank in range(1, ranks)]
    for timer in timers:
        timer.start()
    wait_for_ranks(path, ranks, longest_s=60)
    assert all(Store(rank_path(path, rank)).read()[-1].fact("ending") for rank in range(1, ranks))


def test_a_rank_that_was_killed_is_not_waited_for_without_end(tmp_path: Path):
    wait_for_ranks(tmp_path / "r.jsonl", 2, longest_s=0.1)
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_started_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    failed = show_run(tmp_path / "r.jsonl", tmp_path / "r.html", None)
    assert failed == "the report could not be started: Cannot allocate memory"


def test_ranks_of_one_launch_agree_on_a_name_which_the_next_launch_has_not():
    """torchrun starts ranks again from the same process, and counts how often."""
    first = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "0"}
    assert shared_name(first) == shared_name({**first, "RANK": "1"})
    assert shared_name(first) != shared_name({**first, "TORCHELASTIC_RESTART_COUNT": "1"})
