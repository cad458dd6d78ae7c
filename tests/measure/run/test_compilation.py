"""What torch.compile did while a script trained, by counters that a test makes up."""

import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import trainstep
from trainstep.measure.run.compilation import Compilations


def metrics(number: int, file: str, reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        compile_id=f"{number}/0",
        start_time_us=number,
        co_name="forward",
        co_filename=file,
        co_firstlineno=7,
        entire_frame_compile_time_s=0.5,
        recompile_reason=reason,
        fail_reason=None,
    )


def test_compilations_of_our_own_hooks_are_not_the_scripts(monkeypatch: pytest.MonkeyPatch):
    """A graph break at a followed module leads torch.compile into them."""
    made: list[SimpleNamespace] = []
    utils = SimpleNamespace(
        counters=defaultdict(Counter), graph_break_reasons=[], get_compilation_metrics=lambda: list(made)
    )
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    compilations = Compilations()
    ours = str(Path(trainstep.__file__).parent / "measure" / "run" / "hooks.py")
    made += [metrics(1, "train.py"), metrics(2, ours, "a hook"), metrics(3, "train.py", "a size")]
    utils.counters["frames"]["total"] = 3
    assert compilations.poll(5)
    assert [(row["file"], row["reason"]) for row in compilations.take()] == [("train.py", ""), ("train.py", "a size")]
    assert compilations.recompilations == 1
