"""Families of which `make test` takes a sample: each exists, and the sample is spread over it."""

import pytest

from quick import SAMPLED, mark_family, slow_unless
from sources import ROOT


@pytest.mark.parametrize("family", SAMPLED)
def test_a_sampled_family_exists(family: str):
    path, _, function = family.partition("::")
    assert f"def {function}(" in (ROOT / "tests" / path).read_text()


class Item:
    """A test of a sampled family, as far as marking looks at it."""

    def __init__(self, number: int, marks: set[str]) -> None:
        self.nodeid = f"tests/traces/test_profile.py::test_time_is_linear_in_events[{number}]"
        self.marks = marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def test_a_sample_is_spread_evenly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SAMPLED, "traces/test_profile.py::test_time_is_linear_in_events", 2)
    items = [Item(number, {"gpu"} if number == 1 else set()) for number in range(7)]
    mark_family(items)
    assert [number for number, item in enumerate(items) if not item.marks] == [0, 4]
    assert items[1].marks == {"gpu"}


def test_values_are_slow_unless_quick():
    single, pair = slow_unless(lambda value: value > 1, [1, 2]), slow_unless(lambda a, b: a == b, [(1, 1), (1, 2)])
    assert [param.marks for param in single] == [(pytest.mark.slow,), ()]
    assert [(param.values, len(param.marks)) for param in pair] == [((1, 1), 0), ((1, 2), 1)]
