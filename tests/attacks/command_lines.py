"""Attacks on the command line: every verb with its own and unknown options, and with values that no user should give.

A command line is refused in one sentence, or it passes every check and writes its files without measuring (reader.py). The
user's files are unchanged afterwards, except that records may be appended and that a page of ours may be replaced by another.
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
_UNKNOWN_OPTIONS = (
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
"""Options whose file or folder is written."""


class CommandLines:
    """Random command lines: 1,500 cases at full size."""

    name = "command_lines"
    full = 1500

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._page = _a_page()

    def afterwards(self) -> Iterable[Outcome]:
        return self._readers.left()

    def attack(self, draw: Draw, folder: Path) -> Outcome:
        user_folder = make_user_folder(folder, self._page)
        words = _words(draw, user_folder)
        conditions = _conditions(draw, words)
        end = self._readers.run(words, folder, **conditions)
        other = ""
        if end.code == 2 and not conditions and (new := user_folder.new()):
            other = f"refused, and yet there is {new}"
        return judged(f"trainstep {_quoted(words)} {conditions or ''}", [end], lost=user_folder.lost(), other=other)


def options_of(verb: str) -> dict[str, Any]:
    """Option -> its type, for every option of a verb; positional parameters under their own names."""
    function = getattr(__import__(f"trainstep.cli.{verb}", fromlist=[verb]), verb)
    hints = get_type_hints(function, include_extras=True)
    annotations = {
        name: hints.get(name, parameter.annotation)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.POSITIONAL_ONLY
    }
    if "how" in annotations:  # the shared options of verbs are fields of its class
        annotations |= get_type_hints(annotations.pop("how"), include_extras=True)
    options = {}
    for name, annotation in annotations.items():
        marks = [mark for mark in get_args(annotation)[1:] if isinstance(mark, Parameter)]
        option = next((mark.name[0] for mark in marks if mark.name), "--" + name.strip("_").replace("_", "-"))
        if not any(mark.parse is False for mark in marks):
            options[option] = annotation
    return options


def _words(draw: Draw, user_folder: UserFolder) -> list[str]:
    """A command line: a verb with some options, mostly with values of the right kind; an option or the verb may be odd."""
    verb = (
        draw.choice(VERBS)
        if draw.random() < 0.98
        else draw.choice((*_ODD[:12], "benhc", "BENCH", "--version", "--help"))
    )
    if verb not in VERBS:
        return [verb, *draw.sample(_ODD, draw.randrange(3))]
    options = options_of(verb)
    words = [verb, *_positional(draw, verb, user_folder)]
    for option in draw.sample(list(options), min(len(options), draw.choice((0, 1, 1, 2, 3, 5)))):
        words += _option(draw, option, options[option], user_folder)
    if "--device" in options and "--device" not in words and draw.random() < 0.8:
        words += ["--device", "cpu"]
    for option, usual in (("--out", RECORDS), ("--page", "old_page.html")):
        if option in options and option not in words and draw.random() < 0.2:
            words += [option, draw.choice((usual, draw.choice(names(user_folder))))]
    what = draw.randrange(8)
    if what == 0:
        words.insert(draw.randrange(1, len(words) + 1), draw.choice((*_UNKNOWN_OPTIONS, *_ODD)))
    elif what == 1 and len(words) > 1:
        del words[draw.randrange(1, len(words))]
    elif what == 2:
        words += draw.choice(words[1:] or [""]), draw.choice(_ODD)
    return words


def _positional(draw: Draw, verb: str, user_folder: UserFolder) -> list[str]:
    """The files that a verb reads, as words."""
    number = {"sweep": 1, "report": draw.choice((1, 1, 2)), "compare": 2}.get(verb, 0)
    good = [SWEEP] if verb == "sweep" else [RECORDS, OTHER_RECORDS]
    return [draw.choice(good if draw.random() < 0.6 else [*names(user_folder), *DEVICES]) for _ in range(number)]


def _option(draw: Draw, option: str, annotation: Any, user_folder: UserFolder) -> list[str]:
    name = option.strip("-").replace("-", "_")
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    kinds = get_args(kind) if get_origin(kind) is not Literal else ()
    if kind is bool or bool in kinds:
        return [option] if draw.random() < 0.8 else [option, draw.choice(_ODD)]
    if draw.random() < 0.25:
        value = draw.choice((*_ODD, *_NUMBERS))
    elif kind is Path or Path in kinds or name in _WRITTEN:
        others = UNWRITABLE if name in _WRITTEN else DEVICES
        value = draw.choice([*names(user_folder), *others])
    elif choices := _choices(name, kind):
        value = ",".join(draw.sample(choices, min(len(choices), draw.choice((1, 1, 2)))))
    else:
        value = draw.choice(_NUMBERS[:10])
    if name in _WRITTEN and value.startswith(("/dev", "../")):  # files must stay in the folder of the case
        value = "new"
    return [f"{option}={value}"] if draw.random() < 0.2 else [option, value]


def _choices(name: str, kind: Any) -> list[str]:
    """The choices of this field in any config, or the words of a Literal."""
    literals = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
    choices = [str(word) for word in literals]
    for config in CONFIGS.values():
        field = fields_of(config).get(name)
        if field is not None:
            choices += [*map(str, field.metadata.get("choices", ())), *aliases_of(field)]
    return {"model": ["tiny", "small", "8B", "mini", "toy"], "compare": ["context", "dtype", "attention"]}.get(
        name
    ) or choices


def _conditions(draw: Draw, words: list[str]) -> dict[str, Any]:
    """A full disk, a closed output or variables of a launcher, for one command line in ten."""
    what = draw.randrange(30)
    if what == 0:
        return {"largest_file_bytes": draw.choice((0, 100, 4096))}
    if (what == 1 and words[0] in ("report", "compare")) or words == ["--help"]:  # a new Python has the real executors
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
    from trainstep.report.kit.rows import rows_of
    from trainstep.report.page import page

    return page(rows_of([("good.jsonl", a_record())])).encode()
