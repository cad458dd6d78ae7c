"""The options of verbs that run cells, and their checks. Config fields become options without further code here.

`@with_fields(AttentionConfig)` gives a verb an option for each field of that config; a parameter `how: GridOptions` gives it the
options that say how cells are run.
"""

import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from trainstep.config.fields import aliases_of
from trainstep.config.grid import grid_from_text
from trainstep.config.model import ModelConfig, size_names
from trainstep.config.parallel import USED_BY
from trainstep.config.parsing import CONFIGS, fields_of
from trainstep.config.run import RunConfig
from trainstep.config.text_files import check_length
from trainstep.costs.strategies import BASELINE
from trainstep.reading import ReadLimits
from trainstep.records.record import Environment
from trainstep.records.store import Store, new_records_path

if TYPE_CHECKING:
    from trainstep.config.grid import Cell
    from trainstep.measure.harness.nodes import Nodes
    from trainstep.measure.harness.runner import Limits

Verb = TypeVar("Verb", bound=Callable[..., Any])
EveryColumn = Annotated[
    bool,
    Parameter(
        name="--all",
        help="Show every column on a terminal and in plain text, which otherwise show few; other formats always have them all.",
        negative=(),
        show_default=False,
    ),
]
Defaults = Mapping[str, Mapping[str, Sequence[Any]]]
"""Device -> field -> the verb's default values, which replace the config's default."""
TIMEOUT_S = 600.0
_LARGEST_LIMIT = 2e6
"""Largest limit, in seconds or GiB: 23 days. Beyond 2^31 ms the operating system's clocks overflow."""
_GRID = Group("What to run (commas make a grid, except for switches)", sort_key=1)
_ALL_GRID = Group("What to run (commas make a grid)", sort_key=1)
_SHAPE = Group("The built-in model's shape, instead of its size's", sort_key=2)
_HOW = Group("How to run it", sort_key=4)
SLURM = Group("On a Slurm cluster", sort_key=3)
ARGUMENTS_HELP = (
    "More options of sbatch as key=value,key=value: account, qos, constraint, cpus_per_task, mem; exclusive=true."
)
_PARTITION_HELP = (
    "Run this command in this partition, on as many nodes as --nodes says, by srun, which waits for them. The nodes must see this "
    "folder and this Python."
)
_GPUS_HELP = "GPUs of each node; 0: run on CPUs [1, or with --ranks a node's share of them]."
_OWN_HELP = {
    "model": f"sizes: {', '.join(size_names())}; or your own: package.module:function, installed or in this folder",
    "device": "device to run on: cpu or cuda; by default the GPU, if there is one",
}
_OUT_HELP = "File of records to append to; by default a new file in ./runs/."
_PAGE_HELP = "Also write the page to this file. It may replace an earlier page of trainstep, but no other file."
_JSON_HELP = "Print JSON: `answer`, and the tables as `rows` with plain numbers and units in the names."
_BUDGET_HELP = (
    "Start no further cell (or group of compared variants) that would end after this many minutes, estimated from the cells that "
    "ran; the first always runs. What is left is then reported with the command that continues, and the exit code is 4."
)
_MIXED_HELP = (
    "Continue a file of records (--resume; sweep, tune), or mix nodes, though they differ in GPU, torch or commit."
)
CONFIG_HELP = (
    "TOML file with options of this verb, as context = [128, 256] (a list is a grid). The command line overrides it, and it "
    "overrides the verb's defaults in ./trainstep.toml."
)


def _switch(help: str) -> Parameter:
    return Parameter(help=help, negative=(), show_default=False)


