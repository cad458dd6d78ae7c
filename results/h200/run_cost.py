"""What `trainstep run` costs a script's step: the same loop with it and without it, in processes that alternate.

    python results/h200/run_cost.py pairs 10 runs/run_cost_gpu.csv --device cuda    # one GPU; about 80 s a pair of 10 ms steps
    python results/h200/run_cost.py pairs 10 runs/run_cost_cpu.csv --device cpu     # about 80 s a pair; OMP_NUM_THREADS is set
    python results/h200/run_cost.py turns 100 runs/run_cost_turns.csv --device cpu  # one process, a new file; about 90 s
    python results/h200/run_cost.py table runs/run_cost_cpu.csv

The loop trains a small GPT of tests/planted/loops in eager mode, with a DataLoader and fused AdamW, and takes about 10 ms a step
(`--layers` changes that; the table says how long it is). On a GPU the host is its limit, in bf16 autocast, so that the host's time
for hooks is not hidden. A pair is a process of each kind; every other pair begins with the other kind. An existing file is
continued by further pairs.

A window is ten steps, with the GPU synchronised at its end; three steps before the first window are left out. The file has, for
each window, seconds by the wall clock and processor seconds of the process, which other processes disturb less. `between` is the
median window of a process, a tenth of it: few windows have an inspected step. `all` is the mean of all steps, with inspected
steps, the reading of their traces, and records. An inspection is due when all of them have taken one per cent of the time, so a
run of some seconds pays more than one per cent for its first one: `watching` is the time that trainstep itself says it took.
`process` is the whole process, with its start and end. Losses must be equal to the bit.

Processes differ from each other by more than hooks cost, 20 % and more on a shared CPU. So `turns` trains in one process, in
turns with and without `trainstep.watch(inspect_every=0)`, which has the same hooks; a turn is three steps that do not count and
two windows. Hooks cost the same number of microseconds whatever the model does, so short steps (`--layers 1`) tell it best: the
column `added` is the ratio's excess in terms of the plain step. What inspections and records take comes on top, by the account
of `pairs`.

The aim: at most 1 % of a 10 ms step on a GPU, and 3 % on a CPU, both `between` and `all`.
"""

import argparse
import csv
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from trainstep import watch
from trainstep.records.compare import compare_samples
from trainstep.records.record import Samples as Times
from trainstep.records.store import Store

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "planted" / "loops"))
from model import GPT, Sizes  # noqa: E402
from plants import Samples, optimizer  # noqa: E402

PLAIN, WATCHED = "plain", "trainstep run"
WARMUPS, WINDOW = 3, 10
SIZES = {
    "cpu": Sizes(layers=3, width=128, heads=4, context=64, batch=2, vocabulary=512),
    "cuda": Sizes(layers=8, width=512, heads=8, context=256, batch=8, vocabulary=8192),
}
AIMS = {"cpu": 0.03, "cuda": 0.01}
Row = tuple[int, str, str, str]
"""Pair, variant, quantity, value. Pair 0 describes the measurement."""
HEADER = ("pair", "variant", "quantity", "value")


class Loop:
    """The loop that is trained. It knows nothing of trainstep."""

    def __init__(self, device: str, layers: int) -> None:
        torch.manual_seed(0)
        if device == "cpu":
            torch.set_num_threads(1)
        else:  # atomic sums would change losses from process to process
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        sizes, none = SIZES[device], frozenset[str]()
        sizes = Sizes(**{**vars(sizes), "layers": layers})
        self.device, self.losses = device, list[torch.Tensor]()
        self._model = GPT(sizes, none, device).to(device)
        self._updates = optimizer(self._model.parameters(), none)
        samples = Samples(none, context=sizes.context, vocabulary=sizes.vocabulary, features=0, batch=sizes.batch)
        self._batches = iter(torch.utils.data.DataLoader(samples, batch_size=sizes.batch))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = {name: tensor.to(self.device) for name, tensor in next(self._batches).items()}
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                loss = self._model(**batch)
            loss.backward()
            self._updates.step()
            self._updates.zero_grad()
            self.losses.append(loss.detach())

    def window(self) -> tuple[float, float]:
        """Seconds of the next ten steps by the wall clock, and of the processor."""
        began = time.perf_counter(), time.process_time()
        self.train(WINDOW)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began[0], time.process_time() - began[1]


