"""A watched loop on a GPU: device times, synchronising lines, the same losses."""

from pathlib import Path

import pytest
import torch

from run_records import records_of, same_with_and_without, watched
from trainstep.config.script import Part

pytestmark = pytest.mark.gpu


def loop(steps: int = 12, *, reads: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(256, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if reads:
            loss.item()
    return [loss.item() for loss in losses]


def test_parts_have_times_on_the_device(tmp_path: Path):
    with watched(tmp_path, every=6) as watch:
        loop()
    records = records_of(watch)
    assert all(record.config["device"] == "cuda" for record in records[1:])
    for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER):
        timed = [record.samples.get(f"device_{part.value}") for record in records]  # not the step that shows the device
        values = [value for samples in timed if samples for value in samples.values]
        assert values
        assert min(values) > 0
    assert any(record.fact("device_busy_s") for record in records)
    assert all(record.fact("allocation_retries") == 0 for record in records)


def test_losses_are_the_same_to_the_bit(tmp_path: Path):
    same_with_and_without(loop, tmp_path, every=4)


def test_the_line_that_synchronises_is_named(tmp_path: Path):
    with watched(tmp_path, every=6) as watch:
        loop(reads=True)
    table = next(record.tables["waits"] for record in records_of(watch) if "waits" in record.tables)
    assert "loss.item()" in table["source"]
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_loop_without_waits_has_none(tmp_path: Path):
    with watched(tmp_path, every=6) as watch:
        loop()
    assert not any(record.tables.get("waits") for record in records_of(watch))