@Parameter(name="*", group=_HOW)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How `sweep` and `tune` run their cells. They always leave out the cells that the file of records has."""

    quiet: Annotated[bool, _switch("Show no progress, only the answer at the end; errors are still shown.")] = False
    dry_run: Annotated[bool, _switch("Show the cells that would run, and about how long; run nothing.")] = False
    budget_minutes: Annotated[float | None, Parameter(help=_BUDGET_HELP)] = None
    every: EveryColumn = False
    allow_mixed: Annotated[bool, _switch(_MIXED_HELP)] = False
    defaults_from: Annotated[str | None, Parameter(parse=False)] = None
    """The options that came from files, and which files; None if there are none."""
    nodes: Annotated[Any, Parameter(parse=False)] = None
    """The nodes of this launch (measure/harness/nodes.py); None if there is one."""

    @property
    def given(self) -> dict[str, object]:
        """The options without meaning where nothing runs, by name; an option that was not given is None or False."""
        shown = ("quiet", "every", "json", "defaults_from", "nodes")
        return {name: value for name, value in vars(self).items() if name not in shown}

    def store(self, out: Path | None, verb: str) -> Store:
        """The store for the records. ValueError for wrong or contradictory options."""
        check_positive({"budget_minutes": self.budget_minutes})
        return Store(out or new_records_path(verb))


@Parameter(name="*", group=_HOW)
@dataclass(frozen=True, kw_only=True)
class GridOptions(RunOptions):
    """How the other verbs run their cells: all of them, unless --resume continues a file of records."""

    out: Annotated[Path | None, Parameter(help=_OUT_HELP)] = None
    page: Annotated[Path | None, Parameter(help=_PAGE_HELP)] = None
    json: Annotated[bool, _switch(_JSON_HELP)] = False
    resume: Annotated[bool, _switch("Leave out the cells that the file of --out has already.")] = False
    config: Annotated[Path | None, Parameter(help=CONFIG_HELP)] = None
    """Read by app.py, before the other options."""
    slurm: Annotated[str | None, Parameter(help=_PARTITION_HELP, group=SLURM)] = None
    slurm_gpus: Annotated[int | None, Parameter(help=_GPUS_HELP, group=SLURM)] = None
    slurm_args: Annotated[str | None, Parameter(help=ARGUMENTS_HELP, group=SLURM)] = None
    """With the two options before it, carried out by app.py."""

    def srun(self, fields: Mapping[str, Any]) -> list[str]:
        """The beginning of the command line that runs a verb with these fields by srun; empty without a partition.

        ValueError for options that have no effect, and for those that Slurm or a grid cannot have.
        """
        if self.slurm is None:
            if name := next((name for name in ("slurm_gpus", "slurm_args") if getattr(self, name) is not None), None):
                raise ValueError(f"{name}: has no effect without --slurm PARTITION; add that, or leave it out")
            return []
        from trainstep.measure.harness.slurm_queue import JobRequest, srun_command

        grid = grid_from_text({name: fields.get(name) for name in ("nodes", "ranks")})
        most = {name: max(filter(lambda value: type(value) is int, values), default=1) for name, values in grid.items()}
        nodes = most.get("nodes", 1)
        if nodes < 1:
            raise ValueError(f"nodes: must be a whole number of at least 1, not {nodes}")
        gpus = -(-most.get("ranks", 1) // nodes) if self.slurm_gpus is None else self.slurm_gpus
        on_cpus = self.slurm_gpus is None and fields.get("device") == "cpu"
        arguments = slurm_arguments(self.slurm_args)
        request = JobRequest(partition=self.slurm, gpus=0 if on_cpus else gpus, arguments=arguments)
        return srun_command(request, nodes)

    def open_store(self, verb: str) -> Store:
        """The store for the records; with --resume its file must be named."""
        if self.resume and self.out is None:
            raise ValueError("resume: a new file holds no cell yet; name the file of records with --out")
        if self.allow_mixed and not self.resume and self.nodes is None:
            raise ValueError(
                "allow_mixed: every cell runs anew, which no record hinders; add --resume, or leave it out"
            )
        return self.store(self.out, verb)


def slurm_arguments(text: str | None) -> dict[str, str]:
    """The options of sbatch in --slurm-args, without their dashes. ValueError for a word that is no key=value."""
    # A comma separates arguments only where a new key begins: nodelist=n1,n2,qos=high has two arguments.
    pairs = [pair.strip().partition("=") for pair in re.split(r",(?=[^,=]+=)", text or "") if pair.strip()]
    for key, _, value in pairs:
        if not key.strip() or not value.strip():
            raise ValueError(
                f"slurm_args: {key!r} has no value; write key=value,key=value, and a flag as exclusive=true"
            )
    return {key.strip().lstrip("-").replace("_", "-"): value.strip() for key, _, value in pairs}


def with_fields(config_class: type, defaults: Defaults = MappingProxyType({})) -> Callable[[Verb], Verb]:
    """Replace a verb's **fields by a text option for each field of the config, including those of its model's shape.

    A field that the verb has as a parameter of its own is left to the verb.

    The help shows `defaults`.
    """
    return lambda verb: _with_fields(verb, config_class, defaults)


def _with_fields(verb: Verb, config_class: type, defaults: Defaults) -> Verb:
    signature = inspect.signature(verb)
    parameters = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    shape = ModelConfig.__dataclass_fields__ if "model" in fields_of(config_class) else {}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                bool | None if _is_switch(field) else str | None,
                Parameter(
                    help=_help(name, field, defaults),
                    group=_SHAPE if name in shape else _GRID if issubclass(config_class, RunConfig) else _ALL_GRID,
                    show_default=False,
                    negative=(),
                ),
            ],
        )
        for name, field in fields_of(config_class).items()
        if name not in signature.parameters
    ]
    verb.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    verb.__annotations__.update({option.name: option.annotation for option in options})
    return verb


def _help(name: str, field: dataclasses.Field[Any], defaults: Defaults) -> str:
    default = _default_words(name, field, defaults)
    if name == "model" and "help" in field.metadata:
        return str(field.metadata["help"]) + default
    if name in _OWN_HELP and not any(name in fields for fields in defaults.values()):
        return _OWN_HELP[name]
    choices = field.metadata.get("choices", ())
    if _is_switch(field):
        return f"a switch: {field.metadata['help']} (in a sweep file it may be a list)"
    if field.type in (bool, "bool"):
        return f"{field.metadata['help']}: true, false{default.lower()}"
    aliases = "".join(f" ({alias} is another name for {choice})" for alias, choice in aliases_of(field).items())
    return str(field.metadata["help"]) + (f": {', '.join(choices)}" if choices else "") + aliases + default


def _is_switch(field: dataclasses.Field[Any]) -> bool:
    """Whether the option needs no value: a field that is on by default needs the value false."""
    return field.type in (bool, "bool") and field.default is False


def _default_words(name: str, field: dataclasses.Field[Any], defaults: Defaults) -> str:
    """` [128,512; on a GPU 1024,4096]`: the value without the option; empty if there is none."""
    config_default = "" if field.default in (None, dataclasses.MISSING) else str(field.default)
    on_cpu, on_gpu = (
        ",".join(map(str, defaults[device][name])) if name in defaults.get(device, {}) else config_default
        for device in ("cpu", "cuda")
    )
    words = on_cpu if on_cpu == on_gpu else f"{on_cpu}; on a GPU {on_gpu}"
    return f" [{words}]" if words else ""


def this_machine(device: str | None, *, instead: str = "--device cpu", forks: bool = True) -> "tuple[Environment, str]":
    """The environment here, and the device to run on: the requested device, else a GPU if it can be used.

    `instead`: options that need no GPU, for the ValueError if the GPU cannot be used. `forks`: start the process that cells are
    forked from, which imports torch meanwhile; cells with several ranks do not use it, and a sweep may have no cell that does.
    """
    from trainstep.measure.harness.fork_client import start_server
    from trainstep.measure.machine.device import usable_device
    from trainstep.measure.machine.environment import environment
    from trainstep.measure.machine.nvml import read_driver

    if forks:
        start_server()
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = read_driver(visible_devices)
    here = environment(driver=driver)
    return here, usable_device(device or "auto", here, driver=driver, instead=instead)


def chosen_device(requested: str | None, grid: dict[str, list[Any]]) -> str | None:
    """The device of the command line, which replaces the sweep file's; else cuda if any cell of the file needs it, or cpu."""
    if requested is not None:
        grid.pop("device", None)
        return requested
    return next((name for name in ("cuda", "cpu") if name in grid.get("device", ())), None)


