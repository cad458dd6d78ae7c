"""The documentation: links have targets, blocks of code are valid, and the site is built and needs no network.

Blocks: Python compiles, and the names it imports from trainstep exist; TOML, JSON and YAML are parsed; `trainstep ...` is a valid
command line, `make ...` names targets, `python FILE` an existing file. Commands in the text are checked in the same way, except
in dated entries of the log.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from cyclopts import CycloptsError

from makefile import targets, targets_named
from sources import PACKAGE, ROOT, load_script, modules
from trainstep.cli import app
from trainstep.config.grid import expand, grid_from_text
from trainstep.config.parsing import CONFIGS, fields_of

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*/README.md")),
]
DATED = {ROOT / "docs" / "log.md"}
"""Pages with dated entries, whose commands stay as they were."""
LANGUAGES = {"python", "sh", "toml", "json", "yaml", "text"}
WORKLOADS = {verb: verb for verb in ("attention", "op", "profile", "numerics", "memory", "parallel")}
WORKLOADS |= {"bench": "train_step", "collectives": "collective"}
"""Verb -> the workload whose config has its options as fields."""
TOOLS = ROOT / "build" / "docs-tools"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/docs_site.py as a module."""
    return load_script("docs_site", monkeypatch)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text."""
    return [
        Block(match[2], match[3], text.count("\n", 0, match.start()) + 1)
        for match in re.finditer(r"(?m)^ *(```+)([^\n`]*)\n((?:.*\n)*?) *\1 *$", text)
    ]


def complaints(path: Path) -> list[str]:
    """Errors in the code of a page."""
    text = path.read_text()
    errors = [f"{path.name}:{block.line}: {error}" for block in blocks(text) for error in wrong_block(block)]
    if path not in DATED:
        prose = re.sub(r"(?ms)^ *(```+).*?^ *\1 *$", "", text)
        for command in re.findall(r"`((?:trainstep|make|python) [^`]*)`", prose):
            errors += [f"{path.name}: `{command}`: {error}" for error in wrong_command(" ".join(command.split()))]
    return errors


def wrong_block(block: Block) -> Iterator[str]:
    if block.language not in LANGUAGES:
        yield f"a block of {block.language or 'no language'}; known are {', '.join(sorted(LANGUAGES))}"
    elif block.language == "python":
        yield from wrong_python(block.code)
    elif block.language in ("toml", "json", "yaml"):
        parsers = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
        try:
            parsers[block.language](block.code)
        except (ValueError, yaml.YAMLError) as error:
            yield str(error)
    elif block.language == "sh":
        for line in block.code.replace("\\\n", " ").splitlines():
            yield from wrong_command(line)


def wrong_python(code: str) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        yield f"is no Python: {error}"
        return
    known = modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
            module = str(node.module)
            if module not in known:
                yield f"there is no module {module}"
                continue
            has = names_of(known[module])
            yield from (
                f"{module} has no {alias.name}"
                for alias in node.names
                if alias.name not in has and f"{module}.{alias.name}" not in known
            )
        elif isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE.name]
            yield from (f"there is no module {name}" for name in own if name not in known)


def names_of(path: Path) -> set[str]:
    """The names that a module defines or imports at its top level, also inside `if` and `try`."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                stored = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in stored if isinstance(target, ast.Name)}
            elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                waiting.append(node)
    return names


def wrong_command(line: str) -> Iterator[str]:
    """Errors in the commands of this project in a line of a shell."""
    line = re.sub(r"\[(-[^\]]*)\]", r"\1", line)  # optional words are parsed, too
    for command in re.split(r"&&|\||;", line):
        words = shlex.split(command, comments=True)
        words = words[2:] if words[:3] == ["python", "-m", "trainstep"] else words
        if words and Path(words[0]).name == "trainstep":
            yield from wrong_verb(words[1:])
        elif words[:1] == ["make"]:
            yield from (f"the Makefile has no target {name}" for name in targets_named(shlex.join(words)) - targets())
        elif words[:1] == ["python"] and words[1:] and words[1].endswith(".py") and not (ROOT / words[1]).exists():
            yield f"there is no {words[1]}"


