"""`trainstep gate`: may a change land? Two versions run alternately until their difference is decided, or the time is over."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trainstep.cli.options import check_positive
from trainstep.cli.streams import outliving_reader
from trainstep.measure.gate.checkouts import Source, find_source
from trainstep.measure.gate.session import Outcome, run_gate
from trainstep.measure.machine.environment import environment, installed_packages
from trainstep.records.benchmark_json import Benchmarks, read_benchmarks, write_benchmarks
from trainstep.records.gate_file import HEAD, GateFile, Plan
from trainstep.records.sequential import MINIMUM_BLOCKS
from trainstep.records.store import new_records_path

if TYPE_CHECKING:
    from rich.live import Live

    from trainstep.records.sequential import Judgement

CODES = {"pass": 0, "fail": 1, "cannot tell": 3}
_ENVIRONMENT = (
    *("hostname", "os", "cpu", "cores", "python", "torch", "triton", "cuda", "gpu", "gpu_count", "driver", "source"),
)
_BASELINE = (
    *(name for name in _ENVIRONMENT if name not in ("hostname", "os", "source")),
    "packages",
    "measure",
    "command",
)
"""What must be the same for a stored baseline to be compared with."""
_STORED = "Base is stored, and was not interleaved with head: changes of the machine since then are part of the ratio."


def _help(text: str, **given: Any) -> Parameter:
    return Parameter(help=text, **given)


def _switch(text: str) -> Parameter:
    return Parameter(help=text, negative=(), show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """The options of `gate`. ValueError for values that cannot work."""

    fail_if_slower: Annotated[
        float, _help("The slowdown, in percent, from which on HEAD fails.", metavar="PERCENT")
    ] = 2.0
    budget_minutes: Annotated[
        float,
        _help(
            "The time for all runs, those of earlier, killed processes too. Noise of 1 % needs seconds, of 10 % minutes."
        ),
    ] = 3.0
    measure: Annotated[
        Literal["records", "wall", "cpu", "benchmark"] | None,
        _help(
            "records: medians of the records that trainstep writes to runs/ (or COMMAND's --out); wall: the time of COMMAND; cpu: "
            "its processor time, steadier on a busy machine; benchmark: pytest-benchmark's JSON. By default records if COMMAND "
            "writes any, else wall."
        ),
    ] = None
    quantity: Annotated[
        str | None,
        _help(
            "Which time of records to compare: step (the default), forward, backward... With it records are measured."
        ),
    ] = None
    setup: Annotated[
        str | None,
        _help(
            "A line for the shell that runs once in each checkout first, such as a build. It takes nothing from the budget."
        ),
    ] = None
    out: Annotated[
        Path | None,
        _help(
            "The gate's file, by default a new .gate in runs/. With the file of a gate that was killed, the gate goes on."
        ),
    ] = None
    comment: Annotated[Path | None, _help("Write the result as Markdown into this file, for a pull request.")] = None
    save: Annotated[
        Path | None,
        _help(
            "Write HEAD's times, with this machine's environment, as JSON of pytest-benchmark: a baseline for later."
        ),
    ] = None
    allow_mixed: Annotated[
        bool, _switch("Compare even if BASE's and HEAD's runs say that their packages or machines differ.")
    ] = False
    quiet: Annotated[bool, _switch("Show no progress.")] = False
    json: Annotated[bool, _switch("Print JSON, which begins with `answer`.")] = False

    def check(self) -> None:
        """ValueError for values that cannot work, and for files that cannot be written, before anything runs."""
        if not 0 <= self.fail_if_slower <= 1000:
            raise ValueError(
                f"fail_if_slower: must be a percentage from 0 to 1000, such as 2, not {self.fail_if_slower:g}"
            )
        check_positive({"budget_minutes": self.budget_minutes})
        if self.quantity is not None and self.measure not in (None, "records"):
            raise ValueError(
                f"quantity: is one of records, and has no effect on --measure {self.measure}; leave one out"
            )
        if self.comment is not None:
            from trainstep.report.kit.output_file import check_output

            check_output("comment", self.comment, "markdown")
        if self.save is not None and os.path.lexists(self.save):
            try:
                read_benchmarks(self.save)
            except ValueError as error:
                raise ValueError(f"save: {error}; name another file") from None


def gate(
    base: str,
    head: str,
    /,
    *command: Annotated[str, Parameter(allow_leading_hyphen=False)],
    how: GateOptions = GateOptions(),
) -> int:
    """May a change land? Run COMMAND in two versions alternately, until their difference is decided or the time is over.

    BASE and HEAD are revisions of the repository here (checked out into a temporary folder) or folders. The runs go base head head
    base, then mirrored. The interval may be looked at while they go on: all looks together fail an equal head at most once in 200
    gates, and pass a slower one as rarely.

    pass: the interval lies below the limit. fail: it lies above 1, and the ratio reaches the limit, or COMMAND fails in HEAD.

    Exit codes: 0 pass; 1 fail; 2 bad input; 3 cannot tell (the time is over, or COMMAND fails in BASE).

    Examples:

        trainstep gate main HEAD --budget-minutes 15 -- trainstep bench --model tiny --context 64

        trainstep gate main . --measure wall --budget-minutes 10 -- python train.py --steps 20

        trainstep gate v1.2 HEAD --measure benchmark --comment gate.md -- pytest tests/bench

        trainstep gate main HEAD --setup "make build" --fail-if-slower 5 --json -- ./bench.sh

    Parameters
    ----------
    base
        What HEAD is compared with: a revision, a folder, or a file that --save wrote.
    head
        The version to judge: a revision or a folder.
    command
        What runs in each checkout, after `--`.
    """
    if not command or not command[0]:
        raise ValueError("command: is missing: trainstep gate BASE HEAD -- COMMAND")
    how.check()
    here = _environment(how.measure, command)
    reference = _baseline(Path(base), here) if _is_file(base) else find_source("base", base)
    version = find_source("head", head)
    plan = Plan(
        base=base if isinstance(reference, Benchmarks) else reference.words,
        head=version.words,
        command=tuple(command),
        setup=how.setup,
        measure=how.measure or ("auto" if how.quantity is None else "records"),
        quantity=how.quantity,
        threshold=how.fail_if_slower / 100,
        budget_s=how.budget_minutes * 60,
        environment=here,
    )
    outcome, path = _run(plan, reference, version, how)
    code = CODES[outcome.ending.verdict]
    remarks = list(outcome.ending.notes)
    if isinstance(reference, Benchmarks):
        remarks.append(_STORED)
    elif reference.is_same_code(version):
        remarks.append("Base and head are the same code.")
    _show(plan, outcome, code, remarks, how)
    if how.save is not None:
        _save(how.save, outcome, here, version.commit)
    if not how.json:
        print(f"runs: {path}")
    return code


def _run(plan: Plan, base: Source | Benchmarks, head: Source, how: GateOptions) -> tuple[Outcome, Path]:
    """Run the gate with progress; its outcome and its file. KeyboardInterrupt with words on how to go on."""
    file = GateFile(how.out or new_records_path("gate").with_suffix(".gate"))  # `report runs/` reads each .jsonl
    progress = _Progress(plan.budget_s, quiet=how.quiet)
    with file.locked():
        before = _end_by_interrupt()
        try:
            return run_gate(plan, base, head, file, allow_mixed=how.allow_mixed, on_block=progress.show), file.path
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the runs are kept; to go on, add --out {shlex.quote(str(file.path))}") from None
        finally:
            progress.close()
            for number, handler in before.items():
                signal.signal(number, handler)


def _environment(measure: str | None, command: tuple[str, ...]) -> dict[str, Any]:
    """Where this gate runs, and what it runs: what two processes of one gate, or a baseline and its gate, must share."""
    here = asdict(environment())
    return {
        **{name: here[name] for name in _ENVIRONMENT},
        "packages": installed_packages(),
        "measure": measure,
        "command": list(command),
    }


def _is_file(base: str) -> bool:
    return base.endswith(".json") and Path(base).is_file()


def _baseline(path: Path, here: dict[str, Any]) -> Benchmarks:
    """The stored baseline. ValueError if it has no environment, or was measured elsewhere or otherwise."""
    if here["measure"] is None:
        raise ValueError("measure: must be named for a stored baseline, such as --measure wall")
    stored = read_benchmarks(path)
    if stored.environment is None:
        raise ValueError(
            f"base: {path} does not say with which packages and on which machine it was measured, so it is no baseline; "
            "write one: trainstep gate BASE HEAD --save FILE.json -- COMMAND"
        )
    if not all(stored.rounds.values()):
        raise ValueError(f"base: {path} has medians without single runs, so it is no baseline")
    for name in _BASELINE:
        its, ours = stored.environment.get(name), here[name]
        if its != ours:
            raise ValueError(
                f"base: {path} is of another environment: {name} {_words(its)} against {_words(ours)}; measure both versions: "
                "trainstep gate BASE HEAD -- COMMAND"
            )
    return stored


def _words(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list) else str(value)


def _end_by_interrupt() -> dict[int, Any]:
    """Have SIGTERM and SIGHUP end the gate as Ctrl-C does, so that checkouts are removed. Returns the handlers before."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}


