"""The page in headless Chromium: charts are drawn, nothing is fetched, hostile names are inert, and tables sort.

Without Chromium these tests skip; with TRAINSTEP_REQUIRE_CHROMIUM=1 (CI) that skip is a failure.
"""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attention_records import lengths, tiles
from chromium import CHROMIUM
from trainstep.records.record import Failure, Record
from trainstep.report.page import page

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000", "--window-size=1400,1000"),
    *("--enable-logging=stderr", "--v=0", "--dump-dom"),
]
HOSTILE = '<script>document.title="taken"</script></script>"><img src=x onerror=document.title="taken">'
LIGHT, DARK = 1, 0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and os.environ.get("TRAINSTEP_REQUIRE_CHROMIUM") != "1",
        reason="needs Chromium (Debian: apt-get install chromium)",
    ),
]
Open = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def open_page(tmp_path: Path) -> Open:
    """A function that opens HTML and returns the rendered document and the console's lines. Any request is an error there."""

    def opened(html: str, scheme: int = LIGHT) -> tuple[str, list[str]]:
        file = tmp_path / "report.html"
        file.write_text(html, encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [str(CHROMIUM), *FLAGS, profile, f"--blink-settings=preferredColorScheme={scheme}", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return opened


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def count(self, tag: str, style: str = "") -> int:
        return sum(name == tag and style in (attributes.get("class") or "") for name, attributes in self.elements)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_charts_are_drawn_without_console_messages(
    rows, end_to_end, warmup_sweep, compile_sweep, open_page: Open, scheme: int
):
    all_rows = rows([*end_to_end, *warmup_sweep, *compile_sweep])
    document, console_lines = open_page(page(all_rows), scheme)
    assert console_lines == []
    elements = Elements(document)
    assert elements.count("div", "chart js-plotly-plot") >= 5
    assert elements.count("svg", "main-svg") >= 5
    assert ">OOM<" in document
    ink = {LIGHT: "rgb(27, 31, 36)", DARK: "rgb(232, 234, 237)"}
    assert ink[scheme] in document
    assert ink[1 - scheme] not in document


def test_charts_of_attention_are_drawn_without_console_messages(rows, open_page: Open):
    records = [*lengths(seqs=(256, 4096, 65536), dtypes=("bf16",)), *tiles([1024, 4096])]
    document, console_lines = open_page(
        page(rows(records)).replace('<details class="more">', '<details class="more" open>')
    )
    assert console_lines == []
    elements = Elements(document)
    assert elements.count("div", "chart js-plotly-plot") == 6
    assert "OOM (needs " in document
    assert document.count("illegal tile</span>") == 2


def test_a_request_is_an_error_on_the_console(rows, end_to_end, open_page: Open):
    asking = page(rows(end_to_end)).replace(
        "</body>", "<script>new Image().src = 'http://localhost:9/x'</script></body>"
    )
    _, console_lines = open_page(asking)
    assert any("Content Security Policy" in line for line in console_lines)


def test_hostile_names_are_inert(make, rows, open_page: Open):
    all_rows = rows(hostile_records(make))
    document, console_lines = open_page(page(all_rows))
    assert console_lines == []
    elements = Elements(document)
    title = re.search(r"<title>(.*?)</title>", document, re.DOTALL)
    assert title is not None
    assert title[1].startswith("Training step: &lt;script&gt;")
    assert elements.count("img") == 0
    assert elements.count("script") == 3
    assert elements.count("svg", "main-svg") >= 3


def hostile_records(make: Callable[..., Record]) -> Sequence[Record]:
    records = [make(warmups=(1.0, 0.3), step=(0.2, 0.21, 0.22), context=context) for context in (64, 128, 256)]
    hostile = [
        Record(
            **{
                **vars(record),
                "config": {**record.config, "model": {"function": HOSTILE}, "precision": f"{HOSTILE}{number}"},
            }
        )
        for number, record in enumerate(records)
    ]
    failure = Failure(kind="crash", phase=HOSTILE, message=HOSTILE, last_lines=(HOSTILE,))
    return [*hostile[:2], Record(**{**vars(hostile[2]), "samples": {}, "facts": {}, "failure": failure})]


def test_tables_sort_by_value_and_filter(rows, end_to_end, open_page: Open):
    act = """<script>
      const table = document.querySelector("section > .table");
      const header = [...table.querySelectorAll("th button")].find((button) => button.textContent === "total step (ms)");
      header.click(); header.click();
      const input = table.querySelector("input[type=search]");
      input.value = "256"; input.dispatchEvent(new Event("input"));
      const rows = [...table.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
      document.title = rows.map((row) => row.cells[0].textContent + " " + row.cells[5].textContent).join(", ");
    </script></body>"""
    document, console_lines = open_page(page(rows(end_to_end)).replace("</body>", act))
    assert console_lines == []
    assert "<title>2.7B 1,100 ± 50, small 200.0 ± 1.0</title>" in document
