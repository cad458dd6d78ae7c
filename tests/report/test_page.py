"""The parsed page: it is self-contained, names are inert, and failures and provenance are in their places."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from trainstep.records.record import Failure, Holder, Record
from trainstep.report.kit.notes import commands
from trainstep.report.page import page, script_json

HOSTILE = '<script>alert(1)</script></script><!--"><img src=x onerror=document.title="taken">'
FETCHING = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction"}


class ParsedPage(HTMLParser):
    """The elements of a page with their attributes, the texts of its scripts, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in = [tag] if tag in ("script", "style", "title") else []
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in = []

    def handle_data(self, data):
        if self._in == ["script"]:
            self.scripts[-1] += data
        elif self._in != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def everything(end_to_end, warmup_sweep, precision_pair, compile_sweep, cpu_record) -> list[Record]:
    return [*end_to_end, *warmup_sweep, *precision_pair, *compile_sweep, cpu_record]


@pytest.fixture
def hostile(make) -> list[Record]:
    """Records in which every string that a page shows is markup."""
    record = make(warmups=(1.0, 0.3), step=(0.2, 0.21, 0.22), facts={"flops_convention": HOSTILE, "command": HOSTILE})
    environment = dataclasses.replace(record.environment, gpu=HOSTILE, hostname=HOSTILE, commit=HOSTILE, torch=HOSTILE)
    config = {**record.config, "model": {"function": HOSTILE}, "data": HOSTILE}
    named = dataclasses.replace(record, environment=environment, config=config)
    more = {**config, HOSTILE: HOSTILE, "precision": HOSTILE, "attention": HOSTILE}
    holders = (Holder(name=HOSTILE, bytes=3),)
    failure = Failure(kind="crash", phase=HOSTILE, message=HOSTILE, holders=holders, last_lines=(HOSTILE,))
    failed = dataclasses.replace(named, key="other", config=more, samples={}, facts={}, failure=failure)
    return [named, dataclasses.replace(named, key="third", config=more), failed]


def test_a_page_fetches_nothing(rows, everything):
    text = page(rows(everything))
    parsed = ParsedPage(text)
    for tag, attributes in parsed.elements:
        for name in FETCHING & attributes.keys():
            assert (tag, name, attributes[name]) == ("link", "href", "data:,")
    assert not {"iframe", "object", "embed", "img"} & {tag for tag, _ in parsed.elements}
    styles = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in styles
    assert "@import" not in styles
    policy = next(meta["content"] for meta in parsed.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert text.count("plotly.js v") == 1


def test_every_chart_has_an_element_a_description_and_a_table(rows, everything):
    parsed = ParsedPage(page(rows(everything)))
    places = [div for div in parsed.of("div") if div.get("class") == "chart"]
    charts = json.loads(parsed.scripts[1])
    assert len(places) == len(charts) >= 5
    assert [place["id"] for place in places] == [f"chart-{number}" for number in range(len(charts))]
    assert all("table below" in (place["aria-label"] or "") for place in places)
    assert len(parsed.of("table")) >= len(charts)


def test_hostile_names_are_text(rows, hostile):
    text = page(rows(hostile))
    parsed = ParsedPage(text)
    assert len(parsed.scripts) == 3  # plotly, the charts' numbers, the page's own
    assert not parsed.of("img")
    assert "onerror" not in {name for _, attributes in parsed.elements for name in attributes}
    assert HOSTILE in parsed.text
    for trace in json.loads(parsed.scripts[1]):
        assert "<script" not in json.dumps(trace)
        assert "<img" not in json.dumps(trace)


def test_json_cannot_end_its_script():
    text = script_json({"a": "</script><!--&\N{LINE SEPARATOR}"})
    assert not set("<>&\N{LINE SEPARATOR}") & set(text)
    assert json.loads(text) == {"a": "</script><!--&\N{LINE SEPARATOR}"}


def test_a_failure_is_a_cell_with_details(rows, end_to_end):
    parsed = ParsedPage(page(rows(end_to_end)))
    assert len([details for details in parsed.of("details") if details.get("class") == "failure"]) == 1
    for part in (
        "OOM in backward: asked for 2.00 GiB",
        "parameters 60.00 GiB",
        "gradients 50.00 GiB",
        "Tried to allocate",
    ):
        assert part in parsed.text


def test_provenance_is_at_the_foot_of_the_page(rows, end_to_end):
    text = ParsedPage(page(rows(end_to_end))).text
    foot = text[text.index("Where these numbers come from") :]
    for part in (
        "abc1234, with uncommitted changes",
        "node7",
        "580.65",
        "2026-11-21T08:00:00Z",
        "runs/made.jsonl (4 records)",
        "record format 1,",
        "matmuls only",
        "990 TFLOP/s in bf16 (NVIDIA H200 data sheet, dense)",
        "trainstep bench --model small,2.7B --context 256,512",
    ):
        assert part in foot


def test_mixed_machines_are_stated(rows, everything, end_to_end):
    assert "compare across them with care" in ParsedPage(page(rows(everything))).text
    assert "compare across them" not in ParsedPage(page(rows(end_to_end))).text


def test_the_command_names_the_options_that_differ_from_defaults(rows, make, precision_pair):
    ((_, command),) = commands(rows(precision_pair))
    assert command == (
        "trainstep bench --model small --precision fp32,bf16_autocast --device cuda --warmups 0 --steps 20"
    )
    ((_, command),) = commands(rows([make(model="small", layers=6), make(model="large")]))
    assert "--layers 6,36" in command
    assert "a grid of 4 cells, of which 2 are here" in command


def test_a_page_of_failures_has_one_table(rows, end_to_end):
    parsed = ParsedPage(page(rows([end_to_end[3]])))
    assert "1 of 1 cells failed: 1 OOM" in parsed.text
    assert len(parsed.of("table")) == 1


def test_only_backquoted_text_of_notes_becomes_markup(rows, end_to_end, monkeypatch):
    monkeypatch.setattr("trainstep.report.page.notes", lambda _: ["Try `--capture step` <b>now</b> & `a<b`."])
    note = '<p class="note">Try <code>--capture step</code> &lt;b&gt;now&lt;/b&gt; &amp; <code>a&lt;b</code>.</p>'
    assert note in page(rows(end_to_end))


def test_a_title_and_description_come_first(rows, end_to_end):
    text = page(rows(end_to_end), title="Sizes <b>", description="Why & how.")
    assert "<h1>Sizes &lt;b&gt;</h1>\n<p>Why &amp; how.</p>\n" in text
    assert "<h1>Training step" in page(rows(end_to_end))
