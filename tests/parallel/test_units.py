"""The modules that become units: by list, by class, and the module itself; what cannot be a unit is refused by name."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.ranks import alone
from trainstep.parallel.units import chosen_units, plan_units


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.blocks = nn.Linear(4, 4), nn.LayerNorm(4), nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(self.first(x))


def names_by_unit(model: nn.Module, units: Any) -> dict[str, set[str]]:
    return {plan.name: set(plan.parameter_names) for plan in plan_units(model, chosen_units(model, units))}


def test_the_module_itself_is_the_unit_of_the_remaining_parameters():
    model = Model()
    usual = names_by_unit(model, None)
    assert len(usual) == 3
    assert names_by_unit(model, [*model.blocks, model]) == usual
    assert names_by_unit(model, [model, *model.blocks]) == usual
    (names,) = names_by_unit(model, [model]).values()
    assert names == {name for name, _ in model.named_parameters()}


def test_a_module_that_is_named_twice_is_one_unit():
    model = Model()
    usual = names_by_unit(model, None)
    assert names_by_unit(model, [Block, model.blocks[0]]) == usual
    assert names_by_unit(model, [*model.blocks, model.blocks[0]]) == usual
    shared = Block()
    assert names_by_unit(nn.Sequential(shared, shared), None) == {"0": {"0.weight", "0.bias"}}


@pytest.mark.parametrize("units", ["Block", ["blocks.0"], [None], [3], [int], 3])
def test_a_unit_that_is_neither_module_nor_class_is_refused(units: Any):
    with pytest.raises(ValueError, match=r"units: .* is neither a module nor a class of modules"):
        FSDP(Model(), alone("cpu"), units=units)


@pytest.mark.parametrize("chosen", [lambda model: [model.blocks], lambda model: nn.Module])
def test_a_container_that_nobody_calls_is_refused(chosen: Any):
    model = Model()
    with pytest.raises(ValueError, match="units: a ModuleList has no forward of its own; list its members"):
        FSDP(model, alone("cpu"), units=chosen(model))


@pytest.mark.parametrize("ignored", [nn.LayerNorm(4), None, nn.LayerNorm, nn.Parameter(torch.ones(2))])
def test_ignored_must_be_a_list(ignored: Any):
    with pytest.raises(ValueError, match="ignored: must list modules and parameters"):
        FSDP(Model(), alone("cpu"), ignored=ignored)


def test_no_warning_of_a_single_unit_where_the_blocks_are_listed():
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(model, alone("cpu"), ignored=[model.blocks])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(model := Model(), alone("cpu"), ignored=[model])
