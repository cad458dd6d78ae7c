"""Options from TOML: a verb's own file, and the defaults in ./trainstep.toml, a table a verb and [all] for all of them.

    options_of_file(Path("a.toml"), known)              # context = [128, 256]  ->  {"context": "128,256"}
    default_options("bench", known)                     # [all] steps = 20      ->  {"steps": "20"}

Values become the text that a command line would have, so that both are read and refused alike.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainstep.config.fields import check_known
from trainstep.config.parsing import CONFIGS, fields_of
from trainstep.config.sweep import lists_of, load_toml

DEFAULTS_FILE = Path("trainstep.toml")
ALL = "all"
VERBS = ("bench", "attention", "profile", "numerics", "memory", "parallel", "collectives", "tune")
"""Those that take defaults. A sweep's file says all that it needs, so that it is the same everywhere."""
_OF_ALL = ("timeout_s", "memory_limit_gib", "rounds", "processes", "quiet", "budget_minutes", "json", "all")
"""Options beside fields that [all] may have; each verb takes what it knows."""
_SWITCHES = {"quiet", "resume", "json", "all", "dry_run"}
_PATHS = {"out", "page"}
_NEVER = {
    **dict.fromkeys(
        ("model", "data"), "what is measured must be seen in the command or in the file that --config names"
    ),
    **dict.fromkeys(
        ("out", "page", "keep_trace", "keep_snapshot"), "one command would write over, or into, another's files"
    ),
    **dict.fromkeys(
        ("config", "from", "dry_run", "resume", "retry_failed", "allow_mixed"), "it is for one command alone"
    ),
}
"""Option -> why it is no default."""


def options_of_file(path: Path, known: Collection[str]) -> dict[str, str]:
    """The options in a verb's file. ValueError, naming the nearest, for a key that is none of the verb's."""
    document = load_toml(path, "file of options")
    if "grid" in document:
        raise ValueError(f"{path}: has a table [grid], as sweeps do; run it by trainstep sweep {path}")
    return _texts(document, known, str(path))


def default_options(verb: str, known: Collection[str]) -> dict[str, str]:
    """What ./trainstep.toml gives this verb, its own table over [all]; nothing without that file.

    ValueError for a table or key that is not known, and for an option that is never a default.
    """
    if not DEFAULTS_FILE.exists():
        return {}
    document = load_toml(DEFAULTS_FILE, "file of defaults")
    check_known(document, (ALL, *VERBS), f"{DEFAULTS_FILE}: tables")
    found: dict[str, str] = {}
    fields = {field for config in CONFIGS.values() for field in fields_of(config)}
    for table, keys in ((ALL, {*fields, *_OF_ALL}), (verb, known)):
        where = f"{DEFAULTS_FILE} [{table}]"
        values = document.get(table, {})
        if not isinstance(values, Mapping):
            raise ValueError(f"{DEFAULTS_FILE}: {table}: must be a table [{table}] of options, not {values!r}")
        if never := next((name for name in values if name.replace("-", "_") in _NEVER), None):
            raise ValueError(f"{where}: {never} is never a default: {_NEVER[never.replace('-', '_')]}")
        found |= {name: text for name, text in _texts(values, keys, where).items() if name in known}
    return found


def _texts(values: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, str]:
    """Each value as a command line has it. ValueError for an unknown key, and what is no number, text or switch."""
    named = {name.replace("-", "_"): value for name, value in values.items()}
    check_known(named, sorted(known), where)
    for name in _SWITCHES & named.keys():
        if not isinstance(named[name], bool):
            raise ValueError(f"{where}: {name}: must be true or false, not {named[name]!r}")
    for name in _PATHS & named.keys():
        if not isinstance(named[name], str):
            raise ValueError(f"{where}: {name}: must be one path, not {named[name]!r}")
    return {name: ",".join(map(_word, value)) for name, value in lists_of(named, where).items()}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
