"""Attacks on the command line: every verb, its own options and strangers, with values that nobody should give.

A command line that is refused says so in one sentence; one that is not goes through every check and writes what it is told to,
but measures nothing (reader.py). What the user has in the folder is unchanged afterwards, but for records that get more and a
page of ours that gives way to another.
"""

import inspect
import random
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from attacks.attack import Outcome
from attacks.reader import Readers, judged
from attacks.user_folder import DEVICES, OTHER_RECORDS, RECORDS, SWEEP, UNWRITABLE, UserFolder, make_user_folder, names
from trainstep.cli import app
from trainstep.config.fields import aliases_of
from trainstep.config.parsing import CONFIGS, fields_of

Draw = random.Random

VERBS = tuple(app._VERBS)
_NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "64",
    "1,2",
    "0.5",
    "1e9",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "9" * 20,
    "1" * 400,
    "-0",
    "1e-320",
)
_ODD = (
    "",
    " ",
    ",",
    "a,,b",
    "1,",
    "0x10",
    "1_000",
    "١٢",
    "½",
    "é",
    "\u202egnp",
    "\x1b[31mred",
    "\x07",
    "a\nb",
    "\udcff",
    "true",
    "none",
    "None",
    "[]",
    "{}",
    "[8]",
    "null",
    "%s%n",
    "$(touch ran)",
    "`touch ran`",
    "a" * 20_000,
    ",".join(map(str, range(5000))),
    "package.module:function",
    "os:system",
    "this:x",
    ":",
    "a:b:c",
    "..",
    "=",
    "a=b",
    "--",
    "-",
    "--help",
    "tiny",
    "cpu",
    "cuda",
)
_STRANGERS = (
    "--nothing",
    "--modle",
    "-x",
    "--out-",
    "--",
    "-",
    "---",
    "--=",
    "--o",
    "--page.x",
    "--no-json",
    "--é",
    "--\x1b[1m",
)
_WRITTEN = ("out", "page", "keep_snapshot", "keep_trace")
"""Options whose file or folder is made."""


class CommandLines:
    """1,500 of them at full size."""

    name = "command_lines"
    full = 1500

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._page = _a_page()

    def afterwards(self) -> Iterable[Outcome]:
        return self._readers.left()

    def attack(self, draw: Draw, folder: Path) -> Outcome:
        there = make_user_folder(folder, self._page)
        words = _words(draw, there)
        conditions = _conditions(draw, words)
        end = self._readers.run(words, folder, **conditions)
        other = ""
        if end.code == 2 and not conditions and (new := there.new()):
            other = f"refused, and yet there is {new}"
        return judged(f"trainstep {_quoted(words)} {conditions or ''}", [end], lost=there.lost(), other=other)


def options_of(verb: str) -> dict[str, Any]:
    """`--name` -> its type, of every option of a verb; positional ones under their own names."""
    function = getattr(__import__(f"trainstep.cli.{verb}", fromlist=[verb]), verb)
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = hints.get(name, parameter.annotation)
        marks = [mark for mark in get_args(annotation)[1:] if isinstance(mark, Parameter)]
        named = next((mark.name[0] for mark in marks if mark.name), "--" + name.strip("_").replace("_", "-"))
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            found[named] = annotation
    return found


