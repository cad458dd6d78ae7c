"""Test with the newest releases on the package index: python scripts/newest_releases.py .venv [--admitted] [pytest's words]

It asks the index for the newest release of each package that constraints.txt keeps below a version (torch, triton, ...), puts
those that the environment lacks into a second environment, which finds all else in the first, and runs mypy and the tests there.
With --admitted it stays below constraints.txt's bounds, so that a release of tomorrow cannot fail a build of today. If the
environment of make has those releases, it tests nothing then: `make check test` has tested them.

For Linux the index has torch only as a build for CUDA: 0.5 GB, which links 2.4 GB of NVIDIA's libraries and cannot be imported
without them. Tests on a CPU call none of them. So only the small ones that torch calls while it is imported are installed. Each of
the others is a stand-in: a library of that name whose functions end the process with a message. Decision 15 says why.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
CALLED_AT_IMPORT = "cudart,cupti"
"""Extras of the package cuda-toolkit: libtorch_cuda registers its kernels with cudart when it is loaded; profilers use cupti."""

MYPY = ["--no-warn-unused-ignores"]
"""A newer torch has annotations that the older one lacks, so a comment that the older one needs may be unused."""
ABOUT_WORDS = (
    *("attacks", "cli", "config", "records", "report"),
    *(
        "test_documents.py",
        "test_house.py",
        "test_layers.py",
        "test_setup_venv.py",
        "test_wheel.py",
        "test_workflows.py",
    ),
)
"""Folders and files of tests that read words, files and command lines: no release changes those."""
SIDE_BY_SIDE = ["-n", "logical", "--dist", "worksteal"]


def main() -> None:
    """Install what is missing, say what is tested, test it."""
    outer, *words = sys.argv[1:]
    admitted = "--admitted" in words
    words = [word for word in words if word != "--admitted"]
    releases = {}
    for name, bound in re.findall(r"(?m)^([\w-]+)(<[\d.]+)$", CONSTRAINTS.read_text()):
        allowed = pip_allows(name)
        offers = list(SpecifierSet(allowed).filter(offered(name)))
        if not offers:
            sys.exit(f"pip is configured to install {name}{allowed}, and the index has no such release.")
        releases[name] = newest(name, offers, bound if admitted else "")
        if releases[name] != max(offers):
            print(f"The index has {name} {max(offers)}. To test it, raise {name}{bound} in constraints.txt.")
    missing = {name: version for name, version in releases.items() if installed(name) != version.public}
    if admitted and not missing and not words:
        print(
            "The environment has the newest releases that constraints.txt admits: make check and make test test them."
        )
        return
    test(install(Path(outer), missing) / "bin" / "python" if missing else Path(sys.executable), words)


def offered(name: str) -> list[Version]:
    """The releases on the index for this Python and machine, pre-releases left out."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "-vv", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    # Only -vv tells that an index could not be reached; without it pip passes off what lies on disk as all there is.
    unreachable = re.search(
        r"Could not fetch URL \S+ (connection error|timed out|There was a problem confirming)", answer.stdout
    )
    _, _, offers = answer.stdout.partition("Available versions:")
    versions = [Version(word) for word in re.findall(r"[^\s,]+", offers.split("\n")[0])]
    if unreachable or not versions:
        reason = unreachable[1] if unreachable else answer.stderr.strip().split("\n")[-1]
        sys.exit(
            f"pip cannot tell which releases of {name} there are; test-newest needs the network. pip says: {reason}"
        )
    return versions


def pip_allows(name: str) -> str:
    """The versions to which this machine's configuration of pip constrains a package, which `pip index` does not heed."""
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    settings = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    files = [Path(file) for value in re.findall(r"(?m)constraint='(.*)'$", settings) for file in value.split()]
    lines = "\n".join(file.read_text() for file in files if file.is_file())
    return ",".join(
        comparison + version
        for comparison, version in re.findall(rf"(?m)^{re.escape(name)}\s*([<>=!~]=?)\s*([^\s;#]+)", lines)
    )


def newest(name: str, versions: list[Version], bound: str) -> Version:
    """The newest of these versions within the bound."""
    admitted = list(SpecifierSet(bound).filter(versions))
    if not admitted:
        sys.exit(f"constraints.txt says {name}{bound}, but the index has {name} {min(versions)} to {max(versions)}.")
    return max(admitted)


def installed(name: str) -> str | None:
    """The version here without its build: '2.13.0' for 2.13.0+cpu."""
    try:
        return Version(metadata.version(name)).public
    except metadata.PackageNotFoundError:
        return None


def install(outer: Path, releases: dict[str, Version]) -> Path:
    """An environment with these releases. It gets its name when it is complete: an interrupted call leaves none of that name."""
    folder = outer / "-".join(["newest", *(f"{name}{version}" for name, version in sorted(releases.items()))])
    if folder.exists():
        return folder
    part = outer / "newest.part"
    shutil.rmtree(part, ignore_errors=True)
    packages = create(part)
    wanted = [f"{name}=={version}" for name, version in releases.items()]
    print(
        f"Installing {' '.join(wanted)} into {folder} (torch with CUDA: 0.6 GB to download, 1.3 GB on disk).",
        flush=True,
    )
    pip_install(packages, "--no-deps", *wanted)
    if sys.platform == "linux":
        if toolkit := cuda_toolkit(packages):
            pip_install(packages, toolkit)
        stand_ins(packages)
    for older in outer.glob("newest-*"):
        shutil.rmtree(older)
    part.rename(folder)
    return folder


