"""The patch of a script adds the pages' keywords to calls that lack them, and leaves alone what it cannot be sure of."""

import subprocess
from pathlib import Path

import pytest

from trainstep.explain.causes import CAUSES
from trainstep.explain.script_patch import _KEYWORDS, keywords_of_changes, keywords_of_pages, patch_of, winning_patch

SCRIPT = """\
import re, torch
from torch.utils.data import DataLoader

loader = DataLoader(
    dataset,
    batch_size=4,  # small
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model = torch.compile(model.to(device))
pattern = re.compile("x")
for étape, batch in enumerate(loader):
    batch = {name: value.to(device) for name, value in batch.items()}
"""


def test_the_patch_applies_and_is_what_the_pages_say(tmp_path: Path):
    patch = patch_of(
        "train.py",
        SCRIPT,
        keywords_of_pages(["data", "host_copies", "optimizer", "recompiles", "synchronisations"], workers=6),
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    text = (tmp_path / "train.py").read_text()
    assert "batch_size=4, num_workers=6, persistent_workers=True, prefetch_factor=4, pin_memory=True,  # small" in text
    assert "AdamW(model.parameters(), lr=3e-4, fused=True)" in text
    assert "torch.compile(model.to(device), dynamic=True)" in text
    assert 're.compile("x")' in text
    assert "{name: value.to(device, non_blocking=True) for name" in text
    assert patch_of("train.py", text, keywords_of_pages(_KEYWORDS, workers=6)) == ""


@pytest.mark.parametrize(
    "text",
    [
        "loader = DataLoader(dataset, num_workers=2)\n",
        "loader = DataLoader(dataset, **options)\n",
        "optimizer = AdamW(parameters, foreach=True)\n",
        "model = model.to(device)\n",
        "for x in y:\n    model = x.to(device, True)\n",
        "loader = DataLoader((dataset))\n",
        "this is no Python\n",
        "\0",
    ],
)
def test_what_is_given_or_unsure_stays_as_it_is(text: str):
    causes = ["optimizer", "data"] if "model" not in text else ["host_copies"]
    assert patch_of("train.py", text, keywords_of_pages(causes, workers=6)) == ""


def test_measured_changes_have_the_values_that_were_measured_and_what_no_keyword_makes_is_left_out():
    won = {"workers": "2", "adamw": "fused", "copies": "non_blocking", "compile": "module"}
    patch = patch_of("train.py", SCRIPT, keywords_of_changes(won))
    assert "batch_size=4, num_workers=2, persistent_workers=True,  # small" in patch
    assert "lr=3e-4, fused=True)" in patch
    assert "value.to(device, non_blocking=True)" in patch
    assert "pin_memory" not in patch
    assert "prefetch_factor" not in patch, "--apply leaves it as it is"
    for changes in ({}, {"compile": "module"}, {"adamw": "trainstep"}):
        assert patch_of("train.py", SCRIPT, keywords_of_changes(changes)) == ""


def test_an_empty_call_gets_its_keywords():
    assert "+optimizer = AdamW(fused=True)" in patch_of(
        "train.py", "optimizer = AdamW()\n", keywords_of_pages(["optimizer"], workers=6)
    )


@pytest.mark.parametrize("cause", _KEYWORDS)
def test_the_keywords_are_those_of_the_lines(cause: str):
    lines = " ".join(CAUSES[cause].lines)
    for keyword in _KEYWORDS[cause]:
        assert ", ".join(f"{name}={value}" for name, value in keyword.values.items()) in lines


def applied(folder: Path, text: str, changes: dict[str, str]) -> str:
    """The script as `git apply` leaves it."""
    (folder / "train.py").write_text(text, newline="")
    patch = patch_of("train.py", text, keywords_of_changes(changes))
    if patch:
        subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), check=True)
    return (folder / "train.py").read_bytes().decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(x, persistent_workers=False)", "DataLoader(x, persistent_workers=True, num_workers=3)"),
        ("DataLoader(x, num_workers=2)", "DataLoader(x, num_workers=3, persistent_workers=True)"),
        (
            "DataLoader(\n  x, num_workers=0, y=1\n)",
            "DataLoader(\n  x, num_workers=3, y=1, persistent_workers=True\n)",
        ),
        ("DataLoader(x, 4, True)", "DataLoader(x, 4, True, num_workers=3, persistent_workers=True)"),
        ("DataLoader(x)\r\nb = 1", "DataLoader(x, num_workers=3, persistent_workers=True)\r\nb = 1"),
        ("'\f'; b = DataLoader(x)", "'\f'; b = DataLoader(x, num_workers=3, persistent_workers=True)"),
        (
            "DataLoader(num_workers=0, dataset=DataLoader(xy))",
            "DataLoader(num_workers=3, dataset=DataLoader(xy, num_workers=3, persistent_workers=True), "
            "persistent_workers=True)",
        ),
        ("DataLoader(x, num_workers=4)", None),
        ("DataLoader(x, 4, True, None, None, 4)", None),
    ],
)
def test_a_measured_number_of_workers_takes_the_place_of_a_smaller_one(before: str, after: str | None, tmp_path: Path):
    text = f"é = {before}\n"
    assert applied(tmp_path, text, {"workers": "3"}) == (f"é = {after}\n" if after else text)
    assert winning_patch("train.py", text + "c = DataLoader(y)\n", {"workers": "3"}).words == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AdamW(p, fused=False)", "AdamW(p, fused=True)"),
        ("Adam(p, foreach=False)", "Adam(p, foreach=False, fused=True)"),
        ("AdamW(p, foreach=True, fused=False)", None),  # torch refuses both
        ("AdamW(p, differentiable=True)", None),
    ],
)
def test_an_optimizer_is_fused_where_torch_takes_it(before: str, after: str | None, tmp_path: Path):
    text = f"o = {before}\n"
    assert applied(tmp_path, text, {"adamw": "fused"}) == (f"o = {after}\n" if after else text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("to(0)", "to(0, non_blocking=True)"),
        ("to(dtype=half, device='cuda')", "to(dtype=half, device='cuda', non_blocking=True)"),
        ("to(device, True)", None),
        ("to(device, non_blocking=False)", None),  # the script may have a reason
        ("to('cpu')", None),  # the host would not wait for the data either
        ("to(device=torch.device('cpu'))", None),
    ],
)
def test_copies_to_a_gpu_need_not_wait(before: str, after: str | None, tmp_path: Path):
    text = f"for b in loader:\n    x = b.{before}\n"
    expected = f"for b in loader:\n    x = b.{after}\n" if after else text
    assert applied(tmp_path, text, {"copies": "non_blocking"}) == expected


