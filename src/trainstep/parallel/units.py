"""Plans the units of parameters that are gathered, reduced or updated together: usually one unit per block.

One more unit has the parameters around the blocks. `step_unit` updates one unit, so that it may be sent or its gradients be freed
before the others are updated.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from trainstep.costs.buckets import neighbours
from trainstep.costs.exchange import ROOT, ParameterSize, joined_name

ELEMENT_WISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Classes of torch.optim, and of the same name elsewhere, whose update of an element depends on no other element."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes in which torch keeps the hooks on an optimizer's steps."""
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
"""Variables in which torch keeps the hooks on the steps of all optimizers."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A unit's parameters. `triggers`: the modules whose forward needs them, so that hooks stand before it."""

    name: str
    parameter_names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    triggers: tuple[nn.Module, ...]


UnitsOf = Sequence[nn.Module] | type[nn.Module] | Sequence[type[nn.Module]]
"""Modules, or the outermost modules of a class or of several."""


def chosen_units(module: nn.Module, units: UnitsOf | None) -> list[nn.Module] | None:
    """The modules to make units of; None for None.

    ValueError for an entry that is neither module nor class, and for a class of which the module has no part.
    """
    if units is None:
        return None
    entries = [units] if isinstance(units, type) or not isinstance(units, Iterable) else list(units)
    classes = tuple(entry for entry in entries if isinstance(entry, type) and issubclass(entry, nn.Module))
    for entry in entries:
        if entry not in classes and not isinstance(entry, nn.Module):
            raise ValueError(
                f"units: {entry!r} is neither a module nor a class of modules; write units=[model.block, ...]"
            )
    chosen = [entry for entry in entries if isinstance(entry, nn.Module)]
    covered = {module}
    for part in module.modules():
        if isinstance(part, classes) and part not in covered:
            chosen.append(part)
            covered.update(part.modules())
    for wanted in classes:
        if not any(isinstance(part, wanted) for part in covered - {module}):
            raise ValueError(f"units: no {wanted.__name__} is part of the module")
    return list(dict.fromkeys(chosen))


def plan_units(
    module: nn.Module, units: Sequence[nn.Module] | None = None, *, ignored: Container[nn.Parameter] = ()
) -> list[UnitPlan]:
    """Plan the units, in the order in which a forward needs them: first the parameters around the blocks, then block by block.

    `units`: the modules to make units of; by default the members of the outermost ModuleLists and Sequentials. A parameter that
    several blocks share belongs to the first of them, and each of them triggers it; `ignored` parameters belong to no unit. A unit
    has one dtype and is trained or frozen as a whole: a block that mixes them becomes several units. The module itself, if it is
    listed, stands for the parameters around the others. ValueError for a unit that is not part of the module, and for a container
    that has no forward.
    """
    names = {submodule: name for name, submodule in module.named_modules()}
    listed = list(units) if units is not None else _outermost_members(module)
    for block in listed:
        if block not in names:
            raise ValueError(f"units: a {type(block).__name__} is not part of the module")
        if units is not None and isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"units: a {type(block).__name__} has no forward of its own; list its members")
    blocks = [block for block in dict.fromkeys(listed) if block is not module]
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter not in ignored]
    owners: dict[nn.Parameter, list[nn.Module]] = {parameter: [] for parameter in module.parameters()}
    for block in blocks:
        for parameter in block.parameters():
            owners[parameter].append(block)
    inside = {part for block in blocks for part in block.modules()}
    around = {
        parameter
        for part in module.modules()
        if part not in inside
        for parameter in part._parameters.values()
        if parameter is not None
    }
    plans = []
    for owner in [module, *blocks]:
        members = [
            (name, parameter)
            for name, parameter in named
            if (owner is module) == (parameter in around) and (owner is module or owners[parameter][:1] == [owner])
        ]
        kinds = dict.fromkeys((parameter.dtype, parameter.requires_grad) for _, parameter in members)
        for kind in kinds:
            alike = [(name, p) for name, p in members if (p.dtype, p.requires_grad) == kind]
            sharing = [owner, *(other for _, p in alike for other in owners[p])]
            plans.append(
                UnitPlan(
                    name=names[owner] or ROOT,
                    parameter_names=tuple(name for name, _ in alike),
                    parameters=tuple(parameter for _, parameter in alike),
                    triggers=tuple(dict.fromkeys(sharing)),
                )
            )
    return plans