def create(folder: Path) -> Path:
    """An environment without packages of its own; returns where they go. What is not there is found where this Python finds it.

    Not a folder on PYTHONPATH: tests set that variable for the processes that they start.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    (packages / "_outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    return packages


def pip_install(target: Path, *words: str) -> None:
    """Without byte code, which Python writes for the tenth of torch that is imported."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-compile",
        "--target",
        target,
    ]
    try:
        subprocess.run([*command, *words], check=True)
    except subprocess.CalledProcessError:
        sys.exit(
            "pip could not install the newest releases; its message is above. The next make test-newest begins again."
        )


def cuda_toolkit(folder: Path) -> str | None:
    """What pip must install so that this folder's torch, if it is built for CUDA, has the libraries that its import calls."""
    for torch in metadata.distributions(name="torch", path=[str(folder)]):
        for requirement in torch.requires or ():
            if toolkit := re.match(r"cuda-toolkit\[.*\](==[\d.]+)", requirement):
                return f"cuda-toolkit[{CALLED_AT_IMPORT}]{toolkit[1]}"
    return None


def stand_ins(folder: Path) -> None:
    """Build a stand-in for each NVIDIA library that torch's libraries link and that this folder lacks, beside torch's."""
    libraries = folder / "torch" / "lib"
    present = {path.name for path in folder.rglob("lib*.so*")}
    linking = [path for path in libraries.glob("*.so") if path.name != "libcaffe2_nvrtc.so"]  # loaded with a GPU alone
    headers = "".join(output("objdump", "-p", path) for path in linking)
    names = {name for name in re.findall(r"NEEDED\s+(\S+)", headers) if CUDA_LIBRARY.match(name)} - present
    if not names:
        return
    symbols = undefined_symbols(linking)
    versions = {name: version_nodes(headers, name) for name in names}
    # The file does not say which library has a symbol without a version. Any may have it: the loader looks through all.
    versions[min(sorted(names), key=lambda name: len(versions[name]))].add("")
    for name in sorted(names):
        build_stand_in(libraries / name, {node: symbols.get(node, set()) for node in versions[name]})


def version_nodes(headers: str, name: str) -> set[str]:
    """Under which version names (libcublas.so.13, NVSHMEM) symbols of this library are asked for."""
    nodes: set[str] = set()
    for block in re.findall(rf"required from {re.escape(name)}:\n((?:\s+0x.*\n)+)", headers):
        nodes.update(re.findall(r"(\S+)\n", block))
    return nodes


def undefined_symbols(linking: list[Path]) -> dict[str, set[str]]:
    """The symbols that these libraries ask others for, by version name; those without one under '', if they are NVIDIA's."""
    asked: dict[str, set[str]] = {}
    for symbol, node in re.findall(r" [Uw] ([^\s@]+)@?(\S*)", output("nm", "-D", "--undefined-only", *linking)):
        if node or re.match("cu|nv|nccl", symbol):
            asked.setdefault(node, set()).add(symbol)
    own = set(re.findall(r" [^Uw] ([^\s@]+)", output("nm", "-D", "--defined-only", *linking)))
    asked[""] = asked.get("", set()) - own
    return asked


def build_stand_in(path: Path, symbols: dict[str, set[str]]) -> None:
    """A library with these symbols by version name, each a function that names itself and ends the process."""
    source = ["#include <stdio.h>", "#include <stdlib.h>", "static void end(const char *symbol) {"]
    source += [
        f'    fprintf(stderr, "%s was called, but {path.name} is a stand-in of test-newest\\n", symbol);',
        "    abort();",
        "}",
    ]
    source += [f'void {symbol}(void) {{ end("{symbol}"); }}' for node in symbols.values() for symbol in sorted(node)]
    script = [
        f"{node} {{ global: {' '.join(f'{symbol};' for symbol in sorted(symbols[node]))} }};"
        for node in symbols
        if node
    ]
    code, versions = path.with_suffix(".c"), path.with_suffix(".map")
    code.write_text("\n".join(source) + "\n")
    versions.write_text("\n".join(script) + "\n")
    named = [f"-Wl,--version-script={versions}"] if script else []
    output("gcc", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}", *named, "-o", path, code)


def output(*command: str | Path) -> str:
    """What this command prints."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    except FileNotFoundError:
        sys.exit(f"test-newest needs {command[0]} to build stand-ins for CUDA's libraries; install gcc and binutils.")
    except subprocess.CalledProcessError as failed:
        sys.exit(
            f"test-newest could not build stand-ins for CUDA's libraries: {command[0]} ended with {failed.returncode}."
        )


SAY_VERSIONS = """
import importlib.metadata, platform, sys, torch
print("Testing with Python", platform.python_version(), *(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]))
print(f"torch is {torch.__version__} of {torch.__file__}")
"""


def test(python: Path, words: list[str]) -> None:
    """Types, then tests, with this Python's packages; ends with the exit code of what failed first."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # no test may call a stand-in
    names = re.findall(r"(?m)^[\w-]+", CONSTRAINTS.read_text())
    mypy = ["-m", "mypy", *MYPY, "--cache-dir", str(python.parent.parent / "mypy-newest")]
    for command in (["-c", SAY_VERSIONS, *names], mypy, ["-m", "pytest", *SIDE_BY_SIDE, *(words or tests_of_torch())]):
        done = subprocess.run([python.absolute(), *command], env=environ, cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(done.returncode)


def tests_of_torch() -> list[str]:
    """The test files that a release of torch or triton can fail: those that name one, but not where they are about words or files.

    What the command line, the records and the pages do with torch goes through the rooms below them, whose tests are all here.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in files
        if path.relative_to(ROOT / "tests").parts[0] not in ABOUT_WORDS
        and re.search(r"\b(torch|triton)\b", path.read_text())
    ]


if __name__ == "__main__":
    main()