@pytest.mark.parametrize(
    "call",
    [
        "DataLoader(x, num_workers=arguments.workers)",
        "DataLoader(x, **options)",
        "DataLoader(*arguments)",
        "DataLoader(x, 4, True, None, None, 2)",  # a keyword as well would be an error when the script runs
        "DataLoader((x))",
    ],
)
def test_a_call_that_cannot_be_patched_stays_and_is_told(call: str, tmp_path: Path):
    text = f"loader = {call}\n"
    assert applied(tmp_path, text, {"workers": "3"}) == text
    patch = winning_patch("train.py", f"{text}other = DataLoader(y)\n", {"workers": "3", "gc": "off"})
    assert patch.words == "The patch lacks gc=off. It leaves some calls as they were; they may lack workers=3."
    assert winning_patch("train.py", text, {"workers": "3"}).words == "", "there is no patch"


@pytest.mark.parametrize("text", ["a = 1\rb = DataLoader(x)\r", "s = '''a\rb'''\nb = DataLoader(x)\n"])
def test_lines_that_end_as_only_python_ends_them_stay(text: str, tmp_path: Path):
    assert applied(tmp_path, text, {"workers": "3"}) == text


def test_a_script_without_a_last_newline_is_patched(tmp_path: Path):
    text = "import torch\noptimizer = torch.optim.AdamW(p)"
    (tmp_path / "train.py").write_text(text)
    patch = patch_of("train.py", text, keywords_of_changes({"adamw": "fused"}))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert (tmp_path / "train.py").read_text() == "import torch\noptimizer = torch.optim.AdamW(p, fused=True)"
