"""Make or refresh the virtual environment that `make` works in: python3 scripts/setup_venv.py .venv

PyTorch decides what a set-up costs, so it is settled first and said before anything is downloaded: the torch of the
Python that runs this is used if it has a suitable one; else a CPU build where pip's find-links offer one; else the CUDA
build. Then one pip command installs everything, so that no second one can bring another torch. Standard library only.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_TORCH = (2, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Set up the environment named on the command line."""
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    reused, offered = installed_torch(), None
    if not is_usable(folder, reuse=reused is not None):
        create(folder, reuse=reused is not None)
    if reused is not None:
        print(f"Setting up {folder}: PyTorch {reused} is installed here and used; up to 0.3 GB more.", flush=True)
    elif has_torch(python):
        print(f"Setting up {folder}: refreshing what pyproject.toml and constraints.txt ask for.", flush=True)
    else:
        offered = offered_torch(python)
        print(download_sentence(folder, offered), flush=True)
    install(python, torch=reused or offered, reuse=reused is not None)


def installed_torch() -> str | None:
    """Version of a suitable torch of the Python that runs this, without importing it."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return version if release(version) >= OLDEST_TORCH else None


def is_usable(folder: Path, *, reuse: bool) -> bool:
    """Whether the environment has pip, is of this Python, and sees this Python's packages or not, as is wanted now."""
    code = "import pip, sys; print(sys.version_info[:2])"
    try:
        settings = (folder / "pyvenv.cfg").read_text()
        asked = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    sees_packages = "include-system-site-packages = true" in settings
    return asked.stdout.strip() == str(sys.version_info[:2]) and sees_packages == reuse


def create(folder: Path, *, reuse: bool) -> None:
    """A new environment; with `reuse` it sees the packages of the Python that runs this."""
    try:
        venv.create(folder, clear=True, with_pip=True, symlinks=True, system_site_packages=reuse)
    except subprocess.CalledProcessError:
        sys.exit(
            "This Python cannot make virtual environments: install its venv module (Debian: apt install python3-venv)."
        )
    if (
        reuse and sys.prefix != sys.base_prefix
    ):  # made from another environment it sees the base's packages, not that one's
        (own,) = folder.glob("lib/python*/site-packages")
        parent = sysconfig.get_path("purelib")
        (own / "_parent_environment.pth").write_text(f"import site; site.addsitedir({parent!r})\n")


def has_torch(python: Path) -> bool:
    """Whether the environment has a suitable torch of its own already."""
    code = "from importlib.metadata import version; print(version('torch'))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and OLDEST_TORCH <= release(asked.stdout) < torch_limit()


def offered_torch(python: Path) -> str | None:
    """The newest CPU build that pip offers, else the newest release; None where pip cannot say. Downloads nothing."""
    command = [python, "-m", "pip", "index", "versions", "torch"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    _, _, offers = asked.stdout.partition("Available versions:")
    versions = [word.strip() for word in offers.split("\n")[0].split(",") if word.strip()]
    tested = [version for version in versions if OLDEST_TORCH <= release(version) < torch_limit()]
    # A CPU build is offered where somebody has told pip of one. It is taken though the index has a newer release for CUDA.
    return next((version for version in tested if "+cpu" in version), tested[0] if tested else None)


def download_sentence(folder: Path, offered: str | None) -> str:
    """What is about to be downloaded, and how to make it less."""
    if sys.platform == "darwin" or (offered and "+cpu" in offered):
        return f"Setting up {folder}: downloading PyTorch {offered or ''} (~0.2 GB CPU build) and ~0.3 GB beside it."
    return (
        f"Setting up {folder}: downloading PyTorch {offered or ''} with CUDA, about 3 GB (over 6 GB on disk).\n"
        f"Without a GPU the CPU build (~0.2 GB) does: stop this with Ctrl-C, run\n"
        f"    {folder}/bin/python -m pip install 'torch<{'.'.join(map(str, torch_limit()))}' --index-url {CPU_INDEX}\n"
        f"and make again; it is kept."
    )


def install(python: Path, *, torch: str | None, reuse: bool) -> None:
    """This project, editable, with its tests' packages, in one pip command. A reused torch stays as it is, its triton too."""
    constraints = CONSTRAINTS.read_text()
    if torch is not None:
        settled = "torch|triton" if reuse else "torch"
        constraints = re.sub(rf"(?m)^({settled})\b.*", "", constraints) + f"torch=={torch}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write(constraints)
    quietly = [] if sys.stdout.isatty() else ["-qq"]  # on a terminal pip shows how far the download is
    # Compiling all modules to bytecode would take most of the time; Python compiles those that are imported, once.
    command = [python, "-m", "pip", "install", *quietly, "--no-compile", "--disable-pip-version-check"]
    command += ["--constraint", file.name]
    try:
        subprocess.run([*command, "--editable", f"{ROOT}[dev]"], check=True)
    except subprocess.CalledProcessError:
        sys.exit("pip could not install the packages; its message is above. The next make goes on from here.")
    finally:
        os.unlink(file.name)


def torch_limit() -> tuple[int, ...]:
    """The release that constraints.txt keeps torch below."""
    match = re.search(r"(?m)^torch<([\d.]+)", CONSTRAINTS.read_text())
    assert match, "constraints.txt has no line torch<X.Y"
    return release(match[1])


def release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) for '2.13.0+cpu'."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


if __name__ == "__main__":
    main()
