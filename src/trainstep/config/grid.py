"""A grid of field values, from commas on the command line or lists in TOML, and the cells that it expands to.

    expand({"model": ["small"], "context": [128, 256]}, defaults)   # two cells, the first field outermost

A cell is one point of a grid, measured on its own: executors pass it around, and a record answers it.
"""

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.fields import check_known
from trainstep.config.parallel import STRATEGY_FIELDS, RanksConfig, needless
from trainstep.config.parsing import CONFIGS, build_config, config_hash, fields_of, parse_value, to_plain

Grid = Mapping[str, Sequence[Any]]
_MOST_CELLS = 100_000


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of a grid.

    `workload`: `train_step`, `attention`, `ceiling`..., or package.module:object for a user's workload. `config`: validated plain
    JSON values. `point`: the flat values that the grid gave, for progress lines and to find the cells that differ along one axis.
    """

    workload: str
    config: Mapping[str, Any]
    point: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Identifies the cell in a store, whichever sweep it came from."""
        return config_hash(self.workload, self.config)

    @property
    def label(self) -> str:
        """The grid's values in its order: `small, context 256, bf16`. Numbers get their field's name; names need none."""
        words = [
            value if isinstance(value, str) and value != "none" else f"{name} {value}"
            for name, value in self.point.items()
        ]
        return ", ".join(words) or self.workload


def grid_from_text(options: Mapping[str, str | bool | None]) -> dict[str, list[Any]]:
    """{'context': '128,256'} -> {'context': [128, 256]}; options left at None are absent."""
    given = {name: str(text) for name, text in options.items() if text is not None}
    for name, text in given.items():
        if not all(word.strip() for word in text.split(",")):
            raise ValueError(f"{name}: an empty value in {text!r}; write it as a,b,c")
    return {name: [parse_value(word.strip()) for word in text.split(",")] for name, text in given.items()}


def grid_from_settings(settings: Sequence[str]) -> dict[str, list[Any]]:
    """['dtype=bf16', 'head-dim=64,128'] -> {'dtype': ['bf16'], 'head_dim': [64, 128]}. ValueError for anything else."""
    texts: dict[str, str | bool | None] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not (name and equals):
            raise ValueError(f"set: {setting!r} is not field=value; write it as --set dtype=bf16 --set seq=1024,4096")
        if name in texts:
            raise ValueError(f"set: {name} is given twice; write its values as --set {name}=a,b")
        texts[name] = text
    return grid_from_text(texts)


def expand_all(grids: Sequence[Grid], defaults: Mapping[str, Any]) -> list[Cell]:
    """The cells of several grids, in order. Fields that differ between the grids are part of each cell's point."""
    names = dict.fromkeys(name for grid in grids for name in grid)
    differing = {name for name in names if any(grid.get(name) != grids[0].get(name) for grid in grids)}
    cells = [cell for grid in grids for cell in expand(grid, defaults, named=differing)]
    return list({cell.key: cell for cell in cells}.values())


def expand(grid: Grid, defaults: Mapping[str, Any], *, named: Collection[str] = ()) -> list[Cell]:
    """Every combination of the grid's values as a validated cell; `defaults` fill the fields that the grid does not name.

    The key `workload` chooses what is measured (default train_step). A cell's point has the fields with several values, and the
    fields in `named`. ValueError names the field and the cell.
    """
    for name, values in grid.items():
        if not values:
            raise ValueError(f"{name}: an empty list makes an empty grid")
    count = math.prod(map(len, grid.values()))
    if count > _MOST_CELLS:
        raise ValueError(f"the grid has {count:,} cells; the limit is {_MOST_CELLS:,}: give its fields fewer values")
    varied = [name for name, values in grid.items() if len(values) > 1 or name in named]
    cells: dict[str, Cell] = {}
    for combination in itertools.product(*grid.values()):
        flat = dict(zip(grid, combination, strict=True))
        point = {
            name: "none" if value is None else value
            for name, value in flat.items()
            if name in varied or name == "model"
        }
        try:
            cell = _cell(flat, defaults, point)
        except ValueError as error:
            where = ", ".join(f"{name}={value}" for name, value in point.items())
            raise ValueError(f"{error} (in the cell {where})" if len(grid) > 1 and varied else str(error)) from None
        cells.setdefault(cell.key, cell)
    return list(cells.values())


def groups_along(cells: Sequence[Cell], axis: str | None) -> list[list[Cell]]:
    """Groups of cells that differ only along `axis`, in the grid's order; without an axis, each cell is its own group.

    `sync` as axis means a parallel strategy with all its options. ValueError if no cells differ along the axis.
    """
    if axis is None:
        return [[cell] for cell in cells]
    axis_fields = STRATEGY_FIELDS if axis == "sync" else {axis}
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        others = tuple((name, str(value)) for name, value in cell.point.items() if name not in axis_fields)
        groups.setdefault(others, []).append(cell)
    if all(len(group) == 1 for group in groups.values()):
        varied = sorted({name for cell in cells for name in cell.point})
        raise ValueError(
            f"compare: the grid does not vary along {axis!r}; it varies along {', '.join(varied) or 'nothing'}"
        )
    return list(groups.values())


def _cell(values: Mapping[str, Any], defaults: Mapping[str, Any], point: Mapping[str, Any]) -> Cell:
    workload = values.get("workload", "train_step")
    if not isinstance(workload, str):
        raise ValueError(f"workload: must be a name or package.module:object, not {workload!r}")
    ignored = _ignored_options(workload, values)
    fields = {name: value for name, value in values.items() if name != "workload" and name not in ignored}
    if workload in CONFIGS:
        config = to_plain(build_config(workload, {**defaults, **fields}))
    elif ":" in workload:
        config = {**defaults, **fields}
    else:
        raise ValueError(f"workload: {workload!r} is not known; known: {', '.join(CONFIGS)}, or package.module:object")
    point = {name: value for name, value in point.items() if name not in ignored}
    # The config has a choice's recorded name where the user wrote its second name; the point must show the same name.
    texts = {name: value for name, value in config.items() if isinstance(value, str)}
    point = {name: texts.get(name, value) if isinstance(value, str) else value for name, value in point.items()}
    return Cell(workload=workload, config=config, point=point or {"workload": workload})


def _ignored_options(workload: str, values: Mapping[str, Any]) -> frozenset[str]:
    """Options of parallel strategies without meaning in this cell: all of them if the workload's default of one rank is used."""
    config = CONFIGS.get(workload)
    if config is None or not issubclass(config, RanksConfig):
        return frozenset()
    fields = fields_of(config)
    values = {name: fields[name].default for name in ("ranks", "sync")} | dict(values)
    single_rank = values["ranks"] == fields["ranks"].default == 1
    return STRATEGY_FIELDS if single_rank else needless(values)


def check_grid_keys(grid: Grid, where: str) -> None:
    """ValueError for a key that is not a field, naming the nearest field. A user's workload may have any fields."""
    workloads = [str(name) for name in grid.get("workload", ["train_step"])]
    if all(name in CONFIGS for name in workloads):
        check_known(grid, ["workload", *(field for name in workloads for field in fields_of(CONFIGS[name]))], where)


def group_name(group: Sequence[Cell]) -> str:
    """The key of a single cell, else a hash of all keys, in any order: a cell measured alone and interleaved is different work."""
    if len(group) == 1:
        return group[0].key
    return hashlib.sha256(" ".join(sorted(cell.key for cell in group)).encode()).hexdigest()[:16]
