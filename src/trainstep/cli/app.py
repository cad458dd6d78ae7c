"""The verbs, and what every one of them does with errors: one sentence and exit code 2, never a traceback.

Exit codes: 0 done (a cell out of memory is a result), 1 a fault of ours, 2 bad input, 3 done but some cells crashed, were
killed, timed out or could not be imported, 130 interrupted with every finished cell kept.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import trainstep

_VERBS = {
    "bench": "Time the step of one model, or of a grid of them.",
    "attention": "Which attention is fastest here, and is it right.",
    "profile": "Where the time of a step goes: kernels by phase, classes, what the host does, and what limits it.",
    "numerics": "What each precision does to the numbers of a model, beside what it costs.",
    "memory": "Where the memory of a step goes, what peaks when, what fits.",
    "parallel": "Which way of going parallel is cheapest, and is communication hidden.",
    "collectives": "What the interconnect does: bandwidth and latency of collectives.",
    "sweep": "Run a whole table from a TOML file; kill and resume it at will.",
    "tune": "Find the fastest tiles of the attention kernels on this GPU.",
    "report": "Show records as tables, or as one page.",
    "compare": "Did it get faster? Two files of records, cell by cell.",
    "doctor": "Show this machine, what it can do, and what is missing.",
}


def build_app(words: Sequence[str]) -> App:
    """The app for this command line. No verb's module is imported but the one that runs."""
    app = App(
        name="trainstep",
        help="Measure, explain and speed up the training step of a Transformer language model.",
        version=trainstep.__version__,
        help_epilogue="Start with `trainstep bench`. Each verb explains itself: `trainstep bench --help`.",
        help_format="plaintext",  # a parser of markdown would make `--help` half as slow again
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    overview = not words or words[0] not in _VERBS
    for verb, summary in _VERBS.items():  # a summary would take the place of the docstring in the verb's own help
        app.command(f"trainstep.cli.{verb}:{verb}", help=summary if overview else None)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and leave with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is no text (a lone surrogate) must not cost the table
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code it ends with."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not _speaks_for_all(words):
            return 0
        code: int = build_app(words)(words, exit_on_error=False, print_error=False) or 0
        sys.stdout.flush()
        return code
    except (ValueError, CycloptsError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("\ntrainstep: interrupted; every finished cell is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left (`| head`). What Python still holds for them goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that went away
        return _refuse(f"{error.filename or _unnamed(error)}: {error.strerror or error}")


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


def _unnamed(error: OSError) -> str:
    """What an error is of that names no file: whoever writes a file names it, so only the standard streams are left."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return "standard output cannot be written" if full else "the operating system refused"


def _refuse(reason: str) -> int:
    print(f"trainstep: {' '.join(reason.split())}", file=sys.stderr)
    return 2
