"""Every cause has its page, and every page its cause."""

import re

import pytest

from sources import ROOT
from trainstep.explain.causes import CAUSES, page_of


def test_every_cause_has_its_page_and_every_page_its_cause():
    assert {path.stem for path in (ROOT / "docs/guide/slow").glob("*.md")} == set(CAUSES)
    assert 10 <= len(CAUSES) <= 21


@pytest.mark.parametrize("cause", CAUSES)
def test_a_page_says_what_it_is_how_to_see_it_and_how_to_fix_it(cause: str):
    text = (ROOT / page_of(cause)).read_text()
    assert text.lower().startswith(f"# {CAUSES[cause].title}\n")
    assert re.findall(r"(?m)^## (.+)$", text) == ["What it is", "How to see it", "How to fix it"]
    assert f"](slow/{cause}.md)" in (ROOT / "docs/guide/explain.md").read_text()


@pytest.mark.parametrize("cause", CAUSES)
def test_the_lines_to_write_are_those_of_the_page(cause: str):
    text = (ROOT / page_of(cause)).read_text()
    for line in CAUSES[cause].lines:
        assert line in text, line
