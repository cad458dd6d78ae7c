"""NumericsConfig for the toy, a named size and a user's model; it refuses what the config of its step refuses."""

import pytest

from trainstep.config.grid import expand
from trainstep.config.model import UserModel
from trainstep.config.numerics import NumericsConfig, ToyModel
from trainstep.config.parsing import build_config, from_plain, to_plain


@pytest.mark.parametrize("model", ["toy", "tiny", "own.module:build"])
def test_plain_values_give_the_same_config(model: str):
    config = build_config("numerics", {"model": model, "precision": "fp16_autocast", "context": 32})
    assert from_plain(NumericsConfig, to_plain(config)) == config
    assert config.model.name == model


def test_the_config_of_its_step_has_the_given_fields():
    config = build_config("numerics", {"model": "tiny", "layers": 3, "batch_size": 2, "context": 16, "steps": 7})
    run = config.run(precision="fp32", attention="plain")
    assert (run.precision, run.attention, run.batch_size, run.context, run.steps) == ("fp32", "plain", 2, 16, 7)
    assert run.mode == "step"
    assert run.model.layers == 3  # type: ignore[union-attr]
    assert config.run().precision == "bf16_autocast"
    assert NumericsConfig(model=ToyModel()).run().model == UserModel(function="trainstep.training.toy:build")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model": "toy", "layers": 3}, "layers: belongs to the built-in model"),
        ({"model": "tny"}, "did you mean tiny"),
        ({"precision": "fp17"}, "did you mean fp"),
        ({"precision": "tf32", "device": "cpu"}, "tf32 is a mode of NVIDIA"),
        ({"reference": "fp16"}, "reference: 'fp16' is not known"),
        ({"context": 0}, "context: must be"),
        ({"optimizer": "adam"}, "unknown key 'optimizer'"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], word: str):
    with pytest.raises(ValueError, match=word):
        build_config("numerics", values)


def test_a_grid_expands_to_labelled_cells():
    cells = expand(
        {"workload": ["numerics"], "model": ["toy", "tiny"], "precision": ["fp32", "bf16"]}, {"device": "cpu"}
    )
    assert [cell.label for cell in cells] == ["toy, fp32", "toy, bf16", "tiny, fp32", "tiny, bf16"]
    assert {cell.workload for cell in cells} == {"numerics"}