def loop(device: str, steps: int, layers: int, out: Path) -> None:
    """Train, and write windows and losses as JSON."""
    trained = Loop(device, layers)
    trained.train(WARMUPS)
    windows = [trained.window() for _ in range(steps // WINDOW)]
    out.write_text(json.dumps({"windows": windows, "losses": torch.stack(trained.losses).tolist()}))


def turns(count: int, device: str, layers: int) -> list[Row]:
    """The rows of turns with and without a watch in one process."""
    trained = Loop(device, layers)
    trained.train(20 * WARMUPS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1, count + 1):
            for variant in (PLAIN, WATCHED) if turn % 2 else (WATCHED, PLAIN):
                watching = watch(inspect_every=0, quiet=True, page=False, out=Path(folder, "records.jsonl"))
                with watching if variant == WATCHED else nullcontext():
                    trained.train(WARMUPS)
                    for wall_s, cpu_s in (trained.window(), trained.window()):
                        rows.append((turn, variant, "window", f"{wall_s:.9g}"))
                        rows.append((turn, variant, "window_cpu", f"{cpu_s:.9g}"))
    return rows


def measured(pair: int, variant: str, words: Sequence[str]) -> list[Row]:
    """The rows of one process."""
    with tempfile.TemporaryDirectory() as folder:
        found, records = Path(folder, "found.json"), Path(folder, "records.jsonl")
        watching = ["-m", "trainstep", "run", "--quiet", "--no-page", "--out", str(records)]
        command = [sys.executable, *(watching if variant == WATCHED else []), str(Path(__file__).resolve())]
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        began_s = time.perf_counter()
        done = subprocess.run([*command, "loop", str(found), *words], env=environ, capture_output=True, text=True)
        process_s = time.perf_counter() - began_s
        if done.returncode or not found.exists() or (variant == WATCHED and not records.exists()):
            raise SystemExit(f"{variant}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        seen = json.loads(found.read_text())
        digest = hashlib.sha256(json.dumps(seen["losses"]).encode()).hexdigest()[:16]
        rows = [(pair, variant, "process", f"{process_s:.9g}"), (pair, variant, "losses", digest)]
        for wall_s, cpu_s in seen["windows"]:
            rows += [(pair, variant, "window", f"{wall_s:.9g}"), (pair, variant, "window_cpu", f"{cpu_s:.9g}")]
        if variant == WATCHED:
            read = Store(records).read()
            inspected = sum(record.fact("inspected_step") is not None for record in read)
            watching_s = sum(record.fact("watching_s") or 0.0 for record in read)
            rows += [(pair, variant, "inspected", str(inspected)), (pair, variant, "watching", f"{watching_s:.9g}")]
        return rows


def run(pairs: int, file: Path, device: str, steps: int, layers: int) -> list[Row]:
    """Append pairs to the file, and return all its rows."""
    described = description(device, layers, steps=str(steps))
    rows = read_rows(file) if file.exists() else []
    if rows and rows[: len(described)] != described:
        raise SystemExit(f"file: {file} is of another measurement: {rows[: len(described)]}; name a new one")
    last = max((row[0] for row in rows), default=0)
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened)
        if not rows:
            rows = described
            writer.writerows([HEADER, *described])
        for pair in range(last + 1, last + 1 + pairs):
            both = []
            for variant in (PLAIN, WATCHED) if pair % 2 else (WATCHED, PLAIN):
                both += measured(pair, variant, ["--device", device, "--steps", str(steps), "--layers", str(layers)])
            writer.writerows(both)  # a pair at a time, so that one that is cut off leaves nothing
            opened.flush()
            rows += both
            print(f"pair {pair}: {told(rows, [pair])}", file=sys.stderr, flush=True)
    return rows


def description(device: str, layers: int, **more: str) -> list[Row]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    about = {"device": device, "name": name, "torch": torch.__version__, **more, "layers": str(layers)}
    return [(0, "", quantity, value) for quantity, value in about.items()]


def read_rows(file: Path) -> list[Row]:
    with file.open(newline="") as opened:
        header, *lines = list(csv.reader(opened)) or [[]]
    if tuple(header) != HEADER or any(len(line) != len(HEADER) for line in lines):
        raise SystemExit(f"file: {file} was not written by this script, or its last line is cut off")
    return [(int(pair), variant, quantity, value) for pair, variant, quantity, value in lines]


def values(rows: Sequence[Row], quantity: str, variant: str, pair: int) -> list[float]:
    return [float(row[3]) for row in rows if row[:3] == (pair, variant, quantity)]


def step_s(rows: Sequence[Row], what: str, variant: str, pair: int) -> float:
    """Seconds of a step of one process (of the process itself, for `process`)."""
    quantity, _, how = what.partition(" ")
    of_process = values(rows, quantity, variant, pair)
    return (
        of_process[0] if not how else (statistics.median if how == "between" else statistics.fmean)(of_process) / WINDOW
    )


def told(rows: Sequence[Row], pairs: Sequence[int]) -> str:
    """The ratios in a line, for a reader who waits."""
    ratios = [
        f"{what} {statistics.median(step_s(rows, what, WATCHED, pair) / step_s(rows, what, PLAIN, pair) for pair in pairs):.4f}"
        for what in ("window between", "window all", "window_cpu between", "window_cpu all")
    ]
    return ", ".join(ratios)


def table(rows: Sequence[Row]) -> str:
    """Medians over processes, and the ratio of pairs with its 99 % interval."""
    about = {quantity: value for pair, _, quantity, value in rows if pair == 0}
    pairs = sorted({row[0] for row in rows} - {0})
    if not pairs:
        raise SystemExit("file: it has no pair yet")
    aim = AIMS[about["device"]]
    words = {
        "window between": "step between inspections, wall clock",
        "window all": "mean of all steps, wall clock",
        "window_cpu between": "step between inspections, processor time",
        "window_cpu all": "mean of all steps, processor time",
        "process": "whole process, wall clock",
    }
    unit = {what: (1.0, "s") if what == "process" else (1e3, "ms") for what in words}
    lines = [
        "| time | plain | with trainstep run | ratio, 99 % interval | added | pairs |",
        "|---|---|---|---|---|---|",
    ]
    for what, meaning in words.items():
        if "steps" not in about and not what.endswith(" between"):  # turns
            continue
        plain, watched = ([step_s(rows, what, variant, pair) for pair in pairs] for variant in (PLAIN, WATCHED))
        found = compare_samples(*(Times(unit="s", values=tuple(each)) for each in (plain, watched)))
        interval = "too few pairs" if found.low is None else f"{found.low:.4f} to {found.high:.4f}"
        scale, name = unit[what]
        plain_s = scale * statistics.median(plain)
        added = " to ".join(f"{plain_s * (each - 1):+.3f}" for each in (found.low, found.high) if each is not None)
        cells = [f"{scale * statistics.median(each):.3f} {name}" for each in (plain, watched)]
        lines.append(
            f"| {meaning} | {cells[0]} | {cells[1]} | {found.ratio:.4f} ({interval}) | {added or '–'} {name} | {found.n} |"
        )
    if "steps" not in about:
        return "\n".join(
            [*lines, "", f"{about['name']}, torch {about['torch']}, in one process; the aim is at most {1 + aim:.2f}."]
        )
    digests = {variant: {row[3] for row in rows if row[1:3] == (variant, "losses")} for variant in (PLAIN, WATCHED)}
    if digests[PLAIN] == digests[WATCHED] and len(digests[PLAIN]) == 1:
        losses = "Losses of all processes are equal to the bit."
    else:
        losses = f"LOSSES DIFFER: {len(digests[PLAIN])} kinds of plain processes, {len(digests[WATCHED])} with trainstep run."
    inspected = [values(rows, "inspected", WATCHED, pair)[0] for pair in pairs]
    watching = [
        values(rows, "watching", WATCHED, pair)[0] / sum(values(rows, "window", WATCHED, pair)) for pair in pairs
    ]
    lines += [
        "",
        f"{about['name']}, torch {about['torch']}, {about['steps']} steps a process; the aim is at most {1 + aim:.2f}. {losses}",
        f"Inspected steps of a process: {statistics.median(inspected):g}; inspections and records took "
        f"{statistics.median(watching):.2%} of the time by trainstep's own account.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("pairs", help="measure pairs of processes, and print the table")
    running.add_argument("pairs", type=int)
    turning = verbs.add_parser("turns", help="measure turns in one process, and print the table")
    turning.add_argument("turns", type=int)
    looping = verbs.add_parser("loop", help="the loop alone, as the processes run it")
    tabling = verbs.add_parser("table", help="print the table of a file")
    for verb in (running, turning, looping, tabling):
        verb.add_argument("file", type=Path)
    for verb in (running, turning, looping):
        verb.add_argument("--device", choices=sorted(SIZES), default="cpu")
        if verb is not turning:
            verb.add_argument("--steps", type=int, default=3000, help="steps of a process, a multiple of ten")
        verb.add_argument("--layers", type=int, help="of the model, for a step of about 10 ms on your machine")
    asked = parser.parse_args()
    if asked.verb == "table":
        if not asked.file.is_file():
            parser.error(f"file: there is no {asked.file}")
        print(table(read_rows(asked.file)))
        return
    asked.layers = SIZES[asked.device].layers if asked.layers is None else asked.layers
    if (why := refused(asked)) is not None:
        parser.error(why)
    if asked.verb == "loop":
        loop(asked.device, asked.steps, asked.layers, asked.file)
    elif asked.verb == "turns":
        rows = [*description(asked.device, asked.layers), *turns(asked.turns, asked.device, asked.layers)]
        with asked.file.open("x", newline="") as opened:
            csv.writer(opened).writerows([HEADER, *rows])
        print(table(rows))
    else:
        print(table(run(asked.pairs, asked.file, asked.device, asked.steps, asked.layers)))


def refused(asked: argparse.Namespace) -> str | None:
    """Why the arguments of a measurement are refused."""
    steps = getattr(asked, "steps", 2 * WINDOW)
    if steps < 2 * WINDOW or steps % WINDOW or asked.layers < 1:
        return f"steps must be a multiple of {WINDOW} and at least {2 * WINDOW}, and layers at least 1"
    if asked.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs a CUDA GPU"
    count = getattr(asked, asked.verb, 1)
    if count < 1:
        return f"{asked.verb} must be at least 1 (at least 5 for an interval), not {count}"
    if not asked.file.parent.is_dir():
        return f"file: there is no folder {asked.file.parent}"
    if asked.verb == "turns" and asked.file.exists():
        return f"file: {asked.file} exists; turns are not continued, name a new one"
    return None


if __name__ == "__main__":
    main()
