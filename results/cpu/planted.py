"""Planted slowdowns: does `trainstep explain` name what was planted in somebody's loop, and does undoing it gain what it says?

    python results/cpu/planted.py run --rounds 3 --out results/cpu/planted.ndjson         # resumable; an hour on two cores
    python results/cpu/planted.py run --device cuda --out results/h200/planted.ndjson     # the same on a GPU, all of them
    python results/cpu/planted.py table results/cpu/planted.ndjson > results/cpu/planted.md

A case is a loop of tests/planted/loops (by hand, Hugging Face's Trainer, Lightning) with one slowdown, or two (twelve
pairs are drawn with a seed), or none. It runs under `trainstep run`, and `trainstep explain --json` reads the records. Clean and
planted runs are alternate: the measured gain of a case is 1 - clean / planted, where clean is the mean of the last clean
runs before and after it; with `--clean-every 3` there is a clean run after each third planted one, and one run stands for
both sides of the others. `--rounds 3` runs each planted case three times: its gains are the medians of the rounds, its ranks
the worst. Times are a run's mean step as explain takes it, less the time in which a thread waited for a core that others had
(`net`), because CPUs are seldom left alone; of `second_process`, which is such a wait, they are whole. For the same reason an
excess `another_process` that nobody planted is left out of the ranks; the table has what others used.
A line of the file is a case, with the raw numbers of each round and the command.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainstep.measure.machine.environment import others_share
from trainstep.records.store import Store

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "tests" / "planted" / "loops"
sys.path.insert(0, str(LOOPS))
from plants import PLANTS  # noqa: E402

NEEDED = {"nano": (), "hugging_face": ("transformers", "accelerate"), "lightning_loop": ("lightning",)}
"""Loop -> packages without which it does not run."""
_PAIRS, _SEED = 12, 20261125
_INSPECT_EVERY = 12
_QUIET, _PATIENCE_S = 0.3, 10.0
_POINTS = 0.03


class Case(NamedTuple):
    """One loop with what is planted in it."""

    loop: str
    plants: tuple[str, ...]
    device: str

    @property
    def ranks(self) -> int:
        return max((PLANTS[name].ranks for name in self.plants), default=1)

    @property
    def accumulates(self) -> bool:
        return "accumulation_sync" in self.plants

    @property
    def key(self) -> str:
        return f"{self.loop} {self.device} {'+'.join(self.plants) or 'clean'}"


def applies(name: str, device: str, gpus: int) -> bool:
    """Whether the slowdown costs anything on this machine."""
    plant = PLANTS[name]
    return (device == "cpu" and not plant.gpu) or (device == "cuda" and gpus >= plant.ranks)


def cases(device: str, gpus: int = 1) -> list[Case]:
    """The clean loops, every slowdown in each loop, and the drawn pairs."""
    names = [name for name in PLANTS if applies(name, device, gpus)]
    found = [Case(loop, plants, device) for loop in NEEDED for plants in [(), *((name,) for name in names)]]
    every = [Case(loop, pair, device) for loop in NEEDED for pair in itertools.combinations(names, 2)]
    return found + random.Random(_SEED).sample(every, min(_PAIRS, len(every)))


def command(case: Case, plants: Sequence[str], steps: int, out: Path) -> list[str]:
    """The command of one run."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m"]
    words = [sys.executable, "-m", *(torchrun if case.ranks > 1 else []), "trainstep", "run", "--quiet", "--no-page"]
    words += ["--inspect-every", str(_INSPECT_EVERY), "--out", str(out), str(LOOPS / f"{case.loop}.py")]
    words += ["--steps", str(steps), "--device", case.device]
    words += ["--plant", ",".join(plants)] if plants else []
    return [*words, *(["--accumulate"] if case.accumulates else [])]


