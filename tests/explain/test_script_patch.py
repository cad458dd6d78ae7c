"""The patch of a script adds the pages' keywords to calls that lack them, and leaves alone what it cannot be sure of."""

import subprocess
from pathlib import Path

import pytest

from trainstep.explain.causes import CAUSES
from trainstep.explain.script_patch import _KEYWORDS, patch_of

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
    patch = patch_of("train.py", SCRIPT, ["data", "host_copies", "optimizer", "recompiles", "synchronisations"])
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    text = (tmp_path / "train.py").read_text()
    assert "batch_size=4, num_workers=8, persistent_workers=True, prefetch_factor=4, pin_memory=True,  # small" in text
    assert "AdamW(model.parameters(), lr=3e-4, fused=True)" in text
    assert "torch.compile(model.to(device), dynamic=True)" in text
    assert 're.compile("x")' in text
    assert "{name: value.to(device, non_blocking=True) for name" in text
    assert patch_of("train.py", text, list(_KEYWORDS)) == ""


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
    assert patch_of("train.py", text, ["optimizer", "data"] if "model" not in text else ["host_copies"]) == ""


def test_an_empty_call_gets_its_keywords():
    assert "+optimizer = AdamW(fused=True)" in patch_of("train.py", "optimizer = AdamW()\n", ["optimizer"])


@pytest.mark.parametrize("cause", _KEYWORDS)
def test_the_keywords_are_those_of_the_lines(cause: str):
    lines = " ".join(CAUSES[cause].lines)
    for keyword in _KEYWORDS[cause]:
        assert keyword.keywords in lines
