"""Read sweep files (a published table as TOML) and files of options.

    load_sweep(Path("sweeps/warmup.toml")).grids({})
    options_of_file(Path("a.toml"), known)   # context = [128, 256]  ->  {"context": "128,256"}
    default_options("bench", known)          # [all] steps = 20 in ./trainstep.toml  ->  {"steps": "20"}

Options come from a verb's own file, and their defaults from ./trainstep.toml, which has a table for each verb and [all] for all
verbs. Values become the text that a command line would have, so that both are read and refused in the same way.
"""

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.config.fields import check_known
from trainstep.config.grid import check_grid_keys
from trainstep.config.parsing import CONFIGS, fields_of

DEFAULTS_FILE = Path("trainstep.toml")
ALL = "all"
VERBS = (
    *("bench", "attention", "op", "profile", "explain", "numerics", "memory", "parallel", "collectives", "tune"),
    "plan",
)
"""The verbs that take options from files. A sweep does not: its file says all that it needs, so that it is the same everywhere."""
_MOST_BYTES = 2**20
_SWEEP_KEYS = ("title", "description", "compare", "timeout_s", "grid", "rows")
_OPTIONS_OF_ALL = ("timeout_s", "memory_limit_gib", "rounds", "processes", "quiet", "budget_minutes", "json", "all")
"""Options that [all] may have besides config fields; each verb takes the options that it knows."""
_SWITCHES = {"quiet", "resume", "json", "all", "dry_run", "allow_mixed"}
_PATHS = {"out", "page"}
_NEVER = {
    **dict.fromkeys(("model", "data"), "the command, or the file that --config names, must show what is measured"),
    **dict.fromkeys(
        ("out", "page", "keep_trace", "keep_snapshot"), "one command would write over, or into, the files of another"
    ),
    **dict.fromkeys(("config", "from", "dry_run", "resume", "retry_failed", "allow_mixed"), "it is for one command"),
}
"""Option -> why it cannot be a default."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep.

    `grid`: field -> values, for any workload. `rows`: fields that belong together, such as the sizes in the rows of a published
    table; each row adds to the grid or replaces its fields; without rows, there is only the grid. `compare`: the axis whose cells
    are interleaved in live processes. `timeout_s`: seconds after which an unfinished cell is killed and recorded as a time-out.
    """

    name: str
    title: str
    grid: Mapping[str, list[Any]]
    rows: tuple[Mapping[str, list[Any]], ...] = ()
    description: str = ""
    compare: str | None = None
    timeout_s: float = 600.0

    def grids(self, overrides: Mapping[str, list[Any]]) -> list[dict[str, list[Any]]]:
        """The grid of each row with `overrides` applied; equal grids count once.

        An override replaces the grid's values. If rows give the field, the override selects rows: those with one of its values
        stay. ValueError for an unknown field, a value that no row has, or if no row is left.
        """
        grids: list[dict[str, list[Any]]] = [{**self.grid, **row} for row in self.rows or ({},)]
        check_grid_keys({**overrides, "workload": grids[0].get("workload", ["train_step"])}, f"sweep {self.name}")
        selecting = [name for name in overrides if any(name in row for row in self.rows)]
        overrides = dict(overrides)
        for name in selecting:
            known = _distinct(value for grid in grids for value in grid.get(name, ()))
            if "none" in known:  # a choice of that name, which the command line reads as None
                overrides[name] = ["none" if value is None else value for value in overrides[name]]
            if unknown := [value for value in overrides[name] if value not in known]:
                names = ", ".join(map(str, known))
                raise ValueError(f"{name}: no [[rows]] of sweep {self.name} has {unknown[0]!r}; they have {names}")
        merged_grids: list[dict[str, list[Any]]] = []
        for grid in grids:
            selected = {name: [value for value in grid.get(name, ()) if value in overrides[name]] for name in selecting}
            merged = {**grid, **overrides, **selected}
            if all(selected.values()) and merged not in merged_grids:
                merged_grids.append(merged)
        if not merged_grids:
            raise ValueError(f"{', '.join(selecting)}: no [[rows]] of sweep {self.name} has these values together")
        return merged_grids


def load_sweep(path: Path) -> SweepConfig:
    """Read a sweep file. ValueError in one sentence for a missing file, bad TOML, an unknown key or a wrong type."""
    return sweep_from_document(load_toml(path, "sweep file"), name=path.stem, where=str(path))


def load_toml(path: Path, kind: str) -> dict[str, Any]:
    """The document of a TOML file. ValueError in one sentence, with `kind` as the name of such files, if it cannot be read."""
    text = _read_text(path, kind)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: not a {kind}: its lists or tables are nested too deeply") from None
    except ValueError as error:  # bad TOML, an impossible date, or a number with more digits than Python reads
        raise ValueError(f"{path}: not TOML: {error}") from None


