"""A script runs as Python itself would run it: its name, arguments, path, errors and exit code. No torch is needed here."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import run_python
from trainstep.measure.run.script import find_script

RUN = """
import sys
from trainstep.measure.run.script import LastOfAll, find_script, run_script
last = LastOfAll()
ended = run_script(find_script(sys.argv[1:]))
print("ended:", ended.words, file=sys.stderr)
last.interrupted = ended.by_interrupt
sys.exit(ended.code)
"""


def run(folder: Path, *words: str, direct: bool = False) -> tuple[int, str, str]:
    """Run a script in a folder by us, or `direct`ly by Python: its exit code, output and errors."""
    done = run_python(folder, *([] if direct else ["-c", RUN]), *words)
    return done.returncode, done.stdout, done.stderr


def alike(folder: Path, *words: str) -> tuple[int, str, str]:
    """What the script does under us, which must be what it does under Python but for a last line on standard error."""
    ours, python = run(folder, *words), run(folder, *words, direct=True)
    *errors, last = ours[2].splitlines(keepends=True)
    assert (ours[0], ours[1], "".join(errors)) == python
    return ours[0], ours[1], last


def write(folder: Path, text: str, name: str = "train.py") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_script_sees_itself_as_main(tmp_path: Path):
    write(
        tmp_path,
        "import sys, os, pickle, helper\n"
        "class Thing: pass\n"
        "if __name__ == '__main__':\n"
        "    print(__name__, __file__, __package__, __spec__, sys.argv, sys.path[0] == os.path.dirname(__file__))\n"
        "    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.modules['__main__'].Thing is Thing, helper.x)\n",
        "project/train.py",
    )
    write(tmp_path, "x = 5\n", "project/helper.py")
    code, out, last = alike(tmp_path, "project/train.py", "--lr", "3", "-m", "x")
    assert code == 0
    assert "['project/train.py', '--lr', '3', '-m', 'x'] True" in out
    assert out.splitlines()[1] == "True True 5"
    assert last == "ended: finished\n"


def test_a_module_sees_itself_as_main(tmp_path: Path):
    write(tmp_path, "", "package/__init__.py")
    write(
        tmp_path,
        "from package.other import x\nimport sys\nprint(__name__, __package__, __spec__.name, sys.argv[1:], x)\n",
        "package/train.py",
    )
    write(tmp_path, "x = 7\n", "package/other.py")
    assert alike(tmp_path, "-m", "package.train", "--flag")[1] == "__main__ package package.train ['--flag'] 7\n"


def test_a_package_runs_its_main(tmp_path: Path):
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "print('main of', __package__)\n", "package/__main__.py")
    assert alike(tmp_path, "-m", "package")[1] == "main of package\n"


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit()", 0, "finished"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit('no data')", 1, "exit: no data"),
        ("raise ValueError('bad: value')", 1, "ValueError: bad: value"),
        ("f()", 1, "ZeroDivisionError: division by zero"),
        ("import atexit; atexit.register(print, 'later'); print('now')", 0, "finished"),
        ("sys.stdout = open('other.txt', 'w'); print('elsewhere')", 0, "finished"),
        (
            "sys.excepthook = lambda *error: print('hook', error[0].__name__); 1 / 0",
            1,
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_endings_are_pythons(ending: str, code: int, words: str, tmp_path: Path):
    write(tmp_path, f"import sys\ndef f():\n    return 1 / 0\n{ending}\n")
    assert alike(tmp_path, "train.py")[::2] == (code, f"ended: {words}\n")


def test_an_interrupt_ends_by_the_signal(tmp_path: Path):
    write(
        tmp_path,
        "import atexit, os, signal\natexit.register(print, 'later')\nos.kill(os.getpid(), 2)\nfor _ in range(10**9): pass\n",
    )
    assert alike(tmp_path, "train.py") == (-signal.SIGINT, "later\n", "ended: interrupted\n")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_a_script_start(method: str, tmp_path: Path):
    write(
        tmp_path,
        "import multiprocessing, sys\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool: print(pool.map(double, [1, 2]))\n",
    )
    assert alike(tmp_path, "train.py", method)[1] == "[2, 4]\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"x = '\xe9'\n", "line 1: the byte 0xe9 is not utf-8"),
        (b"x = 1\n\n\ny = '\xe9'\n", "line 4: the byte 0xe9 is not utf-8"),
        (b"# coding: ascii\n\ny = '\xe9'\n", "line 3: the byte 0xe9 is not ascii"),
        (b"\xef\xbb\xbfx = 1\ny = '\xe9'\n", "line 2: the byte 0xe9 is not utf-8"),
        (b"#!/usr/bin/python\n# coding: foo\ny = '\xe9'\n", "line 2: unknown encoding: foo"),
        (b"# coding: rot13\nx = 1\n", "line 1: 'rot13' is not a text encoding"),
        (b"\xef\xbb\xbf# coding: latin-1\nx = 1\n", "line 1: encoding problem: utf-8"),
    ],
)
def test_a_script_that_cannot_be_decoded_is_told_its_line(source: bytes, words: str, tmp_path: Path):
    """Python too runs none of these, and names what is wrong in much the same words."""
    path = tmp_path / "train.py"
    path.write_bytes(source)
    assert subprocess.run([sys.executable, path], capture_output=True, check=False).returncode == 1
    with pytest.raises(ValueError, match=r"train\.py, line \d+: ") as refused:
        find_script([str(path)])
    assert words in str(refused.value)
    assert "# -*- coding: latin-1 -*-" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name a script"),
        (["-m"], "-m needs the name of a module"),
        (["gone.py"], "gone.py cannot be read: No such file"),
        (["folder"], "folder is a folder"),
        (["torchrun", "train.py"], "torchrun --nproc-per-node 2 -m trainstep run train.py"),
        (["picture.png"], "picture.png is not a Python script"),
        (["-m", "no.such.module"], "the module no.such.module cannot be imported"),
        (["-m", "nothere"], "there is no module nothere"),
    ],
)
def test_what_is_no_script_is_refused_in_a_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    with pytest.raises(ValueError, match=r"^script: ") as refused:
        find_script(words)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_script_behind_a_link_finds_what_lies_beside_it(tmp_path: Path):
    write(tmp_path, "import helper\nprint(helper.x, __file__)\n", "real/train.py")
    write(tmp_path, "x = 5\n", "real/helper.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "train.py")
    code, out, _ = alike(tmp_path, "link.py")
    assert (code, out) == (0, f"5 {tmp_path / 'link.py'}\n")


def test_words_of_sys_exit_that_cannot_be_shown_do_not_change_the_exit_code(tmp_path: Path):
    write(tmp_path, "import sys\nclass Words:\n    def __str__(self):\n        return 1 / 0\nsys.exit(Words())\n")
    assert alike(tmp_path, "train.py")[:2] == (1, "")


def test_the_main_module_has_what_python_gives_it(tmp_path: Path):
    write(tmp_path, "__builtins__.profile = len\nprint(profile([1, 2]), __cached__, __annotations__)\n")
    assert alike(tmp_path, "train.py")[:2] == (0, "2 None {}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('hi'\n", ["train.py"]),
        ("print('hi'\n", ["-m", "train"]),
    ],
)
def test_a_syntax_error_is_shown_as_python_shows_it(text: str, words: list[str], tmp_path: Path):
    write(tmp_path, text)
    code, out, errors = run(tmp_path, *words)
    python = run(tmp_path, *words, direct=True)
    assert (code, out) == python[:2] == (1, "")
    assert "measure/run/script.py" not in errors
    assert errors.splitlines()[-4:] == python[2].splitlines()[-4:]


def test_an_error_of_a_package_is_shown_without_our_frames(tmp_path: Path):
    write(tmp_path, "raise RuntimeError('no data')\n", "package/__init__.py")
    write(tmp_path, "", "package/train.py")
    code, _, errors = run(tmp_path, "-m", "package.train")
    assert code == 1
    assert errors.splitlines()[-1] == "RuntimeError: no data"
    assert "measure/run/script.py" not in errors
