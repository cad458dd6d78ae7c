"""Outermost modules are found among all objects, by the parameters that an optimizer has."""

import torch

from trainstep.measure.run.modules import inside, outermost


class Alone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.empty = torch.nn.Identity()


def test_the_module_around_the_parameters_comes_first():
    # Larger than the modules of other tests in this process, of which the largest 24 are found
    model, teacher = Alone(), torch.nn.Linear(10**6, 10**6, device="meta")
    found = outermost(model.parameters())
    assert found[0] is model
    assert any(module is teacher for module in found)
    assert all(module is not model.inner for module in found)


def test_inside_are_the_children_with_parameters():
    model = Alone()
    assert inside([model], model.parameters()) == [model.inner]
    assert inside([model.inner], model.parameters()) == []


def test_many_modules_are_not_all_followed():
    modules = [torch.nn.Linear(1, 1) for _ in range(60)]
    assert len(outermost(parameter for module in modules for parameter in module.parameters())) == 24


def test_an_object_without_an_honest_class_does_no_harm():
    class Odd:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("no")

    odd, lazy = Odd(), torch.nn.LazyLinear(3)
    model = torch.nn.Linear(2, 2)
    assert outermost(model.parameters())[0] is model
    del odd, lazy
