"""How often `bench --compare` calls two variants different that are the same, and how often it finds a true 5 %.

    python results/cpu/same_against_same.py run 200 runs/same.jsonl      # goes on where an earlier call stopped
    python results/cpu/same_against_same.py run 50 runs/same.jsonl --kind slower
    python results/cpu/same_against_same.py table runs/same.jsonl

Each comparison is a call of `trainstep bench` as a user types it, with a driver, a server and processes of its own; its two records
are appended to the file. `same`: two learning rates that differ in the fifth digit, so that both do the same work. `slower`: the
second has 17 sequences in a batch for 16, that is 6.25 % more tokens and FLOPs, and about 5 % more time, because the optimizer and
the host's part of each op do not grow with the batch. The mean ratio says how much more time it was.

`--device cuda` takes a size for a GPU and captures the step, since an eager step of that size varies with the host by 10 % from
process to process. `--processes 6` takes half of the time of twelve. With two GPUs run it twice at the same time, each with one
GPU in CUDA_VISIBLE_DEVICES and a file of its own, and join the files. Run it on a machine that does nothing else, and say so
beside the numbers.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainstep.records.compare import Comparison, compare_records
from trainstep.records.record import Record
from trainstep.records.store import Store

KINDS = {
    "same": ("learning_rate", "0.0003,0.00030001"),
    "slower": ("batch_size", "16,17"),
}
OPTIONS = {
    "cpu": ("--model", "tiny", "--context", "64"),
    "cuda": ("--model", "small", "--context", "256", "--capture", "step", "--adamw", "trainstep"),
}


def run(count: int, out: Path, kind: str, device: str, extra: list[str]) -> None:
    """Append comparisons until the file holds `count` of this kind."""
    field, values = KINDS[kind]
    done = sum(found == kind for found, _, _ in pairs(out)) if out.exists() else 0
    for index in range(done, count):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "pair.jsonl")
            options = [*OPTIONS[device], "--device", device, "--compare", field, f"--{field.replace('_', '-')}", values]
            command = [sys.executable, "-m", "trainstep", "bench", *options, *extra, "--out", str(part)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            lines = part.read_text()
        with open(out, "a") as file:  # both records at once: a call that is killed leaves no half pair
            file.write(lines)
        _, _, comparison = list(pairs(out))[-1]
        print(f"{kind} {index + 1}/{count}: {comparison.verdict}, {comparison.reason}", flush=True)


def pairs(path: Path) -> Iterator[tuple[str, Record, Comparison]]:
    """(kind, first record, comparison) of each pair in the file, in its order."""
    records = list(Store(path).finished())
    for a, b in zip(records[::2], records[1::2], strict=True):
        differs = {name for name, value in a.config.items() if b.config[name] != value}
        [kind] = [name for name, (field, _) in KINDS.items() if field in differs]
        yield kind, a, compare_records(a, b)


def table(path: Path) -> None:
    """Markdown: how many comparisons, their verdicts, the mean ratio and its standard error."""
    print("| kind | device | comparisons | faster | slower | cannot tell | mean ratio | its error | processes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        found = [(a, comparison) for its_kind, a, comparison in pairs(path) if its_kind == kind]
        for device in dict.fromkeys(a.config["device"] for a, _ in found):
            own = [comparison for a, comparison in found if a.config["device"] == device]
            logs = [math.log(comparison.ratio) for comparison in own if comparison.ratio is not None]
            error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
            counts = [sum(comparison.verdict == verdict for comparison in own) for verdict in ("faster", "slower")]
            processes = "-".join(str(n) for n in sorted({min(c.n for c in own), max(c.n for c in own)}))
            print(
                f"| {kind} | {device} | {len(own)} | {counts[0]} | {counts[1]} | {len(own) - sum(counts)} "
                f"| {math.exp(statistics.fmean(logs)):.4f} | {error:.4f} | {processes} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    runs = parts.add_parser("run")
    runs.add_argument("count", type=int)
    runs.add_argument("out", type=Path)
    runs.add_argument("--kind", choices=KINDS, default="same")
    runs.add_argument("--device", choices=OPTIONS, default="cpu")
    runs.add_argument("--steps", type=int)
    runs.add_argument("--processes", type=int)
    parts.add_parser("table").add_argument("out", type=Path)
    asked = parser.parse_args()
    if asked.what == "run":
        given = {"--steps": asked.steps, "--processes": asked.processes}
        extra = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        run(asked.count, asked.out, asked.kind, asked.device, extra)
    elif not asked.out.is_file():
        parser.error(f"out: there is no file {asked.out}")
    else:
        table(asked.out)


if __name__ == "__main__":
    main()
