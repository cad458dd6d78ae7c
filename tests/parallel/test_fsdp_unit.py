"""The order of a pass: units to gather next and units to free, at each trigger; strings stand for modules and units."""

from typing import Any

from trainstep.parallel.fsdp_unit import PassOrder

NEEDS: Any = {"model": ["root"], "a": ["A"], "b": ["B"], "c": ["C"]}


def test_before_a_forward_the_order_is_that_of_the_needs():
    order = PassOrder(NEEDS, ahead=1)
    assert order.last == "c"
    assert order.next_in_forward == {"model": ["A"], "a": ["B"], "b": ["C"], "c": []}
    assert order.next_in_backward == {"c": ["B"], "b": ["A"], "a": ["root"], "model": []}


def test_ahead_counts_triggers_not_units():
    needs: Any = {"model": ["root"], "a": ["trained a", "frozen a"], "b": ["B"]}
    assert PassOrder(needs, ahead=0).next_in_forward == {"model": [], "a": [], "b": []}
    assert PassOrder(needs, ahead=1).next_in_forward["model"] == ["trained a", "frozen a"]
    assert PassOrder(needs, ahead=2).next_in_forward["model"] == ["trained a", "frozen a", "B"]


def test_units_that_backward_has_passed_are_behind_it():
    assert PassOrder(NEEDS, ahead=1).behind_in_backward == {"c": [], "b": ["C"], "a": ["C", "B"]}


def test_units_that_are_still_needed_are_not_behind():
    tied: Any = {"model": ["root"], "a": ["A"], "b": ["B", "A"], "c": ["C", "root"]}
    order = PassOrder(tied, ahead=1)
    assert order.behind_in_backward["b"] == ["C"]  # the outermost module needs root to the end of backward
    assert order.behind_in_backward["a"] == ["C", "B"]  # b has been passed, and a needs A itself


def test_a_trigger_that_comes_twice_counts_where_the_pass_reaches_it_first():
    order = PassOrder(NEEDS, ahead=1)
    order.learn(["model", "a", "b", "a", "c"])
    assert order.next_in_forward == {"model": ["A"], "a": ["B"], "b": ["A"], "c": []}
    assert order.next_in_backward == {"c": ["A"], "a": ["B"], "b": ["A"], "model": []}
    assert order.behind_in_backward == {"c": [], "a": ["C"], "b": ["C", "A"]}


def test_a_forward_in_another_order_is_learned():
    order = PassOrder(NEEDS, ahead=1)
    order.learn(["model", "c", "a"])
    assert order.last == "a"
    assert order.next_in_forward == {"model": ["C"], "c": ["A"], "a": []}
    assert order.next_in_backward == {"a": ["C"], "c": ["root"], "model": []}
    assert order.behind_in_backward == {"a": [], "c": ["A"]}


def test_a_forward_in_the_same_order_keeps_the_computed_order():
    order = PassOrder(NEEDS, ahead=1)
    computed = order.next_in_forward
    order.learn(["model", "a", "b", "c"])
    assert order.next_in_forward is computed
    order.learn(["model", "b"])
    assert order.next_in_forward is not computed
