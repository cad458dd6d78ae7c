"""`trainstep op`: how fast one op beside attention is here, against other implementations, and whether it is right."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.cli.options import GridOptions, check_cells, is_installed, limits, this_machine, with_fields
from trainstep.config.grid import expand_all, grid_from_text, groups_along
from trainstep.config.op import HAVE, OPS, PACKAGES, OpConfig, fields_without_effect

_ON_A_CPU = "On a CPU, trainstep runs the reference in plain PyTorch: the kernels are not measured."
_NOT_ON_A_CPU = ("eager", "compile", *PACKAGES)
"""Left out on a CPU unless requested: eager is what trainstep runs there, and to compile takes longer than everything else."""
_DEFAULTS: dict[str, dict[str, list[Any]]] = {"cpu": {"steps": [10]}, "cuda": {"dtype": ["bf16"]}}
_IN_HELP: dict[str, dict[str, list[Any]]] = {
    device: {**fields, "implementation": ["all that run here"]} for device, fields in _DEFAULTS.items()
}
_IN_HELP["cuda"]["dtype"] = ["bf16, of adamw fp32"]


@with_fields(OpConfig, _IN_HELP)
def op(
    op: str | None = None,
    *,
    compare: str | None = None,
    timeout_s: float = 600.0,
    memory_limit_gib: float | None = None,
    how: GridOptions = GridOptions(),
    **fields: str | None,
) -> int:
    """Time implementations of one op on the same inputs, with their rate, memory and error, and the kernels that ran.

    Without options: every implementation that runs here, forward and backward together. On a GPU the sizes are those of published
    comparisons. An implementation that cannot run a case, or runs out of memory, is a cell with its reason. liger, quack and cudnn
    run where the packages liger-kernel, quack-kernels and nvidia-cudnn-frontend are installed.

    The loss (linear_cross_entropy) may compute its gradients in forward, as ours and liger's do: compare implementations of it
    over both passes.

    Examples:

        trainstep op rms_norm

        trainstep op rms_norm,swiglu --width 4096,8192 --dtype bf16 --direction forward,backward

        trainstep op rotary --compare implementation --implementation trainstep,liger,eager --steps 40

        trainstep op linear_cross_entropy --tokens 2048 --width 512 --vocabulary 32000 --implementation trainstep,eager

    Parameters
    ----------
    op
        rms_norm, add_rms_norm (with the residual addition before it), rotary, swiglu, linear_cross_entropy, adamw; several with
        commas; by default all.
    compare
        The option whose values are compared: their processes are interleaved, so that drift affects all values equally.
    timeout_s
        Seconds after which a cell is killed and recorded as a time-out.
    memory_limit_gib
        GiB of memory that a CPU cell may use; by default 90 % of the machine's.
    """
    grid = grid_from_text({name: text for name, text in fields.items() if name != "device"})
    ops = grid_from_text({"op": op}).get("op", list(OPS))
    bounds = limits(timeout_s, memory_limit_gib)
    here, device = this_machine(fields.get("device"), forks=not how.dry_run)
    cells = expand_all(grids_of(ops, grid, device), {"device": device})
    check_cells(cells, memory_limit_gib=memory_limit_gib)
    groups = groups_along(cells, compare)

    from trainstep.cli.cells import measure_grid

    code = measure_grid(groups, "op", bounds, how, here, compare=compare)
    on_cpu = any((cell.config["device"], cell.config["implementation"]) == ("cpu", "trainstep") for cell in cells)
    if on_cpu and not how.dry_run:
        print(_ON_A_CPU, file=sys.stderr if how.json else sys.stdout)
    return code


def grids_of(ops: Sequence[Any], grid: Mapping[str, list[Any]], device: str) -> list[dict[str, list[Any]]]:
    """A grid for each op, completed with its defaults. A field that only some of the ops have is left out for the others."""
    without_effect = {name: fields_without_effect(str(name)) for name in ops}
    used_by_none = frozenset.intersection(*without_effect.values())  # kept, so that the config refuses it
    grids = []
    for name in ops:
        defaults = {**_DEFAULTS[device], **({"dtype": ["fp32"]} if name == "adamw" else {})}
        own = {
            field: values
            for field, values in grid.items()
            if field not in without_effect[name] or field in used_by_none
        }
        implementations = grid.get("implementation") or runnable(str(name), device)
        grids.append({"workload": ["op"], "op": [name], **defaults, **own, "implementation": implementations})
    return grids


def runnable(op: str, device: str) -> list[str]:
    """Implementations that can run the op here."""
    absent = [name for name, (package, _) in PACKAGES.items() if not is_installed(package)]
    left_out = _NOT_ON_A_CPU if device == "cpu" else absent
    return [name for name, ops in HAVE.items() if name not in left_out and (op in ops or op not in OPS)]
