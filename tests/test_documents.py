"""README and docs: README is short, links and named files exist, snippets and commands run on a CPU."""

import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sources import ROOT
from trainstep.cli.app import _RUNNING, build_app, run
from trainstep.config.sweep import default_options

RECORDS = ROOT / "results" / "h200"
pytestmark = pytest.mark.skipif(
    not RECORDS.exists(), reason="a source distribution holds no records, which documents link to"
)

README_LINES, README_BYTES = 150, 10_000
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").rglob("README.md"),
    ]
)
LINK = re.compile(r'(?:\]\(|<img src=")([^)"\s]+)')
NAMED_FILE = re.compile(r"(?<![\w/.<*-])((?:\w+/)*\w+\.(?:py|toml))\b(?![\w/])")
EXAMPLES = {"FILE.toml", "train.py", "my_model.py", "trainstep.toml"}
"""Names of files of a user, which the repository does not have."""
COMMAND = re.compile(r"`(trainstep [^`\n]+)`")
NOT_WHOLE = re.compile(r"[A-Z]{4,}|\.\.\.|--help|package\.module")
"""A command with a placeholder, or one that only shows help."""


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def test_readme_is_short():
    text = (ROOT / "README.md").read_bytes()
    assert text.count(b"\n") <= README_LINES
    assert len(text) <= README_BYTES


def anchors(path: Path) -> set[str]:
    """The anchors of a document: its headings in the form that GitHub gives them."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(without_code(path.read_text())):
        if re.match(r"\w+:", link):  # a link to another host; tests/test_house.py checks those
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=names)
def test_links_have_targets(path: Path):
    assert not broken_links(path)


def test_broken_links_are_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("# It's there: `a.b` too\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[1](there.md) [2](there.md#its-there-ab-too) [3](#here) [4](gone.md) [5](there.md#gone) [6](#gone)\n"
        '[7](https://github.com) <img src="gone.png">\n```\n[8](gone.md)\n```\n'
    )
    assert broken_links(page) == ["gone.md", "there.md#gone", "#gone", "gone.png"]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "log.md"], ids=names)
def test_named_files_exist(path: Path):
    """A document may shorten a path from the left: `costs/buckets.py` for src/trainstep/costs/buckets.py."""
    text = LINK.sub("", without_code(path.read_text()))
    named = set(NAMED_FILE.findall(text)) - EXAMPLES
    files = [
        f"/{names(file)}"
        for folder in ("src", "tests", "scripts", "sweeps", "results")
        for file in (ROOT / folder).rglob("*.*")
    ]
    files += [f"/{file.name}" for file in ROOT.glob("*.toml")]
    assert not sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files))


def commands(path: Path) -> list[tuple[str, bool]]:
    """The whole commands of a document, and whether their line says that they need a GPU."""
    lines = without_code(path.read_text()).splitlines()
    marked_commands = [(command, "GPU" in line) for line in lines for command in COMMAND.findall(line)]
    return [(command, needs_gpu) for command, needs_gpu in marked_commands if not NOT_WHOLE.search(command)]


SHOWN = {
    command: needs_gpu
    for path in (ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md"))
    for command, needs_gpu in commands(path)
}


IN_README = {command for command, _ in commands(ROOT / "README.md")}


def reads_file(words: list[str]) -> bool:
    """Whether a command of a verb that measures reads a trace or records instead."""
    return "--from" in words or (words[0] == "explain" and len(words) > 1 and not words[1].startswith("--"))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a reader: the repository's sweeps and results, and no GPU."""
    for name in ("sweeps", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.parametrize("command", SHOWN)
def test_commands_run_on_a_cpu(
    command: str, reader: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Verbs that measure get --dry-run, which fails if a command needs a GPU and its line does not say so.

    Plans of the README run as they are; guides have searches that take longer.
    """
    monkeypatch.setattr("trainstep.cli.app._run_by_srun", lambda *_: 0)  # tests/cli has a cluster for it
    words = shlex.split(command)[1:]
    if words[0] in _RUNNING and not reads_file(words) and not SHOWN[command]:
        assert run([*words, "--dry-run"]) == 0, capsys.readouterr().err
    elif words[0] == "plan" and command in IN_README:
        assert run(words) in (0, 1), capsys.readouterr().err
    elif words == ["doctor", "--measure"]:  # tests/cli/test_doctor.py runs it
        assert run(["doctor", "--device", "cpu"]) == 0, capsys.readouterr().err
    elif words[0] == "explain" and reads_file(words) and Path(words[1]).exists():
        assert run(words) == 0, capsys.readouterr().err
    elif words[0] in ("report", "compare") and "tensorboard" not in command:
        (reader / "runs").mkdir()
        for name in ("runs/end_to_end.jsonl", "before.jsonl", "after.jsonl"):
            shutil.copy(RECORDS / "end_to_end.jsonl", reader / name)
        assert run(words) == 0, capsys.readouterr().err
    else:
        build_app(words).parse_args(words, exit_on_error=False, print_error=False)


def test_every_verb_that_measures_is_in_the_readme():
    shown = {command.split()[1] for command, _ in commands(ROOT / "README.md")}
    assert shown >= {*_RUNNING, "report", "compare", "doctor"}


def block(document: str, holds: str) -> str:
    """The only Python or TOML block of a document with this text."""
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    (text,) = [text for text in blocks if holds in text]
    return text


@pytest.mark.parametrize(
    ("document", "holds"),
    [
        ("README.md", "import flash_attention"),
        ("docs/guide/parts.md", "flash_attention_backward"),
        ("docs/guide/parts.md", "import AdamW"),
        ("docs/guide/parts.md", "import linear_cross_entropy"),
        ("docs/capture.md", "import CapturedStep"),
    ],
)
def test_snippets_run_on_a_cpu(document: str, holds: str):
    names: dict[str, Any] = {}
    exec(block(document, holds), names)
    assert len(names) > 1, "the snippet defined something"


def test_the_model_of_the_guide_trains():
    import torch

    names: dict[str, Any] = {}
    exec(block("docs/guide/measuring.md", "def build(run, device)"), names)
    module, next_batch = names["build"](SimpleNamespace(seed=0, batch_size=2), torch.device("cpu"))
    module(**next_batch(0)).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_the_defaults_of_the_guide_are_read(reader: Path):
    (reader / "trainstep.toml").write_text(block("docs/guide/measuring.md", "[all]"))
    options = default_options("bench", ["precision", "steps"])
    assert options == {"precision": "bf16_autocast", "steps": "20"}