def _read_text(path: Path, kind: str) -> str:
    try:
        if path.exists() and not path.is_file():  # a device may have no end, and a pipe no writer
            actual = "a folder" if path.is_dir() else "not a regular file"
            raise ValueError(f"{path}: cannot be read: it is {actual}; name a TOML file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"{path}: over {_MOST_BYTES:,} bytes, the limit of a {kind}; split it into several")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such {kind}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not TOML, which is text in UTF-8: byte {error.start + 1} is not") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def sweep_from_document(document: Mapping[str, Any], *, name: str, where: str) -> SweepConfig:
    """A SweepConfig from parsed TOML; a scalar in [grid] is a list with one value."""
    check_known(document, _SWEEP_KEYS, where)
    grid = document.get("grid")
    if not isinstance(grid, dict) or not grid:
        raise ValueError(f"{where}: needs a table [grid] with at least one field")
    lists = lists_of(grid, f"{where} [grid]")
    rows = document.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row for row in rows):
        raise ValueError(f"{where}: rows: must be tables [[rows]] of fields")
    row_lists = tuple(lists_of(row, f"{where} [[rows]]") for row in rows)
    for row in row_lists or ({},):
        check_grid_keys(lists | row, f"{where} [grid]" + (" with [[rows]]" if row else ""))
    timeout_s = document.get("timeout_s", 600.0)
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
        raise ValueError(f"{where}: timeout_s: must be a positive number of seconds, not {timeout_s!r}")
    for key in ("title", "description", "compare"):
        if key in document and not isinstance(document[key], str):
            raise ValueError(f"{where}: {key}: must be text, not {document[key]!r}")
    return SweepConfig(
        name=name,
        title=document.get("title", name),
        description=document.get("description", ""),
        grid=lists,
        rows=row_lists,
        compare=document.get("compare"),
        timeout_s=float(timeout_s),
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The different values, in order. They may be lists, which a set cannot have."""
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def lists_of(fields: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
    """Field -> list of its values; a scalar becomes a list with one value. ValueError for values that a config cannot have."""
    lists = {field: value if isinstance(value, list) else [value] for field, value in fields.items()}
    for field, values in lists.items():
        for value in values:
            _check_value(value, f"{where}: {field}")
    return lists


def _check_value(value: Any, where: str) -> None:
    """ValueError for values that TOML has and configs do not: dates, tables, nan and inf."""
    if isinstance(value, list):  # a user's workload may take lists
        for item in value:
            _check_value(item, where)
    elif not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where}: must be finite numbers, text or true and false, not {value!s}")


def options_of_file(path: Path, known: Collection[str]) -> dict[str, str]:
    """The options in a verb's file. ValueError, naming the nearest option, for a key that the verb does not have."""
    document = load_toml(path, "file of options")
    if "grid" in document:
        raise ValueError(f"{path}: has a table [grid], as sweeps do; run it by trainstep sweep {path}")
    return _texts(document, known, str(path))


def default_options(verb: str, known: Collection[str]) -> dict[str, str]:
    """The verb's options in ./trainstep.toml, where its own table overrides [all]; empty without that file.

    ValueError for an unknown table or key, and for an option that cannot be a default.
    """
    if not DEFAULTS_FILE.exists():
        return {}
    document = load_toml(DEFAULTS_FILE, "file of defaults")
    check_known(document, (ALL, *VERBS), f"{DEFAULTS_FILE}: tables")
    options: dict[str, str] = {}
    fields = {field for config in CONFIGS.values() for field in fields_of(config)}
    for table, keys in ((ALL, {*fields, *_OPTIONS_OF_ALL}), (verb, known)):
        where = f"{DEFAULTS_FILE} [{table}]"
        values = document.get(table, {})
        if not isinstance(values, Mapping):
            raise ValueError(f"{DEFAULTS_FILE}: {table}: must be a table [{table}] of options, not {values!r}")
        if never := next((name for name in values if name.replace("-", "_") in _NEVER), None):
            raise ValueError(f"{where}: {never} cannot be a default: {_NEVER[never.replace('-', '_')]}")
        options |= {name: text for name, text in _texts(values, keys, where).items() if name in known}
    return options


def _texts(values: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, str]:
    """The values as text of a command line. ValueError for an unknown key, and for a value that is not a number, text or switch."""
    named = {name.replace("-", "_"): value for name, value in values.items()}
    check_known(named, sorted(known), where)
    for name in _SWITCHES & named.keys():
        if not isinstance(named[name], bool):
            raise ValueError(f"{where}: {name}: must be true or false, not {named[name]!r}")
    for name in _PATHS & named.keys():
        if not isinstance(named[name], str):
            raise ValueError(f"{where}: {name}: must be one path, not {named[name]!r}")
    return {
        name: ",".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        for name, values in lists_of(named, where).items()
    }
