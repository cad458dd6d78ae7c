"""The command line `trainstep bench` and its like: finds the verb, reads its files of options, and reports errors as one sentence.

Exit codes:
0   done (a cell that runs out of memory is a result)
1   a bug in trainstep, or a cell is slower with `compare --fail-if-slower`, or `gate` fails
2   bad input, or standard output cannot be written; one sentence, never a traceback
3   done, but some cells crashed, were killed, timed out or could not be imported; or `gate` cannot tell
4   the budget of --budget-minutes left cells; the command that continues is printed
130 interrupted; a sentence says what is kept

This module imports nothing that takes time, so that a Ctrl-C during an import is handled inside `main`, not before it.
"""

import os
import sys
from collections.abc import Sequence

import trainstep

# Type checkers take it as true; importing it from typing would take longer than everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from inspect import BoundArguments
    from typing import Any

    from cyclopts import App, ArgumentCollection

    from trainstep.measure.harness.nodes import Nodes
    from trainstep.parallel.launch import Launch

_VERBS = {
    "bench": "Time the step of one model, or of a grid of models.",
    "attention": "Find which attention is fastest here, and whether it is right.",
    "op": "Find how fast one other op is here (norm, rotary, SwiGLU, loss, AdamW), and whether it is right.",
    "profile": "Show where the time of a step goes, by kernel and phase, and what limits it.",
    "explain": "Say why a step takes its time: its floor, then each excess with its cause and a change.",
    "numerics": "Show the error that each precision causes in a model, beside its cost.",
    "memory": "Show where the memory of a step goes, when it peaks, and what fits.",
    "parallel": "Find which parallel strategy is fastest, and whether its communication is hidden.",
    "plan": "Predict whether a step fits, how long it takes, and which options are fastest; nothing runs.",
    "collectives": "Measure bandwidth and latency of collectives on the interconnect.",
    "run": "Run your own training script, unchanged, and show where the time of its steps goes.",
    "sweep": "Run a whole table from a TOML file; kill and resume it at will.",
    "tune": "Find the fastest tiles of the attention kernels on this GPU.",
    "report": "Show records as tables, or as one page.",
    "compare": "Did it get faster? Compare two files of records, cell by cell.",
    "gate": "May a change land? Run two versions alternately until their difference is decided.",
    "doctor": "Show this machine, what it can do, and what is missing.",
}
_RUNNING = (
    "bench",
    "attention",
    "op",
    "profile",
    "explain",
    "numerics",
    "memory",
    "parallel",
    "collectives",
    "sweep",
    "tune",
)
"""The verbs that run cells."""
_ON_NODES = ("bench", "memory", "parallel", "collectives", "sweep")
"""The verbs that use all nodes of a launch."""
_READ_FILES = ("--from", "--grade", "PATHS")
"""The options and words that name files to read, with which nothing runs."""
_IMPLIED = {"plan": {"device": "cuda"}}
"""Verb -> options that it does not have, and their value in files that it writes for other verbs."""
_BY_SRUN = "TRAINSTEP_BY_SRUN"
"""Set in the tasks of an srun that --slurm has started, which have that option too."""
_COMPLETION = "Let the Tab key complete verbs and options, in bash, zsh or fish."
_LONG_RUNS = "Check a long run first: `trainstep {0} --dry-run`. Limit its time: `trainstep {0} --budget-minutes 30`."
_OPTION_FILES = (
    " Put options that are always the same into a file, `trainstep {0} --config FILE.toml`, or as defaults into ./trainstep.toml, "
    'which has a table for each verb and [all] for all verbs: `precision = "bf16_autocast"` under `[all]`; never model, data or '
    "output."
)
_HELP_OPTIONS = frozenset(("--help", "-h", "--version"))
_SHELLS = ("bash", "zsh", "fish")
_START_UP_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc"}
"""Shell -> the file that loads the completion; fish finds it without one."""


