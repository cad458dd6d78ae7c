"""No control character or markup of a record, trace or file reaches a terminal, spreadsheet, Markdown, LaTeX or page."""

import csv
import io
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.text import Text

from sources import PACKAGE
from trainstep.cli import app
from trainstep.records.record import Failure
from trainstep.records.store import Store
from trainstep.report.kit import frames
from trainstep.report.kit.tables import Table, cell_tables
from trainstep.report.kit.visible import VisibleConsole, VisibleStream, ascii_json, one_line, visible
from trainstep.report.page import page

ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Written here again, so that a gap in the pattern of the module is noticed."""
EVIL = "\x1b]0;owned\x07 \x9b31m \rover \u202eback\u2066 \x7f\x00 \u2028 end"
MARKUP = [
    "[text](https://github.com)",
    "![picture](x.png)",
    "<https://github.com>",
    "https://github.com/path",
    "www.github.com",
    "me@github.com",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "*strong* and _leaning_ and ~~gone~~ and `code`",
    "a|b\\|c",
    "[ref]: x",
    "# heading",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x07\x08\x7f\x9b", r"\x07\x08\x7f\x9b"),
        ("one\rtwo", r"one\rtwo"),
        ("\u202eabc\u2069", r"\u202eabc\u2069"),
        ("\u2028\u2029\x85", r"\u2028\u2029\x85"),
        ("half \ud800", r"half \ud800"),
        ("a\tb\nc", "a\tb\nc"),
        (r"C:\new", r"C:\new"),
        ("größer ± 2 µs 模型 نموذج 👩‍🔬 −5", "größer ± 2 µs 模型 نموذج 👩‍🔬 −5"),
    ],
)
def test_control_characters_are_escaped_and_other_text_stays(text: str, shown: str):
    assert visible(text) == shown
    assert visible(shown) == shown, "a second call changes nothing"


def test_every_control_character_is_escaped():
    for code in range(0x3000):
        if ACTS.match(character := chr(code)):
            assert ACTS.search(visible(character)) is None
            assert visible(character) != ""


def test_one_line_joins_lines():
    assert one_line(" a\r\nb\n\n\tc \rd") == r"a b c \rd"


def test_json_is_plain_ascii():
    text = ascii_json({"name": EVIL}, indent=1)
    assert text.isascii()
    assert ACTS.search(text) is None
    assert json.loads(text) == {"name": EVIL}


def test_the_stream_escapes_control_characters():
    terminal = Terminal()
    print(f"{EVIL}\nnext", file=VisibleStream(terminal))
    assert ACTS.search(terminal.getvalue()) is None
    assert terminal.getvalue().count("\n") == 2


def test_only_styles_of_ours_colour_a_console(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    VisibleConsole(VisibleStream(terminal)).print(Text.assemble(("ours", "bold"), EVIL))
    assert "\x1b[1mours\x1b[0m" in terminal.getvalue()
    assert r"\x1b]0;owned" in terminal.getvalue()
    assert "\x07" not in terminal.getvalue(), "rich removes it"


def test_no_other_module_makes_a_console():
    """Another console would send escape sequences of records to the terminal. The live line of `run` has numbers alone."""
    users = [path.name for path in PACKAGE.rglob("*.py") if "from rich.console import" in path.read_text()]
    assert sorted(users) == ["live.py", "visible.py"]


@pytest.fixture
def hostile(make, store) -> Path:
    """Records with control characters in every text that a person sees."""
    crash = Failure(kind="crash", phase=EVIL, message=f"{EVIL}\nforged: line", last_lines=(EVIL, f"b\n{EVIL}"))
    record = make(facts={"flops_convention": EVIL, "throttle_reasons": EVIL, "timing": EVIL})
    environment = replace(record.environment, gpu=EVIL, hostname=EVIL, os=EVIL, commit=EVIL)
    config = {**record.config, "model": {"name": EVIL}, EVIL: EVIL}
    samples = {**record.samples, EVIL: record.samples["step"]}
    good = [record, replace(record, key="2" * 16, config=config, environment=environment, samples=samples)]
    return store([*good, replace(good[1], key="3" * 16, failure=crash, samples={})])


@pytest.mark.parametrize("format", ["terminal", "markdown", "latex", "csv", "json", "html"])
def test_files_of_every_format_are_safe_to_show(hostile: Path, tmp_path: Path, format: str):
    assert app.run(["report", str(hostile), "--format", format, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out").read_text(encoding="utf-8")
    text = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.DOTALL)  # not from records
    assert "owned" in text
    assert ACTS.search(text) is None


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "report {0}",
        "report {0} --format markdown",
        "report {0} --format csv",
        "compare {0} {0}",
        "compare {0} {0} --json",
        "compare {0} {0} --quantity \x1b[31m",
        "report {0}\x1b]0;owned\x07",
        "frob\x1b[31m",
    ],
)
def test_printed_text_has_no_control_character(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, command: str, terminal: bool
):
    streams = {name: Terminal() if terminal else io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(f"sys.{name}", stream)
    with pytest.raises(SystemExit):
        app.main([word.format(hostile) for word in command.split(" ")])
    printed = "".join(stream.getvalue() for stream in streams.values())
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", printed) if terminal else printed
    assert ACTS.search(without_colours) is None
    assert "owned" in printed or r"\x1b[31m" in printed
    assert not any(line.startswith("forged") for line in printed.splitlines())


def test_a_key_in_an_error_is_escaped(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "records.jsonl"
    Store(path).append(make())
    path.write_text(path.read_text().replace('"duration_s"', json.dumps(EVIL)))
    error = io.StringIO()
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stderr", error)
    with pytest.raises(SystemExit) as ended:
        app.main(["report", str(path)])
    assert ended.value.code == 2
    assert ACTS.search(error.getvalue()) is None
    assert error.getvalue().count("\n") == 1


@pytest.mark.parametrize("text", MARKUP)
def test_markdown_renders_names_literally(rows, make, text: str):
    record = make()
    named = replace(record, config={**record.config, "model": {"name": text}})
    written = frames.markdown(cell_tables(rows([named])))
    rendered = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(written)
    first = re.search(r"<tbody>\s*<tr>\s*<td[^>]*>(.*?)</td>", rendered, re.DOTALL)
    assert first is not None
    assert "<" not in first[1], "no markup of its own"
    assert unescape(first[1]) == text
    assert not re.search(r"(?<!\\)://|www\.|(?<!\\)@", written), "no address that becomes a link by itself"


@pytest.mark.parametrize("text", [r"\write18{rm}", r"\input{x}", "[1000cm]", "*", "%$#_&{}~^", "a^^5cinput"])
def test_latex_renders_names_literally(rows, make, text: str):
    record = make()
    named = replace(record, config={**record.config, "model": {"name": text}})
    written = frames.latex(cell_tables(rows([named])))
    row = next(line for line in written.splitlines() if "200.0" in line)
    label = row.partition(" & ")[0]
    commands = re.findall(r"\\[a-zA-Z]+", label)
    assert set(commands) <= {r"\textbackslash", r"\textasciitilde", r"\textasciicircum"}
    assert not label.startswith(("[", "*")), "LaTeX would read it as an argument of the row end before it"
    assert "^" not in label.replace(r"\^", "")


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1+1", "'+1+1"),
        ("-1+1", "'-1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1+1", "'=1+1"),
        ("\r=1+1", r"\r=1+1"),
        ("＝1+1", "'＝1+1"),
        ("a=1", "a=1"),
        ("-5", "-5"),
        ("small", "small"),
    ],
)
def test_a_spreadsheet_computes_nothing(text: str, cell: str):
    table = Table(title="", columns=(), entries=(), raw=({"model": text, "=name": -3, "shift": -2.5},))
    [row] = csv.DictReader(io.StringIO(frames.csv([table])))
    assert row == {"model": cell, "'=name": "-3", "shift": "-2.5"}


def test_a_page_has_no_markup_of_records(rows, make):
    record = make()
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b"
    text = page(rows([replace(record, config={**record.config, "model": {"name": hostile}})]))
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "\u202e" not in text