def limits(
    timeout_s: float,
    memory_limit_gib: float | None,
    rounds: int | None = None,
    processes: int | None = None,
    nodes: "Nodes | None" = None,
) -> "Limits":
    """The limits of each cell's process, the number of rounds or processes of compared variants, and the nodes of this launch."""
    from trainstep.measure.harness.runner import Limits

    check_positive({"timeout_s": timeout_s, "memory_limit_gib": memory_limit_gib})
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds: must be at least 1, not {rounds}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes: must be at least 1, not {processes}")
    if rounds is not None and processes is not None:
        raise ValueError("processes: --rounds runs one process per round; leave out one of the two")
    return Limits(
        timeout_s=timeout_s,
        memory_limit_bytes=None if memory_limit_gib is None else int(memory_limit_gib * 2**30),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        rounds=rounds,
        processes=processes,
        nodes=nodes,
    )


def check_file_alone(kind: str, options: Mapping[str, object]) -> None:
    """ValueError for options that have no effect where a file is read and nothing runs. None or False means not given."""
    name = next((name for name, value in options.items() if value is not None and value is not False), None)
    if name is not None:
        raise ValueError(f"from: {kind} is read, nothing runs: {name} would have no effect; leave it out")


def is_installed(package: str) -> bool:
    """Whether a package with this name is installed."""
    # Metadata, because two packages share the module flash_attn, and importing either loads torch.
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def check_positive(limits: Mapping[str, float | None]) -> None:
    """ValueError, with the option's name, for a limit that is not a positive number or too large."""
    for name, value in limits.items():
        if value is not None and not 0 < value <= _LARGEST_LIMIT:
            most = f" of at most {_LARGEST_LIMIT:,.0f}" if value > 0 else ""
            raise ValueError(f"{name}: must be a positive number{most}, not {value}")