def _show(plan: Plan, outcome: Outcome, code: int, notes: Sequence[str], how: GateOptions) -> None:
    from trainstep.report.gate.verdict import gate_answer, gate_comment, gate_plain, gate_tables
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.output_file import write_output
    from trainstep.report.kit.terminal import print_paragraphs, print_tables
    from trainstep.report.kit.visible import ascii_json

    result = (plan, outcome.ending, outcome.judgement, outcome.runs)
    if how.comment is not None:
        write_output("comment", how.comment, "markdown", gate_comment(*result, notes))
    if how.json:
        print(ascii_json(gate_plain(*result, notes, code), indent=2))
        return
    print_answers([gate_answer(*result)], sys.stdout)
    if outcome.ending.output:
        print_paragraphs(["the end of its output:", *(f"    {line}" for line in outcome.ending.output)], sys.stdout)
    tables = gate_tables(outcome.judgement, outcome.runs)
    if tables or notes:
        print_tables(tables, notes, sys.stdout)


def _save(path: Path, outcome: Outcome, here: dict[str, Any], commit: str | None) -> None:
    from trainstep.report.gate.verdict import times_by_cell

    rounds = times_by_cell(outcome.runs, HEAD)
    if not rounds:
        print(f"trainstep: save: head has no times, so {path} is not written", file=sys.stderr)
        return
    try:
        write_benchmarks(path, rounds, here, commit)
    except OSError as error:
        raise ValueError(f"save: {path} cannot be written: {error.strerror}; name another file") from None
    count, least = min(map(len, rounds.values())), 2 * MINIMUM_BLOCKS
    if count < least:
        print(
            f"trainstep: save: {path} has {count} runs, and a gate against it needs {least}: give a larger --budget-minutes",
            file=sys.stderr,
        )