def wrong_verb(words: list[str]) -> Iterator[str]:
    if len(words) == 1 and not words[0].startswith("-"):  # the name of a verb, not a command line
        if words[0] not in app._VERBS:
            yield f"there is no verb {words[0]}"
        return
    try:
        _, bound, _ = app.build_app(words).parse_args(app._split(words), exit_on_error=False, print_error=False)
        if workload := WORKLOADS.get(next(iter(words), "")):
            fields = fields_of(CONFIGS[workload]).keys() - {"device"}
            named = {name: text for name, text in (bound.kwargs | bound.arguments).items() if name in fields}
            model = {"model": ["small"]} if "model" in fields else {}
            expand({"workload": [workload], **model, **grid_from_text(named)}, {"device": "cuda"})
    except (CycloptsError, ValueError) as error:
        yield " ".join(str(error).split())
    if words[:1] == ["sweep"]:
        yield from (
            f"there is no {word}" for word in words if word.startswith("sweeps/") and not (ROOT / word).exists()
        )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_is_valid(path: Path):
    assert complaints(path) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```python\nfrom trainstep import flash_attention\n```\n", []),
        ("```python\nfrom trainstep.parallel import DDP, nothing\n```\n", ["trainstep.parallel has no nothing"]),
        ("```python\nfrom trainstep.nowhere import DDP\n```\n", ["there is no module trainstep.nowhere"]),
        ("```python\nx = = 1\n```\n", ["is no Python: invalid syntax (<unknown>, line 1)"]),
        ("```toml\na = \n```\n", ["Invalid value (at line 1, column 5)"]),
        ("```\nx\n```\n", ["a block of no language; known are json, python, sh, text, toml, yaml"]),
        ("```sh\nmake nothing && trainstep bench --steps 5  # so\n```\n", ["the Makefile has no target nothing"]),
        ("Type `trainstep bench --model small [--steps 5]`.", []),
        ("Type `trainstep bench\n--nothing`.", ["Unknown option: --nothing."]),
        ("`trainstep bench --steps many`", ["steps: must be a whole number, not 'many'"]),
        ("`trainstep sweep sweeps/nothing.toml`", ["there is no sweeps/nothing.toml"]),
        ("`trainstep nothing`", ["there is no verb nothing"]),
        ("`trainstep compare` and `python scripts/nothing.py`", ["there is no scripts/nothing.py"]),
    ],
)
def test_wrong_code_is_found(tmp_path: Path, text: str, wrong: list[str]):
    path = tmp_path / "page.md"
    path.write_text(text)
    assert [re.sub(r"^page\.md:(\d+:| `[^`]*`:) ", "", line) for line in complaints(path)] == wrong


def test_usage_in_docstrings_of_packages_is_python(monkeypatch: pytest.MonkeyPatch):
    """Examples in the docstring of a package are Python blocks in the reference."""
    reference = load_script("docs_reference", monkeypatch)
    writer = reference.PageWriter(ROOT, reference.PAGES[0], {}, set())
    shown = []
    for name, path in modules().items():
        if path.name == "__init__.py" and (docstring := ast.get_docstring(ast.parse(path.read_text()))):
            shown += [(name, block) for block in writer.blocks(docstring) if "from trainstep" in block]
    assert {name for name, _ in shown} >= {"trainstep.parallel", "trainstep.capture"}
    for name, block in shown:
        [code] = blocks(block + "\n")
        assert code.language == "python", name
        assert [*wrong_python(code.code)] == [], name


def test_docstrings_become_markdown_with_code(monkeypatch: pytest.MonkeyPatch):
    reference = load_script("docs_reference", monkeypatch)
    writer = reference.PageWriter(ROOT, reference.PAGES[0], {"DDP": "parallel.md#ddp"}, set())
    text = "a * b * c of `x[i] * y`, <not> a tag; `DDP` is.\n\n- one_two\n- `three`\n\n    first(1)\n\n    second(2)\n\n% end"
    assert [*writer.blocks(text)] == [
        r"a \* b \* c of `x[i] * y`, \<not\> a tag; [`DDP`](parallel.md#ddp) is.",
        "- one\\_two\n- `three`",
        "```python\nfirst(1)\n\nsecond(2)\n```",
        r"\% end",
    ]


def test_a_long_signature_has_one_argument_per_line(monkeypatch: pytest.MonkeyPatch):
    reference = load_script("docs_reference", monkeypatch)
    assert reference.signature_of("f(x: int) -> int") == "```python\nf(x: int) -> int\n```"
    arguments = "first: dict[str, tuple[int, ...]], *, second: str = 'a, b', third: Callable[[int], int] | None = None"
    long = f"name({arguments}) -> X[int, int]"
    assert reference.signature_of(long).splitlines() == [
        "```python",
        "name(",
        "    first: dict[str, tuple[int, ...]],",
        "    *,",
        "    second: str = 'a, b',",
        "    third: Callable[[int], int] | None = None,",
        ") -> X[int, int]",
        "```",
    ]


