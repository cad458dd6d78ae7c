"""The verbs, and what every one of them does with errors: one sentence and exit code 2, never a traceback.

Exit codes: 0 done (a cell out of memory is a result), 1 a fault of ours, 2 bad input, 3 done but some cells crashed, timed
out or could not be imported, 130 interrupted with every finished cell kept.
"""

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import trainstep

app = App(
    name="trainstep",
    help="Measure, explain and speed up the training step of a Transformer language model.",
    version=trainstep.__version__,
    help_epilogue="Start with `trainstep bench`. Each verb has examples: `trainstep bench --help`.",
)
app.command("trainstep.cli.bench:bench")
app.command("trainstep.cli.sweep:sweep")
app.command("trainstep.cli.report:report")
app.command("trainstep.cli.compare:compare")
app.command("trainstep.cli.doctor:doctor")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and leave with its exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code it ends with."""
    try:
        return app(arguments, exit_on_error=False, print_error=False) or 0
    except (ValueError, CycloptsError) as error:
        print(f"trainstep: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrainstep: interrupted; every finished cell is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