def _words(draw: Draw, there: UserFolder) -> list[str]:
    """A command line: some options of a verb, as a rule with a value of the right kind; one of them, or the verb, is odd."""
    verb = (
        draw.choice(VERBS)
        if draw.random() < 0.98
        else draw.choice((*_ODD[:12], "benhc", "BENCH", "--version", "--help"))
    )
    if verb not in VERBS:
        return [verb, *draw.sample(_ODD, draw.randrange(3))]
    options = options_of(verb)
    words = [verb, *_positional(draw, verb, there)]
    for option in draw.sample(list(options), min(len(options), draw.choice((0, 1, 1, 2, 3, 5)))):
        words += _option(draw, option, options[option], there)
    if "--device" in options and "--device" not in words and draw.random() < 0.8:
        words += ["--device", "cpu"]
    for option, usual in (("--out", RECORDS), ("--page", "old_page.html")):
        if option in options and option not in words and draw.random() < 0.2:
            words += [option, draw.choice((usual, draw.choice(names(there))))]
    what = draw.randrange(8)
    if what == 0:
        words.insert(draw.randrange(1, len(words) + 1), draw.choice((*_STRANGERS, *_ODD)))
    elif what == 1 and len(words) > 1:
        del words[draw.randrange(1, len(words))]
    elif what == 2:
        words += draw.choice(words[1:] or [""]), draw.choice(_ODD)
    return words


def _positional(draw: Draw, verb: str, there: UserFolder) -> list[str]:
    """Files that a verb reads."""
    number = {"sweep": 1, "report": draw.choice((1, 1, 2)), "compare": 2}.get(verb, 0)
    good = [SWEEP] if verb == "sweep" else [RECORDS, OTHER_RECORDS]
    return [draw.choice(good if draw.random() < 0.6 else [*names(there), *DEVICES]) for _ in range(number)]


def _option(draw: Draw, option: str, annotation: Any, there: UserFolder) -> list[str]:
    name = option.strip("-").replace("-", "_")
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    kinds = get_args(kind) if get_origin(kind) is not Literal else ()
    if kind is bool or bool in kinds:
        return [option] if draw.random() < 0.8 else [option, draw.choice(_ODD)]
    if draw.random() < 0.25:
        value = draw.choice((*_ODD, *_NUMBERS))
    elif kind is Path or Path in kinds or name in _WRITTEN:
        others = UNWRITABLE if name in _WRITTEN else DEVICES
        value = draw.choice([*names(there), *others])
    elif choices := _choices(name, kind):
        value = ",".join(draw.sample(choices, min(len(choices), draw.choice((1, 1, 2)))))
    else:
        value = draw.choice(_NUMBERS[:10])
    if name in _WRITTEN and value.startswith(("/dev", "../")):  # what comes of an odd value must stay in the folder
        value = "new"
    return [f"{option}={value}"] if draw.random() < 0.2 else [option, value]


def _choices(name: str, kind: Any) -> list[str]:
    """What a field of any config may be, or the words of a Literal."""
    literals = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
    found = [str(word) for word in literals]
    for config in CONFIGS.values():
        field = fields_of(config).get(name)
        if field is not None:
            found += [*map(str, field.metadata.get("choices", ())), *aliases_of(field)]
    return {"model": ["tiny", "small", "8B", "mini", "toy"], "compare": ["context", "dtype", "attention"]}.get(
        name
    ) or found


def _conditions(draw: Draw, words: list[str]) -> dict[str, Any]:
    """A full disk, a closed output, variables of a launcher: for one command line in ten."""
    what = draw.randrange(30)
    if what == 0:
        return {"largest_file_bytes": draw.choice((0, 100, 4096))}
    if (what == 1 and words[0] in ("report", "compare")) or words == ["--help"]:  # nothing is replaced in a new Python
        return {"stdout": draw.choice(("closed", "full"))}
    if what == 2:
        name = draw.choice(("RANK", "WORLD_SIZE", "SLURM_PROCID", "COLUMNS", "CUDA_VISIBLE_DEVICES", "TMPDIR", "HOME"))
        return {
            "environ": {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "SLURM_STEP_ID": "0",
                name: draw.choice(("", "x", "-1", "9" * 20)),
            }
        }
    return {}


def _quoted(words: list[str]) -> str:
    return ascii(shlex.join(word if len(word) < 400 else f"{word[:40]}... ({len(word)} characters)" for word in words))


def _a_page() -> bytes:
    from record_maker import a_record
    from trainstep.report.page import page
    from trainstep.report.rows import rows_of

    return page(rows_of([("good.jsonl", a_record())])).encode()