def measured(case: Case, plants: Sequence[str], steps: int, folder: Path, turn: int) -> dict[str, Any]:
    """Run it, and explain it. `turn`: the round, 0 for the clean run before the first; the first has the name without a number."""
    what = "+".join(plants) or f"clean-for-{case.key}"
    number = "" if turn == 1 or not case.plants else f"-{turn}"
    name = f"{case.loop}-{case.device}-{case.ranks}-{what}{number}.jsonl"
    out = folder / name.replace(" ", "-")
    words = command(case, plants, steps, out)
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, "TOKENIZERS_PARALLELISM": "false"}
    done = None
    if not out.exists():
        _wait_for_quiet()
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
    if not out.exists() or (done is not None and done.returncode != 0):
        out.unlink(missing_ok=True)
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-2000:] if done else ''}")
    records = Store(out).read()
    explained = [sys.executable, "-m", "trainstep", "explain", str(out), "--json"]
    shown = subprocess.run(explained, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if shown.returncode != 0:
        raise RuntimeError(f"{' '.join(explained)}\n{shown.stderr[-2000:]}")
    budget = json.loads(shown.stdout)["rows"]
    rows = [row for row in budget if row["kind"] == "finding"]
    timed = [record for record in records if "step" in record.samples and record.samples["step"].values]
    [step_s] = [row["time_s"] for row in budget if row["kind"] == "measured"]
    timed = [record for record in timed if not record.samples["step"].warmups] or timed  # without the script's start
    whole_s = sum(record.duration_s for record in timed)
    others = sum((record.fact("others_cpu_share") or 0.0) * record.duration_s for record in timed) / whole_s
    waited = sum(record.fact("core_wait_s") or 0.0 for record in timed) / whole_s
    net_s = step_s * (1 - min(waited, others))
    seen = {"step_s": step_s, "net_s": net_s, "findings": rows, "others_cpu_share": others}
    return {**seen, "command": " ".join(words[1:])}


def _wait_for_quiet() -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while (others_share() or 0.0) > _QUIET and time.monotonic() < until_s:
        time.sleep(1.0)


def run(
    device: str, out: Path, steps: int, only: Sequence[str], records: Path | None, clean_every: int, rounds: int
) -> None:
    """Run the cases that the file lacks, a clean run before and after each planted one."""
    done = {line["case"] for line in _lines(out)} if out.exists() else set()
    gpus = 0
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    clean: dict[tuple[str, int, bool], dict[str, Any]] = {}
    used: dict[tuple[str, int, bool], int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = records or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in cases(device, gpus):
            missing = [package for package in NEEDED[case.loop] if importlib.util.find_spec(package) is None]
            if case.key in done or missing or (only and not any(word in case.key for word in only)):
                continue
            kind = case.loop, case.ranks, case.accumulates
            found = []
            try:
                after = clean.get(kind) or measured(case, (), steps, folder, 0)
                for turn in range(1, 1 + (rounds if case.plants else 1)):
                    before = after
                    planted = measured(case, case.plants, steps, folder, turn) if case.plants else before
                    used[kind] = used.get(kind, 0) + bool(case.plants)
                    if case.plants and used[kind] % clean_every == 0:
                        after = measured(case, (), steps, folder, turn)
                    found.append(_round(case, planted, [before, after]))
                clean[kind] = after
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"{case.key}: {error}", file=sys.stderr, flush=True)
                continue
            line = _line(case, found)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{case.key}: {line['ranks_of_planted']} {line['first']}", file=sys.stderr, flush=True)


def _round(case: Case, planted: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A planted run beside the clean ones around it."""
    is_wait = "second_process" in case.plants
    time = "step_s" if is_wait else "net_s"
    findings = [row for row in planted["findings"] if is_wait or row["cause"] != "another_process"]
    causes = [row["cause"] for row in findings]
    ranks = []
    gain_s = 0.0
    for name in case.plants:
        places = [index for index, cause in enumerate(causes) if cause in PLANTS[name].causes]
        ranks.append(places[0] + 1 if places else None)
        gain_s += findings[places[0]]["gain_s"] or 0.0 if places else 0.0
    takes_s, clean_s = planted[time], [one[time] for one in clean]
    return {
        "ranks_of_planted": ranks,
        "first": causes[0] if causes else None,
        "first_share": round(findings[0]["time_s"] / takes_s, 4) if causes else 0.0,
        "findings": {row["cause"]: round(row["time_s"] / planted["step_s"], 4) for row in planted["findings"]},
        "predicted_gain": round(gain_s / takes_s, 4),
        "measured_gain": round(1 - statistics.fmean(clean_s) / takes_s, 4),
        "planted_s": round(planted["step_s"], 6),
        "planted_net_s": round(planted["net_s"], 6),
        "clean_s": [round(one["step_s"], 6) for one in clean],
        "clean_net_s": [round(one["net_s"], 6) for one in clean],
        "others_cpu_share": round(planted["others_cpu_share"], 3),
        "command": planted["command"].replace(str(ROOT) + "/", ""),
    }


def _line(case: Case, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A case: medians of its rounds, and what was first where the planted were furthest from it."""
    worst = max(rounds, key=lambda one: sorted((rank or math.inf for rank in one["ranks_of_planted"]), reverse=True))
    command = rounds[0]["command"]
    medians = {
        name: round(statistics.median(one[name] for one in rounds), 4)
        for name in ("predicted_gain", "measured_gain", "others_cpu_share")
    }
    return {
        "case": case.key,
        "loop": case.loop,
        "device": case.device,
        "plants": list(case.plants),
        **{name: worst[name] for name in ("ranks_of_planted", "first", "first_share")},
        **medians,
        "command": command,
        "rounds": [{name: value for name, value in one.items() if name != "command"} for one in rounds],
    }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text().splitlines():
        yield json.loads(text)


def table(path: Path) -> None:
    """Print Markdown: a row a case, then what the cases together say."""
    lines = list(_lines(path))
    print(
        "| loop | planted | rank | first of the excesses | its share | predicted gain | measured | off, points | others used |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        off = f"{100 * (line['predicted_gain'] - line['measured_gain']):+.1f}" if line["plants"] else ""
        cells = [
            line["loop"],
            ", ".join(line["plants"]) or "nothing",
            ", ".join(str(rank or "not found") for rank in line["ranks_of_planted"]),
            line["first"] or "none",
            f"{line['first_share']:.1%}",
            f"{line['predicted_gain']:.1%}" if line["plants"] else "",
            f"{line['measured_gain']:.1%}" if line["plants"] else "",
            off,
            f"{line['others_cpu_share']:.0%}",
        ]
        print("| " + " | ".join(cells) + " |")
    print()
    single = [line for line in lines if len(line["plants"]) == 1]
    pairs = [line for line in lines if len(line["plants"]) == 2]
    for loop in NEEDED:
        own = [line for line in single if line["loop"] == loop]
        print(f"- {loop}: first in {sum(line['ranks_of_planted'] == [1] for line in own)} of {len(own)} that apply.")
    both = sum(sorted(rank or 99 for rank in line["ranks_of_planted"]) == [1, 2] for line in pairs)
    print(f"- pairs: both among the first two in {both} of {len(pairs)}.")
    near = sum(abs(line["predicted_gain"] - line["measured_gain"]) <= _POINTS for line in single)
    print(f"- single slowdowns: predicted gain within 3 points of the measured in {near} of {len(single)}.")
    for line in lines:
        if not line["plants"]:
            first = f"{line['first']}, {line['first_share']:.1%} of the step" if line["first"] else "nothing"
            print(f"- clean {line['loop']}: first is {first}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="run the cases that the file lacks")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    running.add_argument("--steps", type=int, default=48)
    running.add_argument(
        "--records", type=Path, help="keep records there, and explain those that are there without a run"
    )
    running.add_argument("--clean-every", type=int, default=1, help="planted runs between two clean runs of a loop")
    running.add_argument("--rounds", type=int, default=1, help="times that each planted case runs")
    running.add_argument("--only", nargs="*", default=(), help="cases whose name has one of these words")
    tabling = verbs.add_parser("table", help="print the file as Markdown")
    tabling.add_argument("path", type=Path)
    asked = parser.parse_args()
    if asked.verb == "run" and min(asked.rounds, asked.clean_every) < 1:
        parser.error("rounds and clean-every must be at least 1")
    if asked.verb == "run":
        run(asked.device, asked.out, asked.steps, asked.only, asked.records, asked.clean_every, asked.rounds)
    else:
        table(asked.path)
