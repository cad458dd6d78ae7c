"""The patch of a script adds the pages' keywords to calls that lack them, and leaves alone what it cannot be sure of."""

import subprocess
from pathlib import Path

import pytest

from trainstep.explain.causes import CAUSES
from trainstep.explain.script_patch import _KEYWORDS, keywords_of_changes, keywords_of_pages, leaves_calls, patch_of

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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(x, persistent_workers=False)", "DataLoader(x, persistent_workers=True, num_workers=3)"),
        ("DataLoader(x, num_workers=2)", "DataLoader(x, num_workers=3, persistent_workers=True)"),
        ("DataLoader(\n  x, num_workers=0, y=1\n)", "DataLoader(\n  x, num_workers=3, y=1, persistent_workers=True\n)"),
        ("DataLoader(x, 4, True)", "DataLoader(x, 4, True, num_workers=3, persistent_workers=True)"),
        ("DataLoader(x, num_workers=4)", None),
    ],
)  # fmt: skip
def test_a_measured_number_of_workers_takes_the_place_of_a_smaller_one(before: str, after: str | None, tmp_path: Path):
    keywords, text = keywords_of_changes({"workers": "3"}), f"loader = {before}\n"
    (tmp_path / "train.py").write_text(text)
    patch = patch_of("train.py", text, keywords)
    if after is not None:
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert (tmp_path / "train.py").read_text() == (f"loader = {after}\n" if after else text)
    assert not leaves_calls(text, keywords)


@pytest.mark.parametrize(
    "call",
    [
        "DataLoader(x, num_workers=arguments.workers)",
        "DataLoader(x, **options)",
        "DataLoader(*arguments)",
        "DataLoader(x, 4, True, None, None, 2)",  # a keyword as well would be an error when the script runs
    ],
)
def test_a_call_whose_value_only_the_script_knows_stays_and_is_told(call: str):
    keywords = keywords_of_changes({"workers": "3"})
    assert patch_of("train.py", f"loader = {call}\n", keywords) == ""
    assert leaves_calls(f"loader = {call}\nother = DataLoader(y)\n", keywords)
    assert not leaves_calls("other = DataLoader(y)\n", keywords)


def test_a_script_without_a_last_newline_is_patched(tmp_path: Path):
    text = "import torch\noptimizer = torch.optim.AdamW(p)"
    (tmp_path / "train.py").write_text(text)
    patch = patch_of("train.py", text, keywords_of_changes({"adamw": "fused"}))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert (tmp_path / "train.py").read_text() == "import torch\noptimizer = torch.optim.AdamW(p, fused=True)"
