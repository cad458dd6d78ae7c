"""The layout of a page: the answer, contents, open and folded sections, and environments as footnotes."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from attention_records import lengths
from report.conftest import H200
from report.profile.test_device_page import ceiling
from report.profile.test_tables import profiled
from trainstep.report.kit.charts import Panels, Section
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Table
from trainstep.report.page import OPEN_PX, folded, page, sections, title_of


class Links(HTMLParser):
    """The links of a page to itself, and the ids of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.to: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag == "a":
            self.to.append(named["href"] or "")
        if "id" in named:
            self.ids.append(named["id"] or "")


def a_chart(title: str, height: int = 400):
    panels = Panels(titles=[""], columns=1, x_title="", y_title="")
    return panels.chart(title, "", height=height)


def a_table(title: str, rows: int = 3, *, folded_away: bool = False) -> Table:
    return Table.of(title, [{"n": n} for n in range(rows)], [Column("n")], folded=folded_away)


@pytest.fixture
def two_commits(rows) -> list[Row]:
    """Two profiled cells whose environments differ in the commit only."""
    other = dataclasses.replace(H200, commit="fffffff0123456789")
    first = profiled()
    second = dataclasses.replace(first, key="other", environment=other)
    return rows([dataclasses.replace(first, environment=H200), second])


def test_a_page_begins_with_answer_contents_and_first_chart(two_commits):
    text = page(two_commits)
    places = [text.index(part) for part in ('class="answer"', "<nav ", 'class="chart"', "<footer")]
    assert places == sorted(places)


def test_contents_lead_to_every_section(two_commits):
    text = page(two_commits)
    links = Links(text)
    assert links.to
    assert {link.removeprefix("#") for link in links.to} <= set(links.ids)
    assert len(links.to) == len(re.findall(r"<h2>", text))


def test_a_page_of_few_sections_has_no_contents(rows, end_to_end):
    text = page(rows(end_to_end[:2]))
    assert "<nav" not in text
    assert "<h2>" in text


def test_sections_further_down_are_folded_and_named():
    charts = [a_chart(f"chart {number}", 1000) for number in range(9)]
    part, later = folded(
        [Section(title="a", charts=tuple(charts), tables=(a_table("cells"),)), Section(title="b", paragraphs=("why",))]
    )
    assert part.folded is not None
    assert 2 <= len(part.charts) <= OPEN_PX / 1000
    assert (*part.charts, *part.folded.charts) == tuple(charts)
    assert part.folded.tables
    assert part.folded.title.startswith(f"{9 - len(part.charts)} charts, 1 table: chart {len(part.charts)}; ")
    assert part.folded.title.endswith("; …")
    assert later.paragraphs == ()
    assert later.folded is not None
    assert later.folded.paragraphs == ("why",)


def test_the_first_chart_is_open_whatever_its_height():
    part, other = folded(
        [Section(title="a", charts=(a_chart("all", 9000),)), Section(title="b", tables=(a_table("t"),))]
    )
    assert (len(part.charts), part.folded) == (1, None)
    assert other.folded is not None
    assert other.folded.title == "1 table: t"


def test_a_short_page_folds_nothing():
    section = Section(
        title="a", charts=(a_chart("one"),), tables=(a_table("t"), a_table("many", 10_000, folded_away=True))
    )
    (part,) = folded([section])
    assert (part.folded, part.charts, part.tables) == (None, section.charts, section.tables)


def test_environments_are_footnotes(two_commits):
    text = page(two_commits)
    head, foot = text[: text.index("<footer")], text[text.index("<footer") :]
    for mark, commit in (("¹", "abc1234"), ("²", "fffffff01234")):
        assert f"<strong>{mark}</strong> Environment: NVIDIA H200, commit {commit}" in foot
        assert f"small 256 {mark}" in head or f"tiny 64 {mark}" in head or f" {mark}</h2>" in head
        assert commit not in head
        assert f"NVIDIA H200{mark}" in head


def test_one_environment_needs_no_footnote(rows, end_to_end):
    assert "¹" not in page(rows(end_to_end))


def test_different_chips_are_named_without_footnotes(rows, make, cpu_record):
    text = page(rows([make(model="tiny", context=64), cpu_record]))
    assert "¹" not in text
    assert "<td>Ryzen 7840U</td>" in re.sub(r">\s+|\s+<", lambda match: match[0].strip(), text)


def test_attention_begins_with_peers_and_ends_with_all_cells(rows):
    all_rows = rows([ceiling(5e13, "matmul"), *lengths(seqs=(256, 4096), dtypes=("bf16",))])
    titles = [section.title for section in sections(all_rows)]
    assert titles[0] == "Attention: trainstep against each peer"
    assert titles[-1] == "All cells"
    assert title_of(all_rows).startswith("Attention on ")
