"""Lines that read a tensor's value are found with their callers, and torch is as it was afterwards."""

import inspect

import pytest
import torch

from trainstep.measure.run.waits import Waits


def lines_of(table: dict[str, list[object]]) -> dict[str, int]:
    """Source -> calls of the lines in this file."""
    return {
        str(source): int(str(calls))
        for file, source, calls in zip(table["file"], table["source"], table["calls"], strict=True)
        if file == __file__
    }


def test_reads_are_noted_by_line():
    value = torch.ones(3)
    waits = Waits(on_gpu=False)
    waits.start()
    try:
        for _ in range(4):
            value.sum().item()
        positive = bool(value[0] > 0)
        as_list = value.tolist()
    finally:
        waits.stop()
    assert (positive, as_list) == (True, [1.0, 1.0, 1.0])
    table = waits.table()
    assert lines_of(table) == {
        "value.sum().item()": 4,
        "positive = bool(value[0] > 0)": 1,
        "as_list = value.tolist()": 1,
    }
    assert all(seconds > 0 for seconds in table["time_s"])
    assert table["line"] == sorted(table["line"], key=lambda line: -table["time_s"][table["line"].index(line)])


def test_a_statement_over_several_lines_is_whole():
    value = torch.ones(3)
    waits = Waits(on_gpu=False)
    waits.start()
    # fmt: off
    if (
        value.sum() > 0
    ):
        pass
    # fmt: on
    waits.stop()
    (source,) = lines_of(waits.table())
    assert source in ("if ( value.sum() > 0", "value.sum() > 0")


def test_torch_itself_may_read_on_a_cpu():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adam([parameter], foreach=False)  # reads its step's number, which is a tensor
    waits = Waits(on_gpu=False)
    waits.start()
    optimizer.step()
    waits.stop()
    assert waits.table()["file"] == []


@pytest.mark.parametrize("name", ["item", "tolist", "__bool__", "__float__", "cpu"])
def test_methods_are_put_back(name: str):
    before, own = inspect.getattr_static(torch.Tensor, name), name in torch.Tensor.__dict__
    waits = Waits(on_gpu=False)
    waits.start()
    assert inspect.getattr_static(torch.Tensor, name) is not before
    waits.stop()
    assert inspect.getattr_static(torch.Tensor, name) is before
    assert (name in torch.Tensor.__dict__) == own


def test_an_error_in_a_read_stays_the_scripts():
    waits = Waits(on_gpu=False)
    waits.start()
    try:
        with pytest.raises(RuntimeError, match="2 elements"):
            torch.ones(2).item()
    finally:
        waits.stop()
