"""`make test-newest`: the releases it chooses, the stand-ins for CUDA's libraries, and names that a release may remove."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import Version

from sources import load_script, modules
from torch_names import is_private, missing_part, used_names


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/newest_releases.py as a module."""
    return load_script("newest_releases", monkeypatch)


@pytest.mark.filterwarnings("ignore")  # deprecated modules warn when they are looked up
def test_every_name_of_torch_and_triton_exists():
    """The names of code that only a GPU runs are checked, too, if the build of torch has them."""
    users: dict[str, list[str]] = {}
    for module, path in modules().items():
        for name in used_names(path.read_text()):
            users.setdefault(name, []).append(module)
    missing = {
        f"{name} ({'private' if is_private(name) else 'public'})": users[name]
        for name in users
        if (part := missing_part(name)) is not None
        if torch.backends.cuda.is_built() or not part.startswith("torch._C._cuda")
    }
    assert missing == {}, "these names are not in the installed torch or triton: a release has renamed them"
    assert "torch._C._cuda_getCurrentRawStream" in users, "the search finds a name that is known to be used"


def test_names_are_found_under_any_import_name():
    source = """
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as hooks

def f(x):
    import triton
    dist.group.WORLD.size()
    return nn.functional.silu(x), hooks.Optimizer, triton.language.load, torch.ops.trainstep.flash_attention, os.path.join
"""
    assert used_names(source) == {
        *(
            "torch.distributed",
            "torch.distributed.group",
            "torch.distributed.group.WORLD",
            "torch.distributed.group.WORLD.size",
        ),
        *("torch.nn", "torch.nn.functional", "torch.nn.functional.silu"),
        *(
            "torch.optim.optimizer",
            "torch.optim.optimizer.Optimizer",
            "triton",
            "triton.language",
            "triton.language.load",
        ),
    }


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("torch.nn.functional.silu", None),
        ("torch.distributed.checkpoint.api.CheckpointException", None),
        ("torch.distributed.group.WORLD.whatever", None),
        ("torch.nn.functional.gone", "torch.nn.functional.gone"),
        ("torch.gone.also.gone", "torch.gone"),
        ("torch.Tensor.gone", "torch.Tensor.gone"),
    ],
)
def test_the_first_missing_part_of_a_name_is_reported(name, missing):
    assert missing_part(name) == missing


def test_names_with_an_underscore_and_internals_are_private():
    names = ("torch._C.DisableTorchFunction", "torch.cuda.memory._snapshot", "triton.backends.nvidia.driver.wrap")
    assert all(map(is_private, names))
    assert not any(map(is_private, ("torch.nn.Linear", "torch.__file__", "triton.language.load")))


