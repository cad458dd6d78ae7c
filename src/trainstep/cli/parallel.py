"""`trainstep parallel`: which parallel strategy is fastest here, and whether its communication is hidden."""

from collections.abc import Mapping
from typing import Any

from trainstep.cli.options import (
    GridOptions,
    check_cells,
    check_compared,
    check_gpus,
    check_nodes,
    check_sync_options,
    limits,
    this_machine,
    with_fields,
    with_nodes,
)
from trainstep.config.grid import expand, grid_from_text, groups_along
from trainstep.config.parallel import OURS, USED_BY, ParallelConfig
from trainstep.costs.strategies import BASELINE
from trainstep.records.record import Environment

_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "cpu": {"model": ["tiny"], "context": [64], "sync": list(OURS), "ranks": [2]},
    "cuda": {"model": ["small"], "context": [256], "sync": list(OURS)},
}
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    "cpu": {name: values for name, values in _DEFAULTS["cpu"].items() if name != "model"},
    "cuda": {"sync": list(OURS), "context": [256], "ranks": ["all GPUs"]},
}


@with_fields(ParallelConfig, _IN_HELP)
def parallel(
    *,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    rounds: int | None = None,
    processes: int | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time a training step on several ranks under each parallel strategy, with its messages, exposed communication and memory.

    The strategies of one model and context are interleaved. Ratios are relative to the strategy none (each rank trains for
    itself), so include it. Bucket sizes multiply the strategies that have buckets. batch_size is per rank. Beside the time:
    messages and bytes compared with the formula, exposed communication, and memory at four points of a step compared with the
    formula. Replicas are compared bit by bit: a divergence is a failure that names parameter and rank.
    Without options: a tiny model and two processes on the CPU; with several GPUs, small at context 256 on all of them.

    Examples:

        trainstep parallel

        trainstep parallel --model xl --ranks 2 --precision bf16_autocast --compile block --sync none,bucketed,flat,fsdp,torch_ddp

        trainstep parallel --model medium --sync none,bucketed,torch_ddp --bucket-mib 1,10,25,100,1000 --page report.html

        trainstep parallel --device cpu --model mini --ranks 4 --sync none,sharded,sharded_flat,fsdp --keep-trace traces

        trainstep parallel --model xl --ranks 2 --sync bucketed,fsdp --recompute-budget-gib 60

        srun --nodes 2 --ntasks-per-node 1 trainstep parallel --model xl --nodes 1,2 --ranks 8 --sync none,bucketed,fsdp

    Parameters
    ----------
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        GiB of memory that a CPU cell may use, all its ranks of a node together; by default 90 % of the machine's.
    rounds
        Run compared variants in this many rounds of whole processes, with steps rounded up; by default their processes live side
        by side, or 5 rounds if not all fit.
    processes
        Fresh processes for each compared variant, which a verdict compares as pairs; by default 12, or as many as fit into a
        minute, but at least 6, and up to 24 where the machine is noisy. A process takes all --steps if they last under a second,
        else its share of them.
    """
    options = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    bounds = limits(timeout_s, memory_limit_gib, rounds, processes, how.nodes)
    here, device = this_machine(fields.get("device"), forks=False)
    if fields.get("device") is None and "ranks" not in options and here.gpu_count < 2 and how.nodes is None:
        device = "cpu"
    grid = _with_defaults(with_nodes(options, device, here, how.nodes), device, here)
    check_sync_options(options, grid["sync"])
    check_gpus(grid["ranks"], device, here, verb="parallel", nodes=grid.get("nodes", [1]))
    cells = expand({"workload": ["parallel"], **grid}, {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    check_nodes(cells, how, here)
    groups = groups_along(cells, "sync" if len(cells) > 1 and len(grid["sync"]) > 1 else None)
    check_compared(bounds, groups)

    from trainstep.cli.cells import measure_grid

    return measure_grid(groups, "parallel", bounds, how, here, kept_files="keep_trace")


def _with_defaults(options: Mapping[str, list[Any]], device: str, here: Environment) -> dict[str, list[Any]]:
    """The grid, completed with defaults. The baseline is the first strategy; strategies and their options vary innermost."""
    grid = {**_DEFAULTS[device], **({"ranks": [here.gpu_count]} if device == "cuda" else {}), **options}
    strategies = {str(name) if name is not None else BASELINE: None for name in grid["sync"]}
    strategy_options = {name: values for name, values in grid.items() if name in USED_BY}
    rest = {name: values for name, values in grid.items() if name not in (*USED_BY, "sync")}
    return {**rest, "sync": sorted(strategies, key=lambda name: name != BASELINE), **strategy_options}
