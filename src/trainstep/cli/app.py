"""The verbs, and what every one of them does with errors: one sentence and exit code 2, never a traceback.

Exit codes: 0 done (a cell out of memory is a result), 1 a fault of ours, or slower by `compare --fail-if-slower`, 2 bad input or
standard output that cannot be written, 3 done but some cells crashed, were killed, timed out or could not be imported, 4 the
budget of --budget-minutes left cells (with the command that goes on), 130 interrupted, with a sentence that says what is kept.

This module imports nothing that takes time: a Ctrl-C during an import is met inside `main`, not before it.
"""

import os
import sys
from collections.abc import Sequence

import trainstep

TYPE_CHECKING = False  # type checkers take it for true; to import it from typing takes longer than all else here
if TYPE_CHECKING:
    from inspect import BoundArguments

    from cyclopts import App

_VERBS = {
    "bench": "Time the step of one model, or of a grid of them.",
    "attention": "Which attention is fastest here, and is it right.",
    "profile": "Where the time of a step goes: kernels by phase, classes, what the host does, and what limits it.",
    "numerics": "What each precision does to the numbers of a model, beside what it costs.",
    "memory": "Where the memory of a step goes, what peaks when, what fits.",
    "parallel": "Which parallel strategy is cheapest, and is communication hidden.",
    "collectives": "What the interconnect does: bandwidth and latency of collectives.",
    "sweep": "Run a whole table from a TOML file; kill and resume it at will.",
    "tune": "Find the fastest tiles of the attention kernels on this GPU.",
    "report": "Show records as tables, or as one page.",
    "compare": "Did it get faster? Two files of records, cell by cell.",
    "doctor": "Show this machine, what it can do, and what is missing.",
}


_RUNNING = ("bench", "attention", "profile", "numerics", "memory", "parallel", "collectives", "sweep", "tune")
"""The verbs that run cells."""
_COMPLETION = "Let the Tab key complete verbs and options, in bash, zsh or fish."
_LOOK_FIRST = "Look before a long run: `trainstep {0} --dry-run`. Stop in time: `trainstep {0} --budget-minutes 30`."
_OPTION_FILES = (
    " Options that are the same each time: in a file, `trainstep {0} --config FILE.toml`, or as defaults in ./trainstep.toml, "
    'a table a verb and [all] for all of them, as `precision = "bf16_autocast"` under `[all]`; never model, data or output.'
)
_ASKS_FOR_HELP = frozenset(("--help", "-h", "--version"))


def build_app(words: Sequence[str]) -> "App":
    """The app for this command line. No verb's module is imported but the one that runs."""
    from cyclopts import App

    app = App(
        name="trainstep",
        help="Measure, explain and speed up the training step of a Transformer language model.",
        version=trainstep.__version__,
        help_epilogue="Start with `trainstep bench`. Each verb explains itself: `trainstep bench --help`.",
        help_format="plaintext",  # a parser of markdown would make `--help` half as slow again
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    if not words or not _ASKS_FOR_HELP.isdisjoint(words):  # rich takes longer to import than most verbs run
        from trainstep.report.console import VisibleConsole

        app.console = VisibleConsole(sys.stdout)
    overview = not words or words[0] not in _VERBS
    if not overview and words[0] in _RUNNING:
        files = {"sweep": "", "tune": " Defaults may stand in ./trainstep.toml under [tune]."}.get(
            words[0], _OPTION_FILES
        )
        app.help_epilogue = (_LOOK_FIRST + files).format(words[0])
    app.command("trainstep.cli.completion:install_completion", name="--install-completion", help=_COMPLETION)
    for verb, summary in _VERBS.items():  # a summary would take the place of the docstring in the verb's own help
        app.command(f"trainstep.cli.{verb}:{verb}", help=summary if overview else None)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and leave with its exit code."""
    try:
        from trainstep.cli.streams import open_streams

        open_streams()
    except ValueError as error:
        sys.exit(_refuse(str(error)))
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code it ends with."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _run_verb(words) if _speaks_for_all(words) else 0
        sys.stdout.flush()
        return code
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt as error:
        return _interrupted(str(error))
    except BrokenPipeError:  # whoever read the output has left (`| head`)
        _silence_output()
        return 0
    except OSError as error:  # a full disk, a folder that went away
        _silence_output()
        return _refuse(f"{error.filename or 'the operating system refused'}: {error.strerror or error}")


def _run_verb(words: Sequence[str]) -> int:
    """ValueError for words that are no command line, too."""
    from cyclopts import CycloptsError

    from trainstep.cli.option_files import OptionFiles

    app, files = build_app(words), OptionFiles()
    app.config = (files,)
    try:
        verb, bound, _ = app.parse_args(_with_percent(words), exit_on_error=False, print_error=False)
        if files.words is not None:
            _tell_files(bound, files.words)
        return verb(*bound.args, **bound.kwargs) or 0
    except CycloptsError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(files.with_source(str(error))) from None


def _tell_files(bound: "BoundArguments", words: str) -> None:
    """The options that files gave, told to the reader and to the verb, whose records keep it."""
    from dataclasses import replace

    how = bound.arguments.get("how", bound.signature.parameters["how"].default)
    bound.arguments["how"] = replace(how, defaults_from=words)
    if not how.quiet:
        _say(f"options from {words}")


def _with_percent(words: Sequence[str]) -> list[str]:
    """The words, `--fail-if-slower` without a number as `--fail-if-slower=0`, since a file may follow; `5%` is 5."""
    words = [
        word.removesuffix("%") if before == "--fail-if-slower" and _is_number(word.removesuffix("%")) else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return [
        f"{word}=0" if word == "--fail-if-slower" and not _is_number(following) else word
        for word, following in zip(words, [*words[1:], ""], strict=False)
    ]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _speaks_for_all(words: Sequence[str]) -> bool:
    """Under torchrun or srun each task has this command line; the first one alone runs it, and starts the ranks of cells itself.

    ValueError where the tasks are on several nodes: cells run on one.
    """
    from trainstep.parallel.launch import find_launch, is_launched

    if not words or words[0] not in _VERBS or not is_launched(os.environ):
        return True
    launch = find_launch(os.environ)
    if launch.world_size > 1 and launch.local_size != launch.world_size:
        raise ValueError(
            f"ranks: {launch.world_size} tasks on several nodes; the ranks of a cell run on one node: start trainstep once there, "
            "or as jobs: trainstep sweep FILE --slurm PARTITION"
        )
    return launch.rank == 0


def _refuse(reason: str) -> int:
    _say(reason)
    return 2


def _interrupted(kept: str = "") -> int:
    """`kept`: what the verb knows of cells that were finished."""
    # A Ctrl-C within any exec leaves a note that ends the interpreter by the signal, not by 130: the next exec takes it back
    exec("")
    _say(f"interrupted{'; ' if kept else ''}{kept}", under_echo=sys.stderr is not None and sys.stderr.isatty())
    return 130


def _say(sentence: str, *, under_echo: bool = False) -> None:
    """One line on standard error. `under_echo`: below the ^C that the terminal wrote."""
    from trainstep.cli.streams import outliving_reader

    if sys.stderr is not None:
        with outliving_reader(sys.stderr):
            print(f"{chr(10) * under_echo}trainstep: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def _silence_output() -> None:
    """What standard output still holds goes nowhere: the interpreter would try again to write it, and complain."""
    from trainstep.cli.streams import silence

    silence(sys.stdout)
