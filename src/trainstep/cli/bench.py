"""`trainstep bench`: time the training step of one model, or of a grid of models."""

from collections.abc import Mapping
from typing import Any

from trainstep.cli.options import (
    GridOptions,
    check_cells,
    check_compared,
    check_gpus,
    check_nodes,
    limits,
    this_machine,
    with_fields,
)
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.run import BenchConfig
from trainstep.records.record import Environment


@with_fields(BenchConfig)
def bench(
    *,
    compare: str | None = None,
    preset: str | None = None,
    allow_precision: str | None = None,
    processes: int | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time forward, backward and optimizer of a training step. Each cell of the grid runs in its own process.

    With --ranks, or over several nodes, a cell runs in several processes, on a GPU each, that take the step at the same time,
    each by itself. The record has every process, and the answer names the slowest.

    Without options: a tiny model on a CPU, small at context 256 on a GPU.

    Examples:

        trainstep bench

        trainstep bench --model small,medium --context 128,256 --precision bf16_autocast

        trainstep bench --model small --compare attention --attention plain,sdpa --steps 20

        trainstep bench --model small --adamw trainstep --compare capture --capture none,step

        trainstep bench --model medium --recompute-budget-gib 20

        trainstep bench --model my_package.my_module:build --page report.html

        srun --nodes 4 --ntasks-per-node 1 --gpus-per-node 8 trainstep bench --model medium

        trainstep bench --model small --preset fastest --allow-precision bf16_autocast --budget-minutes 30

    Parameters
    ----------
    compare
        The option whose values are compared: their processes are interleaved, so that drift affects all values equally.
    preset
        fastest: search the options with which the step of each --model is fastest in one process here, from the given ones on.
        One change at a time (capture, compile, AdamW, attention, fused ops, recomputation) is tried, its losses are checked, and
        it is kept if it is faster than the best so far. The result is a TOML file for --config, beside the records in
        runs/preset-fastest.jsonl or --out. The same command goes on where it stopped.
    allow_precision
        The precisions that --preset may try, as bf16_autocast,bf16_master; by default only the one of --precision.
    processes
        Fresh processes for each compared variant, which a verdict compares as pairs; by default 12, or as many as fit into a
        minute, but at least 6, and up to 24 where the machine is noisy; 6 in a preset with --budget-minutes. A process takes all
        --steps if they last under a second, else its share of them.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        GiB of memory that a CPU cell may use; by default 90 % of the machine's.
    """
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    _check_preset(preset, compare, allow_precision, grid)
    bounds = limits(timeout_s, memory_limit_gib, processes=processes, nodes=how.nodes)
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    grid = {"model": ["small" if device == "cuda" else "tiny"], **grid}
    if preset is None:
        grid = _with_ranks(grid, device, here, how)
    check_gpus(grid.get("ranks", ()), device, here, verb="bench", nodes=grid.get("nodes", [1]))
    cells = expand(grid, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    check_nodes(cells, how, here)
    if preset is not None:
        from trainstep.cli.running.preset import run_presets

        return run_presets(grid, fields.get("device"), device, allow_precision, bounds, how, here)
    groups = groups_along(cells, compare)
    check_compared(bounds, groups)

    from trainstep.cli.cells import measure_grid

    return measure_grid(groups, "bench", bounds, how, here, compare=compare)


def _with_ranks(
    grid: Mapping[str, list[Any]], device: str, here: Environment, how: GridOptions
) -> dict[str, list[Any]]:
    """The grid, by default over every node of this launch, with a process for each of its GPUs, or for each node on CPUs."""
    if how.nodes is None and "nodes" not in grid:
        return dict(grid)
    nodes = grid.get("nodes", [1 if how.nodes is None else len(how.nodes)])
    most = max((count for count in nodes if isinstance(count, int) and count > 0), default=1)
    on_each = max(here.gpu_count, 1) if device == "cuda" else 1
    return {**grid, "ranks": grid.get("ranks", [most * on_each]), "nodes": nodes}


def _check_preset(
    preset: str | None, compare: str | None, allow_precision: str | None, grid: Mapping[str, list[Any]]
) -> None:
    """ValueError for an unknown preset, and for options that contradict it."""
    if preset is None:
        if allow_precision is not None:
            raise ValueError("allow_precision: has no effect without --preset fastest; leave it out")
        return
    if preset != "fastest":
        raise ValueError(f"preset: {preset!r} is not known; known: fastest")
    if compare is not None:
        raise ValueError("compare: --preset chooses itself what is compared; leave one of the two out")
    if several := next((name for name in ("ranks", "nodes") if grid.get(name, [1]) != [1]), None):
        raise ValueError(f"{several}: --preset searches in one process; leave {several} out")
