"""A sweep file: a published table as TOML, read and checked."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.config.fields import check_known
from trainstep.config.grid import check_grid_keys

_MOST_BYTES = 2**20
_KEYS = ("title", "description", "compare", "timeout_s", "grid", "rows")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """`grid`: field -> values, of any workload. `compare`: the axis whose cells take turns in live processes.

    `rows`: fields that go together, as the sizes of a published table's rows do: each adds to the grid, or takes the place of
    its fields. None: the grid alone.

    `timeout_s`: seconds after which a cell that has not finished is killed and recorded as a time-out.
    """

    name: str
    title: str
    grid: Mapping[str, list[Any]]
    rows: tuple[Mapping[str, list[Any]], ...] = ()
    description: str = ""
    compare: str | None = None
    timeout_s: float = 600.0

    def grids(self, overrides: Mapping[str, list[Any]]) -> list[dict[str, list[Any]]]:
        """The grid of each row, under `overrides`; those made alike count once.

        An override takes the place of the grid's values. Of a field that rows give it chooses: rows with one of its values stay.
        ValueError for an unknown field, a value that no row has, and where no row is left.
        """
        grids: list[dict[str, list[Any]]] = [{**self.grid, **row} for row in self.rows or ({},)]
        check_grid_keys({**overrides, "workload": grids[0].get("workload", ["train_step"])}, f"sweep {self.name}")
        of_rows = [name for name in overrides if any(name in row for row in self.rows)]
        overrides = dict(overrides)
        for name in of_rows:
            there = _once(value for grid in grids for value in grid.get(name, ()))
            if "none" in there:  # a choice of that name, which a command line reads as no value
                overrides[name] = ["none" if value is None else value for value in overrides[name]]
            if absent := [value for value in overrides[name] if value not in there]:
                known = ", ".join(map(str, there))
                raise ValueError(f"{name}: no [[rows]] of sweep {self.name} has {absent[0]!r}; they have {known}")
        found: list[dict[str, list[Any]]] = []
        for grid in grids:
            chosen = {name: [value for value in grid.get(name, ()) if value in overrides[name]] for name in of_rows}
            merged = {**grid, **overrides, **chosen}
            if all(chosen.values()) and merged not in found:
                found.append(merged)
        if not found:
            raise ValueError(f"{', '.join(of_rows)}: no [[rows]] of sweep {self.name} has these values together")
        return found


def load_sweep(path: Path) -> SweepConfig:
    """Read a sweep file. ValueError in one sentence for a missing file, bad TOML, an unknown key, a wrong type."""
    return sweep_from_document(load_toml(path, "sweep file"), name=path.stem, where=str(path))


def load_toml(path: Path, kind: str) -> dict[str, Any]:
    """The document of a TOML file, a `kind` of file. ValueError in one sentence for a missing file or bad TOML."""
    text = _text(path, kind)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: not a {kind}: its lists or tables are nested too deeply") from None
    except ValueError as error:  # of TOML, of a date that no calendar has, of a number of more digits than Python reads
        raise ValueError(f"{path}: not TOML: {error}") from None


def _text(path: Path, kind: str) -> str:
    """The file's text. ValueError for what is no file of text or too large: a device has no end, a pipe may have no writer."""
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no regular file"
            raise ValueError(f"{path}: cannot be read: it is {what}; name a TOML file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"{path}: over {_MOST_BYTES:,} bytes, the most that a {kind} may have; cut it in several")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such {kind}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def sweep_from_document(document: Mapping[str, Any], *, name: str, where: str) -> SweepConfig:
    """A SweepConfig from parsed TOML; scalars in [grid] are lists of one."""
    check_known(document, _KEYS, where)
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


def _once(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order; lists, which no set takes, too."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def lists_of(fields: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
    """A scalar is a list of one."""
    lists = {field: value if isinstance(value, list) else [value] for field, value in fields.items()}
    for field, values in lists.items():
        for value in values:
            _check_value(value, f"{where}: {field}")
    return lists


def _check_value(value: Any, where: str) -> None:
    """Refuse what TOML knows and a config does not: dates, tables, nan and inf. Lists are for workloads of one's own."""
    if isinstance(value, list):
        for item in value:
            _check_value(item, where)
    elif not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where}: must be finite numbers, text or true and false, not {value!s}")