def build_app(words: Sequence[str]) -> "App":
    """The cyclopts app for this command line. It imports only the module of the verb that runs."""
    from cyclopts import App

    app = App(
        name="trainstep",
        help="Measure, explain and speed up the training step of a Transformer language model.",
        version=trainstep.__version__,
        help_epilogue="Start with `trainstep bench`. Each verb has its own help: `trainstep bench --help`.",
        help_format="plaintext",  # a parser of markdown would make `--help` take half as long again
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    if not words or not _HELP_OPTIONS.isdisjoint(words):  # not for all: importing rich takes longer than most verbs run
        from trainstep.report.kit.visible import VisibleConsole

        app.console = VisibleConsole(sys.stdout)
    overview = not words or words[0] not in _VERBS
    if not overview and words[0] in _RUNNING:
        files = {"sweep": "", "tune": " Put defaults into ./trainstep.toml under [tune]."}.get(words[0], _OPTION_FILES)
        app.help_epilogue = (_LONG_RUNS + files).format(words[0])
    app.command("trainstep.cli.app:install_completion", name="--install-completion", help=_COMPLETION)
    for verb, summary in _VERBS.items():  # in the verb's own help, a summary would replace its docstring
        app.command(f"trainstep.cli.{verb}:{verb}", help=summary if overview else None)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its exit code."""
    try:
        from trainstep.cli.streams import open_streams

        open_streams()
    except ValueError as error:
        sys.exit(_refuse(str(error)))
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    output, words = sys.stdout, list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run_task(words)
        if sys.stdout is output:  # else a script has its own streams back, which Python flushes at its end
            output.flush()
        return code
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt as error:
        return _interrupted(str(error))
    except BrokenPipeError:  # the reader of the output has left (`| head`)
        _silence_output()
        return 0
    except OSError as error:  # a full disk, a folder that was removed
        _silence_output()
        return _refuse(f"{error.filename or 'the operating system refused'}: {error.strerror or error}")


def _run_task(words: Sequence[str]) -> int:
    """Run this task's part of the command line, which under torchrun or srun every task has.

    The first task runs the verb and starts the ranks of cells itself. Over several nodes, the first task of each other node is
    that node's agent (measure/harness/nodes.py). All others have nothing to do.

    ValueError for tasks on several nodes, if the verb runs on one.
    """
    from trainstep.parallel.launch import end_with_torchrun, find_launch, is_launched

    if not words or words[0] not in _VERBS or words[0] == "run" or not is_launched(os.environ):
        return _run_verb(words)  # of `run`, every task runs its rank of a script
    end_with_torchrun(os.environ)
    launch = find_launch(os.environ)
    if launch.nodes > 1 and words[0] not in _ON_NODES:
        raise ValueError(
            f"ranks: {launch.world_size} tasks on several nodes, but {words[0]} runs on one; start it once, on one node"
        )
    if launch.nodes == 1 or not _HELP_OPTIONS.isdisjoint(words):
        return _run_verb(words) if launch.rank == 0 else 0
    return _run_on_nodes(words, launch) if launch.local_rank == 0 else 0


def _run_on_nodes(words: Sequence[str], launch: "Launch") -> int:
    """Run the verb on the first node, with the agents of the others; elsewhere be an agent."""
    from trainstep.measure.harness.node_meeting import meet_nodes, serve_node

    if launch.node:
        return serve_node(launch, words=words)
    nodes, code = meet_nodes(launch, words=words), 2
    try:
        code = _run_verb(words, nodes)
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        nodes.end(code)
    return code


def _run_verb(words: Sequence[str], nodes: "Nodes | None" = None) -> int:
    """Parse the command line and run its verb. ValueError also for words that are not a command line. `nodes`: of the launch."""
    from cyclopts import CycloptsError

    app, files = build_app(words), OptionFiles()
    app.config = (files,)
    try:
        verb, bound, _ = app.parse_args(_split(words), exit_on_error=False, print_error=False)
        if files.words is not None:
            _note_options(bound, files.words)
        if nodes is not None:
            _give(bound, nodes=nodes)
        if command := _srun(bound):
            return _run_by_srun(command, words)
        return verb(*bound.args, **bound.kwargs) or 0
    except CycloptsError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(files.with_source(str(error))) from None


def _srun(bound: "BoundArguments") -> list[str]:
    """The beginning of srun's command line, if a verb is to run by srun and does not yet."""
    from trainstep.parallel.launch import is_launched

    how: Any = bound.arguments.get("how")
    if not hasattr(how, "srun"):
        return []
    if is_launched(os.environ):
        if how.slurm is not None and _BY_SRUN not in os.environ:
            _say("slurm: has no effect in a task of srun or torchrun; leave it out, or start the command outside")
        return []
    command: list[str] = how.srun({**bound.arguments, **bound.arguments.get("fields", {})})
    return command


def _run_by_srun(command: list[str], words: Sequence[str]) -> int:
    """Run the same words by srun, whose tasks leave with the verb's exit code."""
    import subprocess

    from trainstep.config.import_path import python_command

    environ = {**os.environ, _BY_SRUN: "1"}
    return subprocess.run([*command, *python_command("trainstep", *words)], check=False, env=environ).returncode


def _note_options(bound: "BoundArguments", words: str) -> None:
    """Show the user the options that came from files, and give them to the verb, which records them."""
    if "how" in bound.signature.parameters:
        _give(bound, defaults_from=words)
    how: Any = bound.arguments.get("how")
    if not (bound.arguments.get("quiet") if how is None else how.quiet):
        _say(f"options from {words}")


def _give(bound: "BoundArguments", **fields: object) -> None:
    """Give the verb fields of its parameter `how` that no option sets."""
    from dataclasses import replace

    how = bound.arguments.get("how", bound.signature.parameters["how"].default)
    bound.arguments["how"] = replace(how, **fields)


def _split(words: Sequence[str]) -> list[str]:
    """The words as the parser takes them: those of a script of `run` after `--`; `--fail-if-slower 5%` as 5, and without a number
    as `--fail-if-slower=0`, because a file may follow it."""
    if words[:1] == ["run"]:
        from trainstep.cli.run import split_words

        return split_words(words)
    if "--" in words[1:]:  # what follows is a command of the user
        place = words.index("--", 1)
        return [*_split(words[:place]), *words[place:]]
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


def _refuse(reason: str) -> int:
    _say(reason)
    return 2


def _interrupted(kept: str = "") -> int:
    """Report an interrupt. `kept`: the verb's words about finished cells."""
    # A Ctrl-C inside any `exec` makes the interpreter end by the signal instead of with 130; another `exec` clears that state.
    exec("")
    _say(f"interrupted{'; ' if kept else ''}{kept}", under_echo=sys.stderr is not None and sys.stderr.isatty())
    return 130


def _say(sentence: str, *, under_echo: bool = False) -> None:
    """Print one line on standard error. `under_echo`: below the ^C that the terminal shows."""
    from trainstep.cli.streams import outliving_reader

    if sys.stderr is not None:
        with outliving_reader(sys.stderr):
            print(f"{chr(10) * under_echo}trainstep: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def _silence_output() -> None:
    """Discard the buffer of standard output: at its end the interpreter would try again to write it, and report an error."""
    from trainstep.cli.streams import silence

    silence(sys.stdout)


class OptionFiles:
    """Options that the command line leaves open, from `--config FILE` and then from ./trainstep.toml.

    It is a config of cyclopts, which is called after the command line was split into options, before their values are read.
    `taken`: file -> the options that came from it, as text. A verb that reads files of records or a trace runs nothing and takes no
    options.
    """

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, str]] = {}

    def __call__(self, app: "App", commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
        from pathlib import Path

        from cyclopts import Token

        from trainstep.config.sweep import DEFAULTS_FILE, VERBS, default_options, options_of_file

        if not commands or commands[0] not in VERBS:
            return
        options = {
            argument.names[0].removeprefix("--").replace("-", "_"): argument
            for argument in arguments
            if argument.names[0].startswith("--") and argument.parameter.parse is not False
        }
        reads = [argument for argument in arguments if argument.names[0] in _READ_FILES]
        if any(argument.tokens for argument in reads):
            return
        config_tokens = options["config"].tokens if "config" in options else []
        known = options.keys() - {"config", "from", "grade"}
        implied = _IMPLIED.get(commands[0], {})
        for file, texts in (
            *(
                (token.value, _without(implied, options_of_file(Path(token.value), {*known, *implied})))
                for token in config_tokens
            ),
            (str(DEFAULTS_FILE), default_options(commands[0], known)),
        ):
            for name, text in texts.items():
                if not options[name].tokens:
                    options[name].append(Token(keyword=name, value=text, source=file))
                    self.taken.setdefault(file, {})[name] = text

    @property
    def words(self) -> str | None:
        """The options that came from files, as `trainstep.toml: precision=bf16_autocast steps=20`; None if there are none."""
        files = (
            f"{file}: {' '.join(f'{name}={text}' for name, text in options.items())}"
            for file, options in self.taken.items()
        )
        return "; ".join(files) or None

    def with_source(self, reason: str) -> str:
        """An error's sentence, followed by the file of the option that the sentence begins with, if it came from a file."""
        option = reason.partition(":")[0]
        file = next((file for file, options in self.taken.items() if option in options), None)
        return reason if file is None else f"{reason} ({option} is from {file})"


def _without(implied: "Mapping[str, str]", texts: "Mapping[str, str]") -> dict[str, str]:
    """A file's options without those that say what the verb does anyway. ValueError for another value of these."""
    for name in implied.keys() & texts.keys():
        if texts[name] != implied[name]:
            raise ValueError(f"{name}: this command takes {implied[name]} alone, not {texts[name]}")
    return {name: text for name, text in texts.items() if name not in implied}


def install_completion(*, shell: str | None = None) -> None:
    """Write a completion script under your home folder, and have your shell load it.

    Examples:

        trainstep --install-completion

        trainstep --install-completion --shell zsh

    Parameters
    ----------
    shell
        bash, zsh or fish; by default the current shell.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        chosen = shell or detect_shell()
    except ShellDetectionError:
        raise ValueError(
            "shell: the current shell is not known; name it: trainstep --install-completion --shell bash"
        ) from None
    if chosen not in _SHELLS:
        raise ValueError(f"shell: there is no completion for {chosen}; take one of {', '.join(_SHELLS)}")
    script = build_app([]).install_completion(shell=chosen)  # type: ignore[arg-type]
    print(f"completion for {chosen}: {script}")
    loads = f"{_START_UP_FILES[chosen]} loads it: " if chosen in _START_UP_FILES else ""
    print(f"{loads}open a new shell, then type: trainstep <Tab>")
