"""How far runs of one script lie apart, and what their steps alone would say of that.

    python results/cpu/equal_runs.py run results/cpu/equal_runs.csv 10     # ten runs of one script; about a minute
    python results/cpu/equal_runs.py table results/cpu/equal_runs.csv

The file has the time of each step in seconds, as `trainstep run` recorded it. Each pair of runs is compared by its steps, as two
cells of one process a side are: as all runs are equal, each verdict is wrong.
"""

import csv
import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from trainstep.records.compare import compare_samples
from trainstep.records.record import Samples
from trainstep.records.store import Store

SCRIPT = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(600):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(file: Path, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder, file.open("x", newline="") as out:
        script, records = Path(folder, "train.py"), Path(folder, "run.jsonl")
        script.write_text(SCRIPT)
        command = ["-m", "trainstep", "run", "--quiet", "--no-page", "--out", str(records), str(script)]
        for _ in range(count):
            subprocess.run([sys.executable, *command], check=True)
        writer = csv.writer(out)
        writer.writerow(("run", "step_s"))
        for record in Store(records).read():
            name = record.config["run"]
            writer.writerows((name, step_s) for step_s in record.samples["step"].values)


def table(file: Path) -> str:
    steps: dict[str, list[float]] = {}
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            steps.setdefault(row["run"], []).append(float(row["step_s"]))
    medians = [statistics.median(of_run) for of_run in steps.values()]
    found = [
        compare_samples(*(Samples(unit="s", values=tuple(each)) for each in pair)).verdict
        for pair in itertools.combinations(steps.values(), 2)
    ]
    different = sum(verdict in ("faster", "slower") for verdict in found)
    return (
        f"{len(steps)} runs; medians of {1e3 * min(medians):.3f} to {1e3 * max(medians):.3f} ms. By their steps {different} of "
        f"{len(found)} pairs are called faster or slower."
    )


if __name__ == "__main__":
    verb, path, *words = sys.argv[1:]
    if verb == "run":
        run(Path(path), int(words[0]))
    print(table(Path(path)))
