"""The dtype that each module computes in, folded over blocks, and each reason why autocast has no effect."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from trainstep.measure.numerics.dtypes import DtypeWatch, ModuleDtypes, folded, watch_dtypes, why_no_effect
from trainstep.measure.numerics.passes import Subject
from trainstep.training.toy import Toy


class Model(nn.Module):
    """Layers one after another, then the mean of squares; `off` turns autocast off inside."""

    def __init__(self, *layers: nn.Module, off: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.off = off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False) if self.off else nullcontext():
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()


def subject(model: nn.Module, *, device: str = "cpu", x: torch.dtype = torch.float32) -> Subject:
    return Subject(module=model, batch={"x": torch.randn(4, 8, dtype=x)}, autocast=(device, torch.bfloat16))


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_toys_dtypes_under_autocast(dtype: torch.dtype, word: str):
    batch = {"x_BSC": torch.randn(2, 4, 20), "targets_BS": torch.zeros(2, 4, dtype=torch.long)}
    pass_, watch = watch_dtypes(Subject(module=Toy(), batch=batch, autocast=("cpu", dtype)), 1.0)
    assert [row.module for row in watch.modules] == ["fc1", "relu", "norm", "fc2"]
    assert {row.parameters for row in watch.modules} == {"fp32", "–"}
    outputs = {row.module: row.output for row in watch.modules}
    assert outputs["fc1"] == outputs["fc2"] == word
    assert pass_.logits_module == "fc2"
    assert pass_.logits.dtype == dtype
    assert pass_.loss.dtype == torch.float32
    assert {gradient.dtype for gradient in pass_.gradients.values()} == {torch.float32}
    assert {row.output_gradient for row in watch.modules} == {word}
    assert why_no_effect(Subject(module=Toy(), batch=batch, autocast=("cpu", dtype)), watch) is None


@pytest.mark.parametrize(
    ("tried", "word"),
    [
        (subject(Model(nn.LayerNorm(8))), "no module of the model runs an operation that it casts to bf16"),
        (subject(Model(nn.Linear(8, 8), off=True)), "it is off where the modules run"),
        (subject(Model(nn.Linear(8, 8).double()), x=torch.float64), "it leaves fp64 alone"),
    ],
)
def test_the_reason_why_autocast_had_no_effect_is_given(tried: Subject, word: str):
    _, watch = watch_dtypes(tried)
    assert word in (why_no_effect(tried, watch) or "")


def test_autocast_for_another_device_has_no_effect():
    tried = subject(Model(nn.Linear(8, 8)))
    _, watch = watch_dtypes(Subject(module=tried.module, batch=tried.batch, autocast=None))
    reason = why_no_effect(Subject(module=tried.module, batch=tried.batch, autocast=("cuda", torch.bfloat16)), watch)
    assert reason == "autocast had no effect: it is for cuda, and the model is on cpu"


def test_torchs_warning_is_the_first_reason():
    """A CPU build may have no autocast to a dtype: torch then warns and leaves it off."""
    watch = DtypeWatch(
        autocast_warnings=["In CPU autocast, but the target dtype is not supported. Disabling autocast."]
    )
    reason = why_no_effect(subject(Model(nn.Linear(8, 8))), watch)
    assert reason is not None
    assert "torch says: In CPU autocast, but the target dtype is not supported" in reason


def test_warnings_about_autocast_are_kept():
    class Warns(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("autocast: not here", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            return super().forward(x)

    assert watch_dtypes(subject(Model(Warns(8, 8))))[1].autocast_warnings == ["autocast: not here"]


def test_no_autocast_needs_no_reason():
    tried = Subject(module=Model(nn.Linear(8, 8)), batch={"x": torch.randn(4, 8)}, autocast=None)
    assert why_no_effect(tried, watch_dtypes(tried)[1]) is None


def module_dtypes(module: str, output: str = "fp32") -> ModuleDtypes:
    return ModuleDtypes(
        module=module, kind="Linear", parameters="fp32", output=output, output_gradient="fp32", gradient="fp32"
    )


def test_repeated_blocks_fold():
    modules = (
        [module_dtypes("in")]
        + [module_dtypes(f"blocks.{i}.up", "bf16" if i == 2 else "fp32") for i in range(12)]
        + [module_dtypes("out")]
    )
    assert [(row.module, row.output) for row in folded(modules)] == [
        ("in", "fp32"),
        ("blocks.0-1,3-11.up", "fp32"),
        ("blocks.2.up", "bf16"),
        ("out", "fp32"),
    ]
