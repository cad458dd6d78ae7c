"""Fields carry their help text, and their checks refuse values in one sentence."""

from dataclasses import fields, make_dataclass
from typing import Any

import pytest

from trainstep.config.fields import check_choices, check_integer, check_known, check_positive, described, nearest

FIELDS = [
    ("colour", str, described("its colour", "red", ("red", "green"))),
    ("count", Any, described("how many", 1)),
]
Config = make_dataclass("Config", FIELDS)


def test_a_field_carries_its_help_and_choices():
    colour, count = fields(Config)
    assert (colour.metadata["help"], colour.metadata["choices"]) == ("its colour", ("red", "green"))
    assert (count.metadata["help"], count.metadata["choices"]) == ("how many", ())
    assert Config() == Config(colour="red", count=1)


def test_an_unknown_choice_is_refused_with_the_nearest_one():
    check_choices(Config(colour="green"))
    with pytest.raises(ValueError, match=r"^colour: 'gren' is not known \(did you mean green\?\); known: red, green$"):
        check_choices(Config(colour="gren"))


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None, float("nan")])
def test_values_that_are_no_positive_integer_are_refused(value: Any):
    with pytest.raises(ValueError, match=r"^count: must be a whole number of at least 1, not "):
        check_positive(Config(count=value), "count")


def test_integers_at_the_lower_bound_are_accepted():
    check_positive(Config(count=1), "count")
    check_integer(Config(count=0), "count", at_least=0)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        check_integer(Config(count=-1), "count", at_least=0)


def test_an_unknown_key_is_refused_with_the_nearest_one():
    check_known({"a": 1}, ["a", "b"], "here")
    with pytest.raises(
        ValueError, match=r"^here: unknown key 'contxt' \(did you mean context\?\); known: mode, context$"
    ):
        check_known({"mode": 1, "contxt": 2}, iter(["mode", "context"]), "here")


def test_nearest_suggests_a_similar_name_or_nothing():
    assert nearest("contxt", ["context", "mode"]) == " (did you mean context?)"
    assert nearest("zzz", ["context", "mode"]) == ""
