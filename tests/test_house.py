"""Rules for the sources: short files, functions and folders, a map that matches the docstrings, no path of one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sources import PACKAGE, ROOT, load_script, modules

FILE_LINES = 400
FOLDER_FILES = 22
FUNCTION_LINES = 80
KERNEL_LINES = 150
"""A `@triton.jit` function: its body cannot be cut as freely."""

OWN_FOLDERS = ("home", "mnt", "opt", "root", "srv", "work", "Users")
"""Top folders that belong to one machine: a path in them works nowhere else."""
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


def test_files_and_functions_are_short():
    too_long = []
    scripts = {f"scripts/{path.name}": path for path in (ROOT / "scripts").glob("*.py")}
    for name, path in {**modules(), **scripts}.items():
        text = path.read_text()
        if text.count("\n") > FILE_LINES:
            too_long.append(f"{name}: {text.count(chr(10))} lines; split it by subject")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        too_long += [f"{name}.{node.name}: {lines_of(node)} lines" for node in nodes if lines_of(node) > limit(node)]
    assert not too_long


def test_folders_have_few_files():
    """A folder with more files should be split into rooms."""
    folders = {path.parent for path in modules().values()}
    counts = {folder.relative_to(PACKAGE).as_posix(): len([*folder.glob("*.py")]) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > FOLDER_FILES} == {}


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def limit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = any("jit" in ast.unparse(decorator).split("(")[0].split(".") for decorator in node.decorator_list)
    return KERNEL_LINES if is_kernel else FUNCTION_LINES


def test_the_map_matches_the_docstrings():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "map.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_without_a_docstring_is_refused_by_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = load_script("map", monkeypatch)
    package = tmp_path / "it"
    (package / "costs").mkdir(parents=True)
    for name, text in {
        "__init__.py": '"""All of it."""',
        "costs/__init__.py": '"""Formulas."""',
        "costs/flops.py": '"""FLOPs of an op.\n\nMore."""',
        "page.css": "/* How it looks. */",
    }.items():
        (package / name).write_text(text)
    text = script.map_of(package)
    assert "## it/costs/\n\nFormulas.\n\n- [flops.py](../src/it/costs/flops.py): FLOPs of an op.\n" in text
    assert "- [page.css](../src/it/page.css): How it looks.\n" in text
    (package / "costs" / "nameless.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"it/costs/nameless\.py"):
        script.map_of(package)


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


def test_no_file_names_a_path_or_host_of_one_machine():
    violations = []
    for name, text in tracked_texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            hosts = set(HOST.findall(line)) - ALLOWED_HOSTS
            violations += [f"{name}:{number}: {what}" for what in [*MACHINE_PATH.findall(line), *sorted(hosts)]]
    assert not violations


@pytest.mark.parametrize("folder", OWN_FOLDERS)
def test_paths_of_one_machine_are_found(folder: str):
    assert MACHINE_PATH.search(f'open("/{folder}/me/x")')
    assert not MACHINE_PATH.search(f"see docs/{folder}/x and ~/{folder}/x")
