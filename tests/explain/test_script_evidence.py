"""A run of a script: what it waits for is found, with the line of the user's code."""

import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from run_records import COMPILED, WAITS, a_run, records_of, watched
from trainstep.config.script import Part
from trainstep.explain.budget import AS_THEY_RUN, step_budget
from trainstep.explain.script_evidence import script_evidence


def parts(**ms: float) -> dict[Part, float]:
    return {part: ms.get(part.name.lower(), 0.0) for part in Part}


def test_a_slow_loader_is_found_and_the_rest_is_work_as_it_runs():
    budget = step_budget(script_evidence([a_run(parts_ms=parts(data=20.0, forward=3.0, backward=4.0))]), None)
    assert [finding.cause for finding in budget.findings] == ["data"]
    assert budget.findings[0].excess.time_s == pytest.approx(0.02)
    assert budget.floor == {AS_THEY_RUN: pytest.approx(0.007)}
    assert budget.explained_share == pytest.approx(1.0)


def test_recompiles_every_few_steps_are_found_with_their_line():
    [run] = [a_run(parts_ms=parts(forward=60.0, backward=4.0), tables={"compilations": COMPILED})]
    finding = step_budget(script_evidence([run]), None).findings[0]
    assert finding.cause == "recompiles"
    assert finding.excess.time_s == pytest.approx(1.0 / 20), "one second of a second compilation, over 20 steps"
    assert str(finding.place) == "/x/project/train.py:3"


def test_a_value_read_each_step_is_found_on_a_gpu_with_its_line():
    facts = {"inspected_step": 5, "exposed_s": 0.0}
    classes = {"phase": ["forward"], "class": ["matmul"], "calls": [1.0], "time_s": [0.005], "share": [1.0]}
    run = a_run(tables={"waits": WAITS, "classes": classes}, facts=facts, device="cuda")
    finding = step_budget(script_evidence([run]), None).findings[0]
    assert finding.cause == "synchronisations"
    assert finding.excess.time_s == pytest.approx(0.003), "of 5 ms without work, the loader has 2 and the line the rest"
    assert str(finding.place) == "/x/project/train.py:12"


def test_a_collector_is_found_and_two_records_are_one_run():
    records = [a_run(collection_ms=3.0), a_run(collection_ms=3.0, first_step=21)]
    finding = next(
        finding
        for finding in step_budget(script_evidence(records), None).findings
        if finding.cause == "garbage_collector"
    )
    assert finding.excess.time_s == pytest.approx(0.003)


def test_a_run_of_warm_ups_alone_is_refused():
    with pytest.raises(ValueError, match="only warm-ups"):
        script_evidence([a_run(steps=0)])


class SlowSamples(Dataset[torch.Tensor]):
    """Samples that each take 10 ms to make."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((8,), float(index))


@pytest.mark.slow
def test_a_real_slow_loader_is_found(tmp_path: Path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(tmp_path) as watch:
        for batch in DataLoader(SlowSamples(), batch_size=1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    budget = step_budget(script_evidence(records_of(watch)), None)
    assert budget.findings[0].cause == "data"
    assert budget.findings[0].excess.time_s > 0.01
    assert budget.explained_share >= 0.95
