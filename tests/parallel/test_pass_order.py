"""Units that come next and units that are done with, at each trigger; names stand for modules and for units."""

from typing import Any

from trainstep.parallel.pass_order import PassOrder

NEEDS: Any = {"model": ["root"], "a": ["A"], "b": ["B"], "c": ["C"]}


def test_before_a_forward_it_is_the_order_of_the_needs():
    order = PassOrder(NEEDS, ahead=1)
    assert order.last == "c"
    assert order.next_in_forward == {"model": ["A"], "a": ["B"], "b": ["C"], "c": []}
    assert order.next_in_backward == {"c": ["B"], "b": ["A"], "a": ["root"], "model": []}


def test_ahead_counts_triggers_not_units():
    needs: Any = {"model": ["root"], "a": ["trained a", "frozen a"], "b": ["B"]}
    assert PassOrder(needs, ahead=0).next_in_forward == {"model": [], "a": [], "b": []}
    assert PassOrder(needs, ahead=1).next_in_forward["model"] == ["trained a", "frozen a"]
    assert PassOrder(needs, ahead=2).next_in_forward["model"] == ["trained a", "frozen a", "B"]


def test_behind_backward_are_the_units_it_has_passed():
    assert PassOrder(NEEDS, ahead=1).behind_in_backward == {"c": [], "b": ["C"], "a": ["C", "B"]}


def test_units_that_are_needed_still_are_not_behind():
    tied: Any = {"model": ["root"], "a": ["A"], "b": ["B", "A"], "c": ["C", "root"]}
    order = PassOrder(tied, ahead=1)
    assert order.behind_in_backward["b"] == ["C"]  # the outermost module needs root to the end of backward
    assert order.behind_in_backward["a"] == ["C", "B"]  # b has been passed, and a needs A itself


def test_a_trigger_that_comes_twice_counts_where_a_pass_meets_it_first():
    order = PassOrder(NEEDS, ahead=1)
    order.learn(["model", "a", "b", "a", "c"])
    assert order.next_in_forward == {"model": ["A"], "a": ["B"], "b": ["A"], "c": []}
    assert order.next_in_backward == {"c": ["A"], "a": ["B"], "b": ["A"], "model": []}
    assert order.behind_in_backward == {"c": [], "a": ["C"], "b": ["C", "A"]}


def test_a_forward_that_goes_another_way_is_learned():
    order = PassOrder(NEEDS, ahead=1)
    order.learn(["model", "c", "a"])
    assert order.last == "a"
    assert order.next_in_forward == {"model": ["C"], "c": ["A"], "a": []}
    assert order.next_in_backward == {"a": ["C"], "c": ["root"], "model": []}
    assert order.behind_in_backward == {"a": [], "c": ["A"]}


def test_a_forward_that_goes_the_same_way_keeps_what_was_worked_out():
    order = PassOrder(NEEDS, ahead=1)
    worked_out = order.next_in_forward
    order.learn(["model", "a", "b", "c"])
    assert order.next_in_forward is worked_out
    order.learn(["model", "b"])
    assert order.next_in_forward is not worked_out
