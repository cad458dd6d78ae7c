"""How often `trainstep gate` fails a version that is the same, and how often it finds a true 3 %.

    python results/cpu/gates.py run 20 results/cpu/gates.ndjson     # 20 of each kind; goes on where an earlier call stopped
    python results/cpu/gates.py table results/cpu/gates.ndjson
    python results/cpu/gates.py resample results/cpu/gates.ndjson   # 2,000 gates each from the recorded blocks of equal versions

Each gate is a call of `trainstep gate` as a user types it: two commits of a small repository, checked out anew, at most three
minutes. The command multiplies small matrices in plain Python for about 0.1 s of processor time, of which starting Python is a
tenth. `same`: the commits differ in a comment. `slower`: head multiplies 352 times for 340, 3.5 % more, which with the start of
Python is about 3.1 % more time; the mean ratio over all blocks says how much it was. The kinds alternate, so that both see the same
machine.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from trainstep.records.gate_file import GateFile, blocks_of
from trainstep.records.sequential import VERDICTS, Block, judge

PROGRAM = """
n = 16
a = [[(i * 7 + j * 3) % 11 / 11 for j in range(n)] for i in range(n)]
for _ in range({count}):
    columns = list(zip(*a))
    b = [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]
# {remark}
"""
BASE_PRODUCTS = 340
KINDS = {"same": BASE_PRODUCTS, "slower": 352}
"""Kind -> number of products in head."""


def run(count: int, out: Path, measure: str, minutes: float) -> None:
    """Append gates until the file holds `count` of each kind."""
    done = [entry["kind"] for entry in entries(out)] if out.exists() else []
    for index in range(count):
        for kind in KINDS:
            if done.count(kind) > index:
                continue
            entry = one_gate(kind, measure, minutes)
            with open(out, "a") as file:
                file.write(json.dumps(entry) + "\n")
            print(f"{kind} {index + 1}/{count}: {entry['exit_code']} {entry['answer']}", flush=True)


def one_gate(kind: str, measure: str, minutes: float) -> dict[str, Any]:
    """One gate in a repository of its own, with the log ratio of each of its blocks, by processor time and by wall time."""
    with tempfile.TemporaryDirectory() as folder:
        git(folder, "init", "--quiet")
        commit(folder, BASE_PRODUCTS, "base")
        commit(folder, KINDS[kind], "head")
        options = ["--measure", measure, "--budget-minutes", str(minutes), "--out", "gate.jsonl", "--json"]
        command = [sys.executable, "-m", "trainstep", "gate", "HEAD~1", "HEAD", *options]
        done = subprocess.run(
            [*command, "--", sys.executable, "-I", "-S", "work.py"], cwd=folder, capture_output=True, text=True
        )
        found = json.loads(done.stdout)
        read = GateFile(Path(folder, "gate.jsonl")).read()
        assert read is not None
        _, runs, _ = read
    [cell] = found["cells"]
    return {
        "kind": kind,
        "exit_code": done.returncode,
        "verdict": found["verdict"],
        "answer": found["answer"][0]["verdict"],
        **{name: cell[name] for name in ("ratio", "low", "high", "blocks")},
        **{name: found[name] for name in ("used_s", "looks", "budget_s", "threshold", "measure")},
        "environment": {name: value for name, value in found["environment"].items() if name != "command"},
        "log_ratios": [round(next(iter(block.log_ratios.values())), 6) for block in blocks_of(runs)],
        "used_by_block_s": [round(block.used_s, 3) for block in blocks_of(runs)],
        "load": os.getloadavg(),
    }


def commit(folder: str, count: int, remark: str) -> None:
    Path(folder, "work.py").write_text(PROGRAM.format(count=count, remark=remark))
    git(folder, "add", ".")
    git(folder, "-c", "user.name=gates", "-c", "user.email=gates@localhost", "commit", "--quiet", "-m", remark)


def git(folder: str, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> None:
    """Markdown: how many gates, their verdicts, how long they took, and the mean ratio with its standard error."""
    print(
        "| kind | gates | pass | fail | cannot tell | minutes, median and most | mean ratio | its error | spread of a block |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        found = [entry for entry in entries(path) if entry["kind"] == kind]
        if not found:
            continue
        counts = [sum(entry["verdict"] == verdict for entry in found) for verdict in ("pass", "fail", "cannot tell")]
        minutes = [entry["used_s"] / 60 for entry in found]
        logs = [value for entry in found for value in entry["log_ratios"]]
        spread = statistics.stdev(logs)
        print(
            f"| {kind} | {len(found)} | {counts[0]} | {counts[1]} | {counts[2]} "
            f"| {statistics.median(minutes):.2f}, {max(minutes):.2f} | {math.exp(statistics.fmean(logs)):.4f} "
            f"| {spread / math.sqrt(len(logs)):.4f} | {spread:.3f} |"
        )


def resampled(
    path: Path, rounds: int, *, slower: float = 0.0, spread: float | None = None, seed: int = 0
) -> dict[str, int]:
    """Verdict -> how many of `rounds` gates made of the recorded blocks of equal versions have it.

    Stretches of four neighbouring blocks are drawn with replacement, so that what neighbours share stays. `slower`: added to each
    log ratio. `spread`: the standard deviation to which the ratios are scaled, with the shape of the noise; by default theirs.
    A gate has as many blocks as fit into its budget at the recorded speed.
    """
    gates = [entry for entry in entries(path) if entry["kind"] == "same"]
    stretches = [entry["log_ratios"][at : at + 4] for entry in gates for at in range(len(entry["log_ratios"]) - 3)]
    scale = (
        1.0 if spread is None else spread / float(np.std([value for entry in gates for value in entry["log_ratios"]]))
    )
    block_s = sum(entry["used_s"] for entry in gates) / sum(entry["blocks"] for entry in gates)
    budget_s = gates[0]["budget_s"]
    count = int(budget_s / block_s)
    draws = np.random.default_rng(seed)
    verdicts = []
    for _ in range(rounds):
        chosen = draws.integers(len(stretches), size=-(-count // 4))
        logs = np.concatenate([stretches[index] for index in chosen])[:count] * scale + slower
        blocks = [
            Block(log_ratios={"time": value}, used_s=block_s * number) for number, value in enumerate(logs.tolist(), 1)
        ]
        verdicts.append(judge(blocks, budget_s=budget_s, threshold=0.02, is_over=True).verdict)
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def resample(path: Path, rounds: int) -> None:
    """Markdown: verdicts of resampled gates, at the recorded noise and at noise of the same shape that is smaller."""
    print("| head is slower by | a block varies by | gates | pass | fail | cannot tell |")
    print("|---|---|---|---|---|---|")
    for spread in (None, 0.08, 0.06, 0.04, 0.02):
        for percent in (0, 3):
            found = resampled(path, rounds, slower=math.log(1 + percent / 100), spread=spread)
            noise = "as recorded" if spread is None else f"{spread:.0%}"
            print(f"| {percent} % | {noise} | {rounds} | {' | '.join(str(count) for count in found.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    runs = parts.add_parser("run")
    runs.add_argument("count", type=int)
    runs.add_argument("out", type=Path)
    runs.add_argument("--measure", choices=("cpu", "wall"), default="cpu")
    runs.add_argument("--minutes", type=float, default=2.9)
    parts.add_parser("table").add_argument("out", type=Path)
    again = parts.add_parser("resample")
    again.add_argument("out", type=Path)
    again.add_argument("--rounds", type=int, default=2000)
    asked = parser.parse_args()
    if asked.what == "run":
        run(asked.count, asked.out, asked.measure, asked.minutes)
    elif not asked.out.is_file():
        parser.error(f"out: there is no file {asked.out}")
    elif asked.what == "table":
        table(asked.out)
    else:
        resample(asked.out, asked.rounds)


if __name__ == "__main__":
    main()
