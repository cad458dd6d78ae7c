"""The rules a reader relies on: short files and functions, a README map that tells the truth, nothing of one machine."""

import ast
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from sources import PACKAGE, ROOT, modules

FILE_LINES = 400
FUNCTION_LINES = 80
KERNEL_LINES = 150
"""A `@triton.jit` function: its body cannot be cut as freely."""

OWN_FOLDERS = ("home", "mnt", "opt", "root", "srv", "work", "Users")
"""Top folders that belong to one machine: a path into them works nowhere else."""
MACHINE_PATH = re.compile(rf"(?<![\w.~$}}/-])/(?:{'|'.join(OWN_FOLDERS)})/\w")
HOST = re.compile(r"https?://([\w.-]+)")
ALLOWED_HOSTS = {
    "download.pytorch.org",  # where the README sends a reader for the CPU build
    "pytorch.org",
    "docs.pytorch.org",
    "docs.nvidia.com",
    "www.nvidia.com",
    "github.com",
    "arxiv.org",
    "www.apache.org",  # the licence's own text
    "ui.perfetto.dev",  # where a kept trace is opened
    "www.w3.org",  # names of XML namespaces
    "localhost",
    "127.0.0.1",
}


@pytest.mark.parametrize("path", modules().values(), ids=modules())
def test_lengths(path: Path):
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES, f"{path.name}: split it by subject"
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = [f"{node.name}: {lines_of(node)} lines" for node in functions if lines_of(node) > limit(node)]
    assert not too_long


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def limit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = any("jit" in ast.unparse(decorator).split("(")[0].split(".") for decorator in node.decorator_list)
    return KERNEL_LINES if is_kernel else FUNCTION_LINES


@dataclass(frozen=True)
class MapLine:
    """One line of the file map: a path from the repository's root, and what it is for."""

    path: str
    purpose: str


def read_map(readme: str) -> list[MapLine]:
    """The code block under '## File map': `name  purpose` a line; what a folder (`name/`) holds stands indented below."""
    block = re.search(r"^## File map$.*?^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        raise ValueError("README.md has no code block under '## File map'")
    lines, above = [], []  # above: (indent, path) of the folders that the line may stand in
    for text in filter(str.strip, block[1].splitlines()):
        indent = len(text) - len(text.lstrip())
        name, _, purpose = text.strip().partition(" ")
        above = [folder for folder in above if folder[0] < indent]
        path = (above[-1][1] if above else "") + name
        lines.append(MapLine(path, purpose.strip()))
        if name.endswith("/"):
            above.append((indent, path))
    return lines


def map_complaints(lines: list[MapLine], root: Path, package: Path) -> list[str]:
    """What the map says that is not so, and what it leaves out. A package's `__init__.py` is its folder's line."""
    named = [line.path for line in lines]
    needed = {
        path.relative_to(root).as_posix()
        for path in package.rglob("*")
        if path.suffix in {".py", ".html", ".css", ".js"} and path.name != "__init__.py"
    }
    return [
        *(f"{path}: named twice" for path in sorted({path for path in named if named.count(path) > 1})),
        *(f"{line.path}: does not exist" for line in lines if not _exists(root, line.path)),
        *(f"{line.path}: says no purpose" for line in lines if not line.purpose and not line.path.endswith("/")),
        *(f"{path}: is not on the map" for path in sorted(needed - set(named))),
    ]


def _exists(root: Path, path: str) -> bool:
    return (root / path).is_dir() if path.endswith("/") else (root / path).is_file() or bool([*root.glob(path)])


def test_readme_map():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    assert not map_complaints(read_map(readme.read_text()), ROOT, PACKAGE)


def test_the_map_rule_itself(tmp_path: Path):
    package = tmp_path / "src" / "it"
    (package / "costs").mkdir(parents=True)
    for name in ("app.py", "costs/__init__.py", "costs/flops.py", "forgotten.py"):
        (package / name).touch()
    block = "src/it/\n  app.py  the door\n  costs/  formulas\n    flops.py\n    bytes.py  gone\n"
    lines = read_map(f"# it\n\n## File map\n\nWords.\n\n```text\n{block}```\n")
    assert [line.path for line in lines][-2:] == ["src/it/costs/flops.py", "src/it/costs/bytes.py"]
    assert map_complaints(lines, tmp_path, package) == [
        "src/it/costs/bytes.py: does not exist",
        "src/it/costs/flops.py: says no purpose",
        "src/it/forgotten.py: is not on the map",
    ]


def tracked_texts() -> dict[str, str]:
    """Path -> text of each file that git keeps or would keep."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git clone")
    texts = {}
    for name in filter(None, listed.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; a file deleted but not yet committed
            continue
    return texts


def test_nothing_of_one_machine():
    found = []
    for name, text in tracked_texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            hosts = set(HOST.findall(line)) - ALLOWED_HOSTS
            found += [f"{name}:{number}: {what}" for what in [*MACHINE_PATH.findall(line), *sorted(hosts)]]
    assert not found


@pytest.mark.parametrize("folder", OWN_FOLDERS)
def test_the_machine_rule_itself(folder: str):
    assert MACHINE_PATH.search(f'open("/{folder}/me/x")')
    assert not MACHINE_PATH.search(f"see docs/{folder}/x and ~/{folder}/x")