@pytest.mark.skipif(not (ROOT / "results").exists(), reason="an sdist carries no records")
def test_every_link_of_a_page_leads_to_a_file(site: ModuleType, tmp_path: Path):
    assert site.lay_pages(ROOT, tmp_path) == []


def test_pages_are_copied_with_the_files_they_link_to(site: ModuleType, tmp_path: Path):
    root, pages = tmp_path / "it", tmp_path / "pages"
    for name, text in {
        "README.md": "# It\n[a](docs/a.md#part) [b](src/b.py) [all](sweeps/) [x](https://github.com)\n`c[0](x)`\n![p](p.png)\n",
        "docs/a.md": "# A\n[home](../README.md)\n```text\n[no](link)\n```\n[gone](gone.md) [out](../../out.md)\n",
        "src/b.py": 'x = "```"\n',
        "sweeps/s.toml": "a = 1\n",
        "sweeps/t.md": "Words.\n",
        "p.png": "",
        "unlinked.md": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert site.lay_pages(root, pages) == [
        "docs/a.md:6: gone.md leads to no file",
        "docs/a.md:6: ../../out.md leads to no file",
    ]
    copied = {path.relative_to(pages).as_posix(): path.read_text() for path in pages.rglob("*") if path.is_file()}
    assert copied.keys() == {
        *("index.md", "p.png", "docs/a.md", "src/b.py.md"),
        *("sweeps/index.md", "sweeps/s.toml.md", "sweeps/t.md"),
    }
    assert copied["index.md"] == (
        "# It\n[a](docs/a.md#part) [b](src/b.py.md) [all](sweeps/index.md) [x](https://github.com)\n`c[0](x)`\n![p](p.png)\n"
    )
    assert copied["docs/a.md"].startswith("# A\n[home](../index.md)\n```text\n[no](link)\n```\n[gone](gone.md)")
    assert copied["src/b.py.md"] == '# b.py\n\n````{code-block} python\n:linenos:\n\nx = "```"\n````\n'
    assert copied["sweeps/index.md"] == "# Sweeps\n\n- [s.toml](s.toml.md)\n- [t.md](t.md)\n"
    assert copied["sweeps/t.md"] == "# t\n\nWords.\n"


def test_a_site_with_a_wrong_link_is_refused(site: ModuleType, tmp_path: Path):
    (tmp_path / "index.html").write_text(
        '<h1 id="top">It</h1><a href="#top">1</a><a href="#gone">2</a><a href="sub/a.html#a">3</a><a href="sub/a.html#b">4</a>'
        '<a href="gone.html">5</a><a href="../out.html">6</a><a href="https://github.com">7</a><img src="data:image/png;base64,x">'
        '<script src="https://github.com/x.js"></script><link rel="stylesheet" href="//github.com/f.css">'
        '<img srcset="p.png 1x, https://github.com/p.png 2x">'
    )
    (tmp_path / "p.png").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.html").write_text('<a name="a" href="../index.html">back</a>')
    (tmp_path / "style.css").write_text(
        "a { background: url(https://github.com/b.png) } b { background: url(own.png) }"
    )
    assert site.check_site(tmp_path) == [
        "index.html: #gone leads to no such anchor",
        "index.html: sub/a.html#b leads to no such anchor",
        "index.html: gone.html leads to no page",
        "index.html: ../out.html leads out of the site",
        "index.html: <script> fetches https://github.com/x.js",
        "index.html: <link> fetches //github.com/f.css",
        "index.html: <img> fetches https://github.com/p.png",
        "style.css: fetches url(https://github.com/b.png",
    ]
    assert site.check_site(tmp_path / "sub" / "nothing") == [f"{tmp_path}/sub/nothing: there is no page"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built(tmp_path: Path):
    """`make docs` gives no warning, no wrong link, nothing that is fetched, and every public name in the reference."""
    if not (TOOLS / "ready").exists():
        refuse = pytest.fail if os.environ.get("TRAINSTEP_REQUIRE_DOCS") == "1" else pytest.skip
        refuse("the generator of the documentation is not installed (make docs-tools)")
    command = [TOOLS / "bin" / "python", ROOT / "scripts" / "docs_site.py", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert pages >= {"index.html", "CHANGELOG.html", "docs/tour.html", "docs/decisions/index.html", "search.html"}
    for name in ("trainstep", "trainstep.parallel", "trainstep.capture"):
        page = (tmp_path / "site" / "reference" / f"{name.rpartition('.')[2]}.html").read_text()
        exported = exports(modules()[name])
        assert exported
        assert not [public for public in exported if f'id="{public.lower().replace("_", "-")}"' not in page]


def exports(path: Path) -> list[str]:
    """`__all__` of a module, read without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
