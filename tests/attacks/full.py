"""Every attack at full size: `python tests/attacks/full.py [SUBJECT ...]`, a table at the end.

    python tests/attacks/full.py                                  # hours: all subjects, as many cases as published
    python tests/attacks/full.py record_files --cases 100
    python tests/attacks/full.py record_files --only 17           # one case again

Each case of which something came that may not is printed as it comes. Exit code 1 if there was one.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from attacks.attack import BREACHES, Subject, Sums, outcomes
from attacks.checkpoints import Checkpoints
from attacks.command_lines import CommandLines
from attacks.pickles import Pickles
from attacks.rank_kills import RankKills
from attacks.reader import Readers
from attacks.record_files import RecordFiles
from attacks.sweep_files import SweepFiles
from attacks.torch_process import TorchProcess
from attacks.trace_files import TraceFiles
from attacks.verb_kills import COMMANDS, VerbKills

SUBJECTS: dict[str, Callable[[Readers, TorchProcess], Subject]] = {
    CommandLines.name: lambda readers, _: CommandLines(readers),
    SweepFiles.name: lambda readers, _: SweepFiles(readers),
    RecordFiles.name: lambda readers, _: RecordFiles(readers),
    TraceFiles.name: lambda readers, _: TraceFiles(readers),
    Pickles.name: lambda readers, _: Pickles(readers),
    RankKills.name: lambda _, torch_process: RankKills(torch_process),
    Checkpoints.name: lambda _, torch_process: Checkpoints(torch_process),
    **{f"kills_{verb}": lambda *_, verb=verb: VerbKills(verb) for verb in COMMANDS},
}
_HEADINGS = {
    "traceback": "tracebacks",
    "lost": "files lost",
    "left": "processes left",
    "folders": "folders left",
    "memory": "over 2 GB",
    "time": "over 60 s",
    "other": "other",
}


def main() -> int:
    asked = _arguments()
    readers, torch_process = Readers(), TorchProcess()
    try:
        sums = [_attack(SUBJECTS[name](readers, torch_process), asked) for name in asked.subjects or SUBJECTS]
    finally:
        readers.close()
        torch_process.close()
    print(_table(sums))
    return int(any(count for one in sums for count in one.counts.values()))


def _attack(subject: Subject, asked: argparse.Namespace) -> Sums:
    """Every case asked for; each breach is printed at once."""
    sums = Sums(subject.name)
    numbers = [asked.only] if asked.only is not None else range(asked.cases or subject.full)
    for number, outcome in outcomes(subject, asked.seed, numbers):
        sums.add(number, outcome)
        for breach in outcome.breaches:
            print(f"{subject.name} {number}: {breach}: {getattr(outcome, breach)}\n    {outcome.case}", flush=True)
        if asked.only is not None and not outcome.breaches:
            print(f"{subject.name} {number}: nothing came of it\n    {outcome.case}")
    return sums


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"by default all: {', '.join(SUBJECTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each subject; by default as many as are published")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case")
    asked = parser.parse_args()
    if unknown := [name for name in asked.subjects if name not in SUBJECTS]:
        parser.error(f"{unknown[0]} is no subject; known: {', '.join(SUBJECTS)}")
    return asked


def _table(sums: list[Sums]) -> str:
    columns = ("subject", "cases", *_HEADINGS.values())
    rows = [(one.name, one.cases, *(one.counts[breach] for breach in BREACHES)) for one in sums]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