def index(script: ModuleType, monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> None:
    """Let pip print this."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(script.subprocess, "run", run)


@pytest.mark.parametrize(("bound", "chosen"), [("", "2.15.0"), ("<2.15", "2.14.1"), ("<2.14", "2.13.0+cpu")])
def test_the_newest_release_within_the_bound_is_taken(script, monkeypatch, bound, chosen):
    index(
        script,
        monkeypatch,
        "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0\n  INSTALLED: 2.13.0+cpu",
    )
    assert script.newest("torch", script.offered("torch"), bound) == Version(chosen)


@pytest.mark.parametrize(
    ("stdout", "stderr", "reason"),
    [
        ("", "WARNING: x\nERROR: No matching distribution found for torch\n", "ERROR: No matching distribution"),
        (
            "Could not fetch URL index/torch/: connection error: x\nAvailable versions: 2.13.0+cpu\n",
            "",
            "connection error",
        ),
    ],
)
def test_a_missing_network_is_one_sentence(script, monkeypatch, stdout, stderr, reason):
    """That holds even if pip lists an installed release instead of the index."""
    index(script, monkeypatch, stdout, stderr)
    with pytest.raises(SystemExit, match=f"test-newest needs the network. pip says: {reason}"):
        script.offered("torch")


def test_pips_own_constraints_are_heeded(script, monkeypatch, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("# a cap\ntorch<=2.14.1\ntorchvision<=0.29.1\n")
    second.write_text("torch != 2.14.0 ; python_version > '3'\n")
    settings = f":env:.cert='x'\nglobal.constraint='{first} {second} {tmp_path}/missing'\nglobal.find-links='y'"
    index(script, monkeypatch, settings)
    assert script.pip_allows("torch") == "<=2.14.1,!=2.14.0"
    assert script.pip_allows("triton") == ""


def test_a_bound_without_a_release_is_refused(script):
    with pytest.raises(SystemExit, match=r"constraints.txt says torch<2, but the index has torch 2.14.1 to 2.15.0"):
        script.newest("torch", [Version("2.15.0"), Version("2.14.1")], "<2")


def compiled(folder: Path, name: str, source: str, *options: str | Path) -> Path:
    (folder / "source.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, folder / "source.c", *options]
    subprocess.run(command, check=True)
    return folder / name


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and gcc")
def test_a_stand_in_has_the_symbols_and_says_which_was_called(script, tmp_path):
    """A library needs symbols of two missing libraries, with and without versions; Python resolves all symbols at loading."""
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    (tmp_path / "versions").write_text("libcublas.so.9 { global: cublasCreate; };")
    cublas = compiled(
        libraries,
        "libcublas.so.9",
        "int cublasCreate(int x) { return x; }",
        f"-Wl,--version-script={tmp_path}/versions",
    )
    nccl = compiled(libraries, "libnccl.so.2", "int ncclSend(int x) { return x; }")
    source = (
        "int cublasCreate(int); int ncclSend(int); int ask(int x) { return x < 0 ? x : cublasCreate(x) + ncclSend(x); }"
    )
    user = compiled(libraries, "libtorch_cuda.so", source, cublas, nccl, "-Wl,-rpath,$ORIGIN")
    cublas.unlink()
    nccl.unlink()
    load = f"import ctypes; ask = ctypes.CDLL({str(user)!r}).ask; print(ask(-1), flush=True); ask(1)"
    without = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert "libcublas.so.9: cannot open shared object file" in without.stderr

    script.stand_ins(tmp_path)
    with_stand_ins = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert with_stand_ins.stdout == "-1\n"
    assert with_stand_ins.returncode < 0
    assert with_stand_ins.stderr == "cublasCreate was called, but libcublas.so.9 is a stand-in of test-newest\n"


def test_an_interrupted_installation_leaves_no_folder(script, monkeypatch, tmp_path, capsys):
    def interrupt(target: Path, *words: str) -> None:
        (target / "torch").mkdir()
        raise KeyboardInterrupt

    installed: list[tuple[str, ...]] = []

    def succeed(target: Path, *words: str) -> None:
        installed.append(words)
        (target / "torch" / "lib").mkdir(parents=True)

    releases = {"torch": Version("2.15.0"), "numpy": Version("2.5")}
    (tmp_path / "newest-torch2.14.1").mkdir()
    monkeypatch.setattr(script, "pip_install", interrupt)
    with pytest.raises(KeyboardInterrupt):
        script.install(tmp_path, releases)
    monkeypatch.setattr(script, "pip_install", succeed)
    folder = script.install(tmp_path, releases)
    assert script.install(tmp_path, releases) == folder, "a second call installs nothing"
    assert installed == [("--no-deps", "torch==2.15.0", "numpy==2.5")]
    assert [path.name for path in tmp_path.iterdir()] == ["newest-numpy2.5-torch2.15.0"], "older ones are removed"
    assert "Installing torch==2.15.0 numpy==2.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "newest", "tested"),
    [
        (["--admitted"], "2.13.0", False),
        (["--admitted", "-x"], "2.13.0", True),
        ([], "2.13.0", True),
        (["--admitted"], "2.14.0", True),
    ],
)
def test_what_make_test_has_tested_is_not_tested_again(script, monkeypatch, options, newest, tested):
    calls: list[list[str]] = []
    monkeypatch.setattr(script.sys, "argv", ["newest_releases.py", ".venv", *options])
    monkeypatch.setattr(script, "offered", lambda name: [Version(newest)])
    monkeypatch.setattr(script, "pip_allows", lambda name: "")
    monkeypatch.setattr(script, "newest", lambda name, versions, bound: max(versions))
    monkeypatch.setattr(script, "installed", lambda name: "2.13.0")
    monkeypatch.setattr(script, "install", lambda outer, releases: Path("newest"))
    monkeypatch.setattr(script, "test", lambda python, words: calls.append(words))
    script.main()
    assert bool(calls) == tested


def test_what_a_release_can_fail_is_tested_and_what_reads_words_is_not(script):
    files = script.tests_of_torch()
    rooms = {path.split("/")[1] for path in files if path.count("/") > 1}
    assert rooms == {
        "capture",
        "costs",
        "explain",
        "measure",
        "ops",
        "parallel",
        "plan",
        "planted",
        "traces",
        "training",
    }
    assert {"tests/test_newest.py", "tests/test_spans.py", "tests/test_strategies.py"} <= set(files)
    assert "tests/ops/test_adamw.py" in files
