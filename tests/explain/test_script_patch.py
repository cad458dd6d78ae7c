"""The patch of a script adds the pages' keywords to calls that lack them, and leaves alone what it cannot be sure of."""

import subprocess
from pathlib import Path

import pytest

from trainstep.explain.causes import CAUSES
from trainstep.explain.script_patch import _KEYWORDS, keywords_of_changes, keywords_of_pages, patch_of

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
        assert keyword.keywords in lines


def test_a_keyword_that_is_there_already_is_not_written_twice():
    text = "loader = DataLoader(x, persistent_workers=False)\n"
    assert patch_of("train.py", text, keywords_of_changes({"workers": "3"})) == ""


def test_a_script_without_a_last_newline_is_patched(tmp_path: Path):
    text = "import torch\noptimizer = torch.optim.AdamW(p)"
    (tmp_path / "train.py").write_text(text)
    patch = patch_of("train.py", text, keywords_of_changes({"adamw": "fused"}))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert (tmp_path / "train.py").read_text() == "import torch\noptimizer = torch.optim.AdamW(p, fused=True)"
