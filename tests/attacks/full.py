"""Run attacks at full size: `python tests/attacks/full.py [SUBJECT ...]` prints a table at the end.

    python tests/attacks/full.py                                  # hours: all subjects, as many cases as published
    python tests/attacks/full.py record_files --cases 100
    python tests/attacks/full.py record_files --only 17           # repeat one case

Each breach is printed when it happens. The exit code is 1 if there was one.
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
    options = _arguments()
    readers, torch_process = Readers(), TorchProcess()
    try:
        sums = [_attack(SUBJECTS[name](readers, torch_process), options) for name in options.subjects or SUBJECTS]
    finally:
        readers.close()
        torch_process.close()
    print(_table(sums))
    return int(any(count for subject_sums in sums for count in subject_sums.counts.values()))


def _attack(subject: Subject, options: argparse.Namespace) -> Sums:
    """Run the selected cases, and print each breach at once."""
    sums = Sums(subject.name)
    numbers = [options.only] if options.only is not None else range(options.cases or subject.full)
    for number, outcome in outcomes(subject, options.seed, numbers):
        sums.add(number, outcome)
        for breach in outcome.breaches:
            print(f"{subject.name} {number}: {breach}: {getattr(outcome, breach)}\n    {outcome.case}", flush=True)
        if options.only is not None and not outcome.breaches:
            print(f"{subject.name} {number}: no breach\n    {outcome.case}")
    return sums


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"by default all: {', '.join(SUBJECTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each subject; by default as many as are published")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case")
    options = parser.parse_args()
    if unknown := [name for name in options.subjects if name not in SUBJECTS]:
        parser.error(f"{unknown[0]} is no subject; known: {', '.join(SUBJECTS)}")
    return options


def _table(sums: list[Sums]) -> str:
    columns = ("subject", "cases", *_HEADINGS.values())
    rows = [
        (subject_sums.name, subject_sums.cases, *(subject_sums.counts[breach] for breach in BREACHES))
        for subject_sums in sums
    ]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
