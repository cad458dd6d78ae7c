"""Gradients in fp16's range: shares are as counted by hand, and the loss scale is the one where GradScaler settles."""

import pytest
import torch
from torch import Tensor, nn

from trainstep.measure.numerics.errors import largest_finite_scale, range_table
from trainstep.measure.numerics.passes import Subject, layer_of


class Scaled(nn.Module):
    """A module with loss = sum(fp16(weight) * factors), so the weight's gradient is the factors, computed in fp16."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.block = nn.ModuleList([Product(factors)])

    def forward(self) -> Tensor:
        loss: Tensor = self.block[0](torch.ones(())).sum(dtype=torch.float32)
        return loss


class Product(nn.Module):
    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(factors)))
        self.register_buffer("factors", factors)

    def forward(self, factor: Tensor) -> Tensor:
        product: Tensor = Times.apply(self.weight, self.factors)
        return product * factor


class Times(torch.autograd.Function):
    """The product weight * factors, whose gradient passes through fp16."""

    @staticmethod
    def forward(ctx, weight, factors):
        ctx.save_for_backward(factors)
        return weight * factors

    @staticmethod
    def backward(ctx, gradient):
        (factors,) = ctx.saved_tensors
        return (gradient * factors).half().float(), None


FACTORS = torch.tensor([1e-9, 3e-8, 1e-6, 5e-5, 0.0, 1e-3, 1e-2, 0.5])
"""In fp16: zero (below 2^-25), two subnormal and one more below 2^-14, one that is zero in truth, three normal."""


@pytest.fixture
def scaled() -> Subject:
    return Subject(module=Scaled(FACTORS), batch={}, autocast=None)


def test_the_largest_scale_is_the_last_that_stays_finite(scaled: Subject):
    """0.5 x 2^17 is an infinity in fp16, 0.5 x 2^16 is not."""
    assert largest_finite_scale(scaled) == 2.0**16
    larger = Subject(module=Scaled(1000 * FACTORS), batch={}, autocast=None)
    assert largest_finite_scale(larger) == 2.0**7


def test_the_largest_scale_is_where_a_grad_scaler_settles(scaled: Subject):
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.SGD(scaled.module.parameters(), lr=0.0)
    scales = []
    for _ in range(6):
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(scaled.module()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scales == [2.0**16, 2.0**17] * 3


def test_a_gradient_that_always_overflows_has_no_scale():
    endless = Subject(module=Scaled(torch.tensor([1e30])), batch={}, autocast=None)
    assert largest_finite_scale(endless) is None


def test_shares_are_as_counted_by_hand(scaled: Subject):
    table = range_table(scaled, {"block.0.weight": FACTORS.double()}, {}, 2.0**16)
    [row] = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    assert (row["of"], row["layer"], row["elements"]) == ("parameters", "block.0", 7)
    assert row["zero_unscaled"] == pytest.approx(1 / 7)
    assert row["subnormal_unscaled"] == pytest.approx(3 / 7)
    assert row["zero_scaled"] == 0
    assert row["subnormal_scaled"] == 0  # 1e-9 x 2^16 is just above 2^-14
    assert row["overflow_at_twice"] == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [("blocks.3.mlp.up.weight", "blocks.3"), ("embedding.weight", "embedding"), ("a.h.11.b", "a.h.11"), ("w", "w")],
)
def test_a_parameter_belongs_to_its_block(parameter: str, layer: str):
    assert layer_of(parameter) == layer
