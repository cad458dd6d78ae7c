"""How often `trainstep gate` fails a version that is the same, and how often it finds a true 3 %.

    python results/cpu/gates.py run 20 results/cpu/gates.jsonl     # 20 of each kind; goes on where an earlier call stopped
    python results/cpu/gates.py table results/cpu/gates.jsonl

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

from trainstep.records.gate_file import GateFile, blocks_of

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


def one_gate(kind: str, measure: str, minutes: float) -> dict[str, object]:
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
        **{name: found[name] for name in ("used_s", "looks", "budget_s", "threshold", "measure", "environment")},
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


def entries(path: Path) -> list[dict[str, object]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    runs = parts.add_parser("run")
    runs.add_argument("count", type=int)
    runs.add_argument("out", type=Path)
    runs.add_argument("--measure", choices=("cpu", "wall"), default="cpu")
    runs.add_argument("--minutes", type=float, default=2.9)
    parts.add_parser("table").add_argument("out", type=Path)
    asked = parser.parse_args()
    if asked.what == "run":
        run(asked.count, asked.out, asked.measure, asked.minutes)
    elif not asked.out.is_file():
        parser.error(f"out: there is no file {asked.out}")
    else:
        table(asked.out)


if __name__ == "__main__":
    main()