class _Progress:
    """The state of the gate on standard error: a live line on a terminal, else a line for each look."""

    def __init__(self, budget_s: float, *, quiet: bool) -> None:
        self._budget_s, self._quiet = budget_s, quiet
        self._live: Live | None = None
        if sys.stderr is not None and sys.stderr.isatty() and not quiet:
            from rich.live import Live as LiveLine

            from trainstep.report.kit.visible import VisibleConsole

            self._live = LiveLine(console=VisibleConsole(sys.stderr), transient=True, auto_refresh=False)

    def show(self, judgement: "Judgement", used_s: float) -> None:
        words = _progress_words(judgement, used_s, self._budget_s)
        with outliving_reader(sys.stderr):
            if self._live is not None:
                from rich.text import Text

                self._live.start()
                self._live.update(Text(words, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)
            elif not self._quiet and (judgement.just_looked or judgement.verdict):
                print(words, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            with outliving_reader(sys.stderr):
                self._live.stop()


def _progress_words(judgement: "Judgement", used_s: float, budget_s: float) -> str:
    """`12 blocks, 48 of 180 s: wall time 1.004 (0.981 to 1.027)`, of the cell that is furthest from a verdict.

    It is made here, because reports import pandas, which would take seconds out of the measuring.
    """
    cell = judgement.decisive
    blocks = f"{cell.blocks} block{'s' * (cell.blocks != 1)}"
    cells = f", {len(judgement.cells)} cells" if len(judgement.cells) > 1 else ""
    interval = "" if cell.low is None else f" ({cell.low:.3f} to {cell.high:.3f})"
    return f"{blocks}, {used_s:.0f} of {budget_s:.0f} s{cells}: {cell.name} {cell.ratio:.3f}{interval} {judgement.verdict}".rstrip()
