"""Scripts that make it hard to find steps: each is recorded or a sentence says why not, and its exit code and output stay."""

from pathlib import Path

import pytest

from cell_maker import run_python
from trainstep.records.record import Record
from trainstep.records.store import Store

pytestmark = pytest.mark.slow

BEGIN = """
import argparse, os, sys, torch
from torch import nn
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, text: str, *words: str) -> tuple[int, str, str, list[Record]]:
    """The exit code, output and errors of a script under `trainstep run`, and its records."""
    (folder / "project").mkdir()
    (folder / "project" / "train.py").write_text(BEGIN + text)
    out = folder / "run.jsonl"
    run_words = ["-m", "trainstep", "run", "--no-page", "--out", str(out), "project/train.py"]
    done = run_python(folder, *run_words, *words)
    return done.returncode, done.stdout, done.stderr, Store(out).read() if out.exists() else []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model(torch.randn(4, 8))", "no optimizer made a step and no backward ran"),
        ("model(torch.randn(4, 8)).sum().backward()", "the update is written by hand, or compiled"),
        ("model(torch.randn(4, 8)); sys.exit(5)", "trainstep: the script ended before a step was seen (exit code 5): "),
        ("sys.exit('no data here')", "trainstep: the script ended before a step was seen (exit: no data here): "),
    ],
)
def test_a_script_that_never_steps_is_told_why_and_keeps_its_code(text: str, sentence: str, tmp_path: Path):
    code, _, errors, records = run(tmp_path, text)
    assert code == (5 if "exit(5)" in text else 1 if "exit" in text else 0)
    assert sentence in errors
    assert "Traceback" not in errors
    assert records == []


def test_a_crash_before_the_first_step_is_said_first(tmp_path: Path):
    code, _, errors, records = run(tmp_path, "model(torch.randn(4, 8)).sum().backward()\nraise KeyError('lost')\n")
    assert (code, records) == (1, [])
    assert errors.splitlines()[-1].startswith("trainstep: the script ended before a step was seen (KeyError: 'lost'): ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class Odd(Exception):\n    def __str__(self): raise ValueError('no')\nraise Odd\n", "Odd"),
        ("raise RuntimeError('\\n\\n-- Process 1 ended:\\nlost')", "RuntimeError: -- Process 1 ended"),
    ],
)
def test_any_error_of_the_script_is_named(text: str, words: str, tmp_path: Path):
    code, _, errors, _ = run(tmp_path, text)
    assert code == 1
    assert errors.splitlines()[-1].startswith(f"trainstep: the script ended before a step was seen ({words}): ")


def test_a_crash_in_the_middle_of_a_step_keeps_traceback_code_and_what_was_measured(tmp_path: Path):
    text = "for index in range(9):\n    step()\nmodel(torch.randn(4, 8)).sum().backward()\nraise KeyError('lost')\n"
    code, _, errors, records = run(tmp_path, text)
    assert code == 1
    assert "KeyError: 'lost'" in errors
    assert records[-1].fact("ending") == "KeyError: 'lost'"
    assert records[-1].fact("steps_seen") == 9


@pytest.mark.parametrize(("critic", "steps"), [(1, 8), (5, 8)])
def test_a_gan_is_a_step_an_update_of_the_rarer_network(critic: int, steps: int, tmp_path: Path):
    text = f"""
critic = nn.Linear(8, 1)
judges = torch.optim.Adam(critic.parameters())
for _ in range({steps}):
    for _ in range({critic}):
        critic(model(torch.randn(4, 8)).detach()).mean().backward()
        judges.step()
        judges.zero_grad()
    critic(model(torch.randn(4, 8))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    code, _, errors, records = run(tmp_path, text)
    assert code == 0, errors
    assert records[-1].fact("steps_seen") == steps + critic, "updates before the second network is known are steps"
    assert records[-1].fact("optimizers") == 2


def test_an_optimizer_a_layer_is_one_step(tmp_path: Path):
    text = """
layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in layers]
for _ in range(10):
    layers(torch.randn(4, 8)).square().mean().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
"""
    code, _, errors, records = run(tmp_path, text)
    assert code == 0, errors
    assert records[-1].fact("steps_seen") in (10, 11, 12)
    assert records[-1].fact("optimizers") == 3


def test_loaders_with_workers_need_nothing(tmp_path: Path):
    text = """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index): return torch.full((8,), float(index)), os.getpid()
def main():
    pids = set()
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context=context)
        for batch, made_by in loader:
            model(batch).square().mean().mul(1e-6).backward()
            optimizer.step()
            pids.update(made_by.tolist())
    print("others" if os.getpid() not in pids and len(pids) == 4 else pids)
if __name__ == "__main__":
    main()
"""
    code, out, errors, records = run(tmp_path, text)
    assert code == 0, errors
    assert out == "others\n"
    assert records[-1].fact("steps_seen") == 20
    assert sum(records[-1].samples["data_wait"].values) > 0


def test_arguments_are_the_scripts_and_records_stay_where_it_began(tmp_path: Path):
    text = """
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int)
asked = parser.parse_args()
os.makedirs("elsewhere")
os.chdir("elsewhere")
for _ in range(asked.steps):
    step()
print(asked.out, sys.argv[1:], os.path.basename(os.getcwd()))
sys.argv[:] = ["changed"]
"""
    code, out, errors, records = run(tmp_path, text, "--out", "mine.txt", "--steps", "8")
    assert code == 0, errors
    assert out == "mine.txt ['--out', 'mine.txt', '--steps', '8'] elsewhere\n"
    assert records[-1].fact("steps_seen") == 8
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_wrong_argument_of_the_script_is_its_own_error(tmp_path: Path):
    code, _, errors, records = run(tmp_path, "argparse.ArgumentParser().parse_args()", "--nothing")
    assert code == 2
    assert "unrecognized arguments: --nothing" in errors
    assert records == []
