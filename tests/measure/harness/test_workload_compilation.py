"""Compile seconds, and whether the on-disk cache had the code: from pretended counters, and from real processes."""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch._dynamo.utils as dynamo

from trainstep.measure.harness.workload import compilation_facts, use_compile_cache

CODE = """
import json, torch
from trainstep.measure.harness.workload import compilation_facts, use_compile_cache
if {cold!r}:
    use_compile_cache({cold!r})
layer = torch.nn.Linear(4, 4)
torch.compile(lambda x: layer(x).sin().sum())(torch.ones(2, 4)).backward()
print(json.dumps({{name: fact.value for name, fact in compilation_facts().items()}}))
"""


def facts_of(monkeypatch: pytest.MonkeyPatch, *, inductor: dict[str, int], autograd: dict[str, int] | None = None):
    counters = defaultdict(Counter)
    counters["inductor"].update(inductor)
    counters["aot_autograd"].update(autograd or {})
    counters["stats"]["unique_graphs"] = 3
    times = {"_compile.compile_inner": [1.0, 2.0], "backward._backward_impl": [4.0], "compile_fx_inner": [100.0]}
    monkeypatch.setattr(dynamo, "counters", counters)
    monkeypatch.setattr(dynamo, "compilation_time_metrics", times)
    return {name: (fact.value, fact.unit) for name, fact in compilation_facts().items()}


def test_compile_seconds_are_those_of_whole_graphs(monkeypatch: pytest.MonkeyPatch):
    facts = facts_of(monkeypatch, inductor={"fxgraph_cache_miss": 2})
    assert facts == {"compile_s": (7.0, "s"), "compile_cache": ("cold", ""), "compiled_graphs": (3, "count")}


@pytest.mark.parametrize(
    ("inductor", "autograd", "state"),
    [
        ({"fxgraph_cache_hit": 2}, {}, "warm"),
        ({}, {"autograd_cache_hit": 1}, "warm"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}, {}, "cold"),
        ({"fxgraph_cache_hit": 2, "fxgraph_cache_bypass": 1}, {}, "cold"),
        ({"fxgraph_cache_miss": 1}, {"autograd_cache_hit": 1}, "cold"),
        ({}, {}, "cold"),
    ],
)
def test_the_cache_was_warm_if_it_had_every_graph(
    monkeypatch: pytest.MonkeyPatch, inductor: dict[str, int], autograd: dict[str, int], state: str
):
    assert facts_of(monkeypatch, inductor=inductor, autograd=autograd)["compile_cache"] == (state, "")


def test_each_compiler_has_its_own_cache_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, "before")
    use_compile_cache(str(tmp_path))
    folders = [Path(os.environ[name]) for name in names]
    assert len(set(folders)) == 2
    assert {folder.parent for folder in folders} == {tmp_path}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_second_process_is_warm_and_an_empty_cache_is_cold(tmp_path: Path):
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TMPDIR": str(tmp_path),
    }
    all_facts = []
    for cold in ("", "", str(tmp_path / "empty")):
        command = [sys.executable, "-c", CODE.format(cold=cold)]
        process = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        all_facts.append(json.loads(process.stdout.splitlines()[-1]))
    assert [facts["compile_cache"] for facts in all_facts] == ["cold", "warm", "cold"]
    assert all(facts["compiled_graphs"] == 1 for facts in all_facts)
    assert all_facts[1]["compile_s"] < min(all_facts[0]["compile_s"], all_facts[2]["compile_s"])