def is_single_unit(module: nn.Module) -> bool:
    """Whether the module has no list of blocks, though several of its parts have parameters."""
    return not _outermost_members(module) and sum(bool(part._parameters) for part in module.modules()) > 1


def merged_units(plans: Sequence[UnitPlan], most_bytes: float | None = None) -> list[UnitPlan]:
    """Merge the units of neighbouring blocks up to `most_bytes` (costs/buckets.py): fewer messages cost the host less.

    Each of the blocks is a trigger of the merged unit.
    """
    sizes = [sum(parameter.nbytes for parameter in plan.parameters) for plan in plans]
    kinds = [(plan.name == ROOT, plan.parameters[0].dtype) for plan in plans]
    groups = [[plans[index] for index in group] for group in neighbours(sizes, kinds, most_bytes)]
    return [
        UnitPlan(
            name=joined_name([plan.name for plan in group]),
            parameter_names=tuple(name for plan in group for name in plan.parameter_names),
            parameters=tuple(parameter for plan in group for parameter in plan.parameters),
            triggers=tuple(dict.fromkeys(trigger for plan in group for trigger in plan.triggers)),
        )
        for group in groups
    ]


def parameter_sizes(module: nn.Module, units: Sequence[nn.Module] | None = None) -> list[ParameterSize]:
    """The module's parameters, in its order, as the formulas of costs/ and plan/ take them; `units` as in plan_units.

    Call it before the module is wrapped: FSDP's parameters are pieces.
    """
    unit_of = {name: plan.name for plan in plan_units(module, units) for name in plan.parameter_names}
    return [
        ParameterSize(
            name=name,
            numel=parameter.numel(),
            element_bytes=parameter.element_size(),
            trained=parameter.requires_grad,
            unit=unit_of[name],
        )
        for name, parameter in module.named_parameters()
    ]


def _outermost_members(module: nn.Module) -> list[nn.Module]:
    """The members that have parameters, of all lists that are in no other list."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [member for member in module if next(member.parameters(), None) is not None]
        return list(dict.fromkeys(members))
    return list(dict.fromkeys(member for child in module.children() for member in _outermost_members(child)))


# Updates of one unit.


def may_step_by_unit(optimizer: Optimizer) -> bool:
    """Whether it may step some tensors now and others later: it counts steps by tensor, and no hook sees its calls of step."""
    # torch's own classes count so. Others must say it in their own body, since a subclass may add a counter.
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENT_WISE
    by_tensor = known or vars(kind).get("counts_steps_by_tensor", False)
    hooked = [getattr(optimizer, name, None) for name in _HOOKS] + [
        getattr(hooks, name, None) for name in _HOOKS_OF_ALL
    ]
    runs = getattr(optimizer, "inner", None)  # the optimizer of MasterWeights
    return by_tensor and not any(hooked) and (runs is None or may_step_by_unit(runs))


def groups_by_tensor(optimizer: Optimizer) -> dict[Tensor, int]:
    """The number of each tensor's group."""
    return {tensor: number for number, group in enumerate(optimizer.param_groups) for tensor in group["params"]}


def step_unit(optimizer: Optimizer, tensors: Iterable[Tensor], group_of: Mapping[Tensor, int]) -> None:
    """Step with these tensors alone; those without a group are left out. The groups stay as they are for everybody else."""
    by_group: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor in group_of:  # the caller may have removed it
            by_group.setdefault(group_of[tensor], []).append(tensor)
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": members} for number, members in by_group.items()]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
