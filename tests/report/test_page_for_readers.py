"""The page in Chromium as its readers use it: with a screen reader, on a dark screen, on paper, and by keyboard.

TRAINSTEP_AXE_CORE names axe-core (`make axe-core`), which finds barriers for some readers. A missing program skips its tests;
with TRAINSTEP_REQUIRE_CHROMIUM=1 and TRAINSTEP_REQUIRE_AXE_CORE=1 (CI) that skip is a failure.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from attention_records import OURS, attention, lengths, tiles
from chromium import CHROMIUM, Browser
from report.memory.test_tables import a_cell as memory_cell
from report.numerics.test_page import numerics
from report.profile.test_tables import profiled
from trainstep.records.record import Record
from trainstep.report.explain.budgets import explain_answers, explain_rows, explain_sections
from trainstep.report.kit.rows import read_rows
from trainstep.report.page import OPEN_PX, page

ALL_DRAWN = """[...document.querySelectorAll('.chart')]
  .every((chart) => chart.offsetParent === null || chart.matches('.js-plotly-plot'))"""
RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"
SCREEN_PX = 900
INK = {False: "rgb(27, 31, 36)", True: "rgb(232, 234, 237)"}
VIOLATIONS = """axe.run().then((result) => result.violations
  .filter((violation) => ["serious", "critical"].includes(violation.impact))
  .map((violation) => violation.id + ": " + violation.nodes[0].html.slice(0, 200)))"""
HEADER = (
    "[...document.querySelectorAll('h3')].find((heading) => heading.textContent === 'Training step').closest('.table')"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and os.environ.get("TRAINSTEP_REQUIRE_CHROMIUM") != "1",
        reason="needs Chromium (Debian: apt-get install chromium)",
    ),
]
Make = Callable[..., Record]
Rows = Callable[[Sequence[Record]], list]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def axe() -> str:
    folder = os.environ.get("TRAINSTEP_AXE_CORE")
    if not folder:
        refuse = pytest.fail if os.environ.get("TRAINSTEP_REQUIRE_AXE_CORE") == "1" else pytest.skip
        refuse("needs TRAINSTEP_AXE_CORE: make axe-core")
    (script,) = Path(folder).rglob("axe.min.js")
    return script.read_text(encoding="utf-8")


@pytest.fixture
def records(make: Make, end_to_end, warmup_sweep, precision_pair, compile_sweep) -> dict[str, list[Record]]:
    """The records of each kind of page."""
    return {
        "sweep": [*end_to_end, *warmup_sweep, *precision_pair, *compile_sweep],
        "run": [make(warmups=(1.0, 0.3))],
        "attention": lengths(seqs=(256, 4096, 65536), dtypes=("bf16",)),
        "profile": [profiled()],
        "memory": [memory_cell()],
        "numerics": [numerics("fp32"), numerics("bf16_autocast")],
        "tiles": tiles([1024, 4096]),
        "shapes": [
            attention(seq=seq, keys=2 * seq, implementation=name) for seq in (64, 4096) for name in ("flex", OURS)
        ],
        "compared": precision_pair,
    }


@pytest.mark.parametrize(
    ("kind", "colours"),
    [
        *((kind, "light") for kind in ("sweep", "run", "attention", "profile", "memory", "numerics")),
        *((kind, "dark") for kind in ("sweep", "attention")),  # a page mostly of tables, and one mostly of charts
    ],
)
def test_axe_finds_nothing_serious(kind: str, colours: str, records, rows: Rows, browser: Browser, axe: str):
    browser.open(page(rows(records[kind])), dark=colours == "dark", wait=ALL_DRAWN)
    assert browser.console_lines == []
    browser.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    browser.run(f"{axe};0")
    assert browser.run(VIOLATIONS) == []


def test_axe_finds_a_button_without_a_name(rows: Rows, end_to_end, browser: Browser, axe: str):
    browser.open(page(rows(end_to_end)).replace("</main>", "<button></button></main>"), wait=ALL_DRAWN)
    browser.run(f"{axe};0")
    assert any(violation.startswith("button-name") for violation in browser.run(VIOLATIONS))


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "kind", ["sweep", "run", "attention", "profile", "memory", "numerics", "tiles", "shapes", "compared"]
)
def test_narrow_and_wide_screens_show_the_whole_page(kind: str, width: int, records, rows: Rows, browser: Browser):
    with screen_of(browser, width):
        browser.open(page(rows(records[kind])), wait=ALL_DRAWN)
        browser.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        drawn = f"const wait = () => ({ALL_DRAWN}) ? drawn() : setTimeout(wait, 50)"
        browser.run(f"new Promise((drawn) => {{ {drawn}; wait(); }})")
        assert browser.console_lines == []
        legible(browser, width)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "name",
    [
        "end_to_end",
        "profile",
        "memory",
        "attention_hopper",
        "ddp_xl",
        "numerics",
        "all_reduce",
        "warmup",
        "tiles",
        "ops",
    ],
)
def test_published_pages_begin_with_their_answer_and_are_short(name: str, width: int, browser: Browser):
    check_first_screen(page(read_rows([RESULTS / f"{name}.jsonl"])), width, browser)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["ddp_xl", "profile"])
def test_pages_of_explain_begin_with_their_answer_and_are_short(name: str, width: int, browser: Browser):
    """An earlier page had a section a step and its first chart 5,800 pixels down."""
    rows = read_rows([RESULTS / f"{name}.jsonl"])
    explained, _ = explain_rows(rows)
    text = page(rows, title="Why", lead=explain_sections(explained), lead_answers=explain_answers(explained))
    check_first_screen(text, width, browser)


def check_first_screen(text: str, width: int, browser: Browser) -> None:
    """Check that the first answer is on the first screen, and on a wide one the first chart too, of at most six screens."""
    with screen_of(browser, width):
        browser.open(text, wait=ALL_DRAWN)
        legible(browser, width)
        assert browser.run("document.querySelector('.answer').getBoundingClientRect().bottom") < SCREEN_PX
        if width == 1280:
            assert browser.run("document.documentElement.scrollHeight") <= OPEN_PX
            assert browser.run("document.querySelector('.chart').getBoundingClientRect().top") < SCREEN_PX


@contextmanager
def screen_of(browser: Browser, width: int) -> Iterator[None]:
    """Set the width of the screen in CSS pixels for the length of the block."""
    browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=SCREEN_PX, deviceScaleFactor=1, mobile=False)
    try:
        yield
    finally:
        browser.ask("Emulation.clearDeviceMetricsOverride")


def legible(browser: Browser, width: int) -> None:
    """Check that nothing is wider than the screen, no text of a chart is tiny, and no legend covers its plot."""
    assert browser.run("document.documentElement.scrollWidth") <= width
    sizes = "[...document.querySelectorAll('.chart text')].map((text) => parseFloat(getComputedStyle(text).fontSize))"
    assert min(browser.run(sizes)) >= 10
    covering = """[...document.querySelectorAll('.chart')].filter((chart) => {
      const legend = chart.querySelector('.legend'), plot = chart.querySelector('.cartesianlayer .plot');
      return legend && plot && legend.getBoundingClientRect().bottom > plot.getBoundingClientRect().top + 2;
    }).map((chart) => chart.getAttribute('aria-label'))"""
    assert browser.run(covering) == []


def test_a_link_of_the_contents_opens_a_folded_section(records, rows: Rows, browser: Browser):
    other = dataclasses.replace(records["profile"][0], key="other")
    browser.open(page(rows([*records["profile"], other])), wait=ALL_DRAWN)
    folded = "[...document.querySelectorAll('section')].findLast((section) => section.querySelector('.more'))"
    assert browser.run(f"{folded}.querySelector('.more').open") is False
    browser.run(f"document.querySelector(`a[href='#${{{folded}.id}}']`).click()")
    browser.run("new Promise((done) => setTimeout(done, 200))")
    assert browser.run(f"{folded}.querySelector('.more').open") is True


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_button_switches_between_light_and_dark(dark: bool, rows: Rows, end_to_end, browser: Browser):
    browser.open(page(rows(end_to_end)), dark=dark, wait=ALL_DRAWN)
    text = "getComputedStyle(document.querySelector('.xtick text')).fill"
    page_ink = "getComputedStyle(document.documentElement).color"
    for now in (dark, not dark, dark):
        assert (browser.run(text), browser.run(page_ink)) == (INK[now], INK[now])
        browser.run("document.getElementById('theme').click()")


def test_the_printed_page_is_light_and_complete(rows: Rows, end_to_end, browser: Browser):
    browser.open(page(rows(end_to_end)), dark=True, wait=ALL_DRAWN)
    browser.screen(dark=True, paper=True)
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run("getComputedStyle(document.querySelector('.xtick text')).fill") == INK[False]
    assert browser.run("getComputedStyle(document.documentElement).color") == "rgb(0, 0, 0)"
    assert browser.run(
        "[...document.querySelectorAll('.scroll')].every((box) => getComputedStyle(box).overflow === 'visible')"
    )
    shown = "[...document.querySelectorAll('input, #theme, .modebar')].filter((control) => control.offsetParent !== null).length"
    assert browser.run(shown) == 0
    assert browser.run("document.querySelector('.main-svg').getBoundingClientRect().width") < 720, (
        "the width of A4, 794, less the margins"
    )
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    browser.screen(dark=True)
    assert browser.run("getComputedStyle(document.querySelector('.xtick text')).fill") == INK[True]
    assert browser.printed().startswith(b"%PDF")


def test_the_enter_key_sorts_a_column_and_failures_stay_last(rows: Rows, end_to_end, browser: Browser):
    browser.open(page(rows(end_to_end)), wait=ALL_DRAWN)
    button = f"[...{HEADER}.querySelectorAll('th button')].find((button) => button.textContent === 'total step (ms)')"
    number = (
        "row.cells[5].dataset.sort === undefined ? row.cells[5].textContent : Math.round(row.cells[5].dataset.sort)"
    )
    column = f"[...{HEADER}.querySelectorAll('tbody tr')].map((row) => {number})"
    browser.run(f"{button}.focus()")
    for order, expected in (
        ("ascending", [200, 400, 1100, "OOM"]),
        ("descending", [1100, 400, 200, "OOM"]),
    ):
        for kind in ("keyDown", "keyUp"):
            browser.ask(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )
        assert browser.run(f"{button}.closest('th').getAttribute('aria-sort')") == order
        assert browser.run(column) == expected


def test_every_chart_has_a_table_of_its_numbers(records, rows: Rows, browser: Browser):
    for kind in ("sweep", "attention", "profile", "memory", "numerics"):
        browser.open(page(rows(records[kind])), wait=ALL_DRAWN)
        figures = "[...document.querySelectorAll('figure')]"
        assert browser.run(f"{figures}.length") > 0
        assert browser.run(f"{figures}.every((figure) => figure.querySelectorAll('.numbers tbody tr').length > 0)")


def test_a_page_of_two_hundred_records_opens(make: Make, rows: Rows, browser: Browser, record_property):
    """The load time is recorded and not asserted, since another process may slow the machine."""
    records = [
        dataclasses.replace(
            make(model=model, context=context, precision=precision, seed=seed, warmups=(1.0, 0.3)), key=f"{number}"
        )
        for number, (model, context, precision, seed) in enumerate(
            (model, 128 * context, precision, seed)
            for model in ("small", "medium", "large", "xl", "2.7B")
            for context in (1, 2, 4, 8)
            for precision in ("fp32", "bf16")
            for seed in range(5)
        )
    ]
    assert len(records) == 200
    browser.open(page(rows(records)), wait="document.querySelectorAll('.js-plotly-plot').length > 0")
    record_property("load_ms", browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    record_property("first_chart_ms", browser.run("performance.now()"))
    assert browser.console_lines == []
    assert browser.run(f"{HEADER}.querySelectorAll('tbody tr').length") == 200
