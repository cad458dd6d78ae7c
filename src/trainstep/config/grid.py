"""Lists make a grid: commas on the command line and lists in TOML expand alike, first field outermost."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainstep.config.cell import Cell
from trainstep.config.fields import check_known
from trainstep.config.parallel import RanksConfig
from trainstep.config.parsing import CONFIGS, build_config, fields_of, parse_value, to_plain
from trainstep.config.sync import OF_A_STRATEGY, needless

Grid = Mapping[str, Sequence[Any]]
_MOST_CELLS = 100_000


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
    """The cells of several grids, in order; what differs between the grids is part of each cell's point."""
    names = dict.fromkeys(name for grid in grids for name in grid)
    differing = {name for name in names if any(grid.get(name) != grids[0].get(name) for grid in grids)}
    cells = [cell for grid in grids for cell in expand(grid, defaults, named=differing)]
    return list({cell.key: cell for cell in cells}.values())


def expand(grid: Grid, defaults: Mapping[str, Any], *, named: Collection[str] = ()) -> list[Cell]:
    """Every combination of the grid's values as a validated cell; `defaults` fill fields the grid does not name.

    The key `workload` chooses what is measured (default train_step). A cell's point has the fields of several values, and those
    `named`. Raises ValueError naming the field and the cell.
    """
    for name, values in grid.items():
        if not values:
            raise ValueError(f"{name}: an empty list makes an empty grid")
    count = math.prod(map(len, grid.values()))
    if count > _MOST_CELLS:
        raise ValueError(f"the grid has {count:,} cells, and {_MOST_CELLS:,} is the most; give its fields fewer values")
    varied = [name for name, values in grid.items() if len(values) > 1 or name in named]
    cells: dict[str, Cell] = {}
    for combination in itertools.product(*grid.values()):
        chosen = dict(zip(grid, combination, strict=True))
        point = {
            name: "none" if value is None else value
            for name, value in chosen.items()
            if name in varied or name == "model"
        }
        try:
            cell = _cell(chosen, defaults, point)
        except ValueError as error:
            where = ", ".join(f"{name}={value}" for name, value in point.items())
            raise ValueError(f"{error} (in the cell {where})" if len(grid) > 1 and varied else str(error)) from None
        cells.setdefault(cell.key, cell)
    return list(cells.values())


def groups_along(cells: Sequence[Cell], axis: str | None) -> list[list[Cell]]:
    """Cells that differ only along `axis`, together, in the grid's order; without an axis, each alone.

    Along `sync`, parallel strategies are together with all their options. ValueError if nothing varies along it.
    """
    if axis is None:
        return [[cell] for cell in cells]
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        along = OF_A_STRATEGY if axis == "sync" else {axis}
        rest = tuple((name, str(value)) for name, value in cell.point.items() if name not in along)
        groups.setdefault(rest, []).append(cell)
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
    idle = _idle(workload, values)
    fields = {name: value for name, value in values.items() if name != "workload" and name not in idle}
    if workload in CONFIGS:
        config = to_plain(build_config(workload, {**defaults, **fields}))
    elif ":" in workload:
        config = {**defaults, **fields}
    else:
        raise ValueError(f"workload: {workload!r} is not known; known: {', '.join(CONFIGS)}, or package.module:object")
    point = {name: value for name, value in point.items() if name not in idle}
    return Cell(workload=workload, config=config, point=_as_recorded(point, config) or {"workload": workload})


def _idle(workload: str, values: Mapping[str, Any]) -> frozenset[str]:
    """Options of parallel strategies that this cell does not have: where one rank is the default, and taken, all."""
    config = CONFIGS.get(workload)
    if config is None or not issubclass(config, RanksConfig):
        return frozenset()
    fields = fields_of(config)
    given = {name: fields[name].default for name in ("ranks", "sync")} | dict(values)
    on_its_own = given["ranks"] == fields["ranks"].default == 1
    return OF_A_STRATEGY if on_its_own else needless(given)


def _as_recorded(point: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The point with names as the config has them: a choice may have two."""
    texts = {name: value for name, value in config.items() if isinstance(value, str)}
    return {name: texts.get(name, value) if isinstance(value, str) else value for name, value in point.items()}


def check_grid_keys(grid: Grid, where: str) -> None:
    """Refuse a key that is no field, naming the nearest, unless a workload of the user's own may know it."""
    workloads = [str(name) for name in grid.get("workload", ["train_step"])]
    if all(name in CONFIGS for name in workloads):
        check_known(grid, ["workload", *(field for name in workloads for field in fields_of(CONFIGS[name]))], where)