def read_limits(timeout_s: float | None, memory_limit_gib: float | None) -> ReadLimits:
    """The limits of the command line, completed with the defaults. ValueError for a limit that is not a positive number."""
    check_positive({"timeout_s": timeout_s, "memory_limit_gib": memory_limit_gib})
    default = ReadLimits()
    return ReadLimits(
        memory_bytes=default.memory_bytes if memory_limit_gib is None else int(memory_limit_gib * 2**30),
        time_s=default.time_s if timeout_s is None else timeout_s,
    )


def check_compared(bounds: "Limits", groups: "Sequence[Sequence[Cell]]") -> None:
    """ValueError for --rounds or --processes if no variants are compared: they would silently have no effect."""
    for name in ("rounds", "processes"):
        if getattr(bounds, name) is not None and all(len(group) == 1 for group in groups):
            raise ValueError(f"{name}: no variants are compared here; leave it out, or give two or more variants")


def check_cells(cells: "Sequence[Cell]", *, memory_limit_gib: float | None) -> None:
    """ValueError for a text that is missing or too short (bad input, not a failed cell), and for a limit without effect."""
    if memory_limit_gib is not None and all(cell.config.get("device") != "cpu" for cell in cells):
        raise ValueError(
            "memory_limit_gib: limits cells on a CPU, but there are none; leave it out, or take --device cpu"
        )
    contexts: dict[str, set[int]] = {}
    for cell in cells:
        if cell.workload in CONFIGS and cell.config.get("data") not in (None, "random", "stdlib"):
            contexts.setdefault(cell.config["data"], set()).add(cell.config["context"])
    for data, lengths in contexts.items():
        check_length(data, lengths)


def check_sync_options(options: Mapping[str, Sequence[Any]], strategies: Sequence[Any]) -> None:
    """ValueError for an option that none of the parallel strategies has: it would silently have no effect."""
    names = [str(name) if name is not None else BASELINE for name in strategies]
    for option, users in USED_BY.items():
        if option in options and not set(users) & set(names):
            raise ValueError(f"{option}: has no effect with sync {', '.join(names)}; it is for {', '.join(users)}")


def with_nodes(
    grid: Mapping[str, list[Any]], device: str, here: Environment, nodes: "Nodes | None"
) -> dict[str, list[Any]]:
    """The grid, by default with every node of this launch, and a rank for each of their GPUs, or for each task on CPUs."""
    if nodes is None:
        return dict(grid)
    ranks = here.gpu_count * len(nodes) if device == "cuda" else nodes.tasks
    return {"ranks": [ranks], "nodes": [len(nodes)], **grid}


def check_nodes(cells: "Sequence[Cell]", how: RunOptions, here: Environment | None) -> None:
    """ValueError for cells on more nodes than this launch has, and, unless --allow-mixed, for nodes that are not alike."""
    most, there = max((int(cell.config.get("nodes", 1)) for cell in cells), default=1), len(how.nodes or ("here",))
    if most > there:
        launch = "this is one" if how.nodes is None else f"this launch has {there}"
        raise ValueError(
            f"nodes: {most} nodes are asked for and {launch}; add --slurm PARTITION, or start the same command on every "
            f"node, by `srun --nodes {most} --ntasks-per-node 1 trainstep ...` or `torchrun --nnodes {most} ... -m trainstep ...`"
        )
    if most > 1 and here is not None and not how.allow_mixed:
        from trainstep.measure.harness.sweep import MUST_MATCH

        how.nodes.check_alike(here, MUST_MATCH)


def check_gpus(ranks: Sequence[Any], device: str, here: Environment, *, verb: str, nodes: Sequence[Any] = (1,)) -> None:
    """ValueError for more ranks than GPUs on a node: this is bad input, not failed cells."""
    spread = itertools.product(ranks, nodes)
    most = max(
        (count // on for count, on in spread if isinstance(count, int) and isinstance(on, int) and on), default=0
    )
    if device == "cuda" and most > here.gpu_count:
        raise ValueError(
            f"ranks: {most} ranks need a GPU each, but {here.gpu_count} {'is' if here.gpu_count == 1 else 'are'} visible; "
            f"take fewer, or the CPU with gloo: trainstep {verb} --device cpu --ranks {most}"
        )
