"""Errors against a wider pass: values worked out by hand, the order of the formats, and the fallback to fp32."""

import pytest
import torch
from torch import nn

from trainstep.config.numerics import NumericsConfig
from trainstep.config.parsing import build_config
from trainstep.measure.numerics import errors as numerics_errors
from trainstep.measure.numerics.errors import error_facts, gradient_table, precise_pass, reference_of, relative_error
from trainstep.measure.numerics.passes import run_pass

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 16, "batch_size": 2}


def test_relative_error_is_as_worked_out_by_hand():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
    assert relative_error(torch.tensor([6.0, 8.0]), torch.tensor([3.0, 4.0]), scale=2.0) == 0
    assert relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) is None
    assert relative_error(torch.tensor([1.0]), torch.tensor([0.0])) is None
    masked = torch.tensor([4.0, float("-inf")])
    assert relative_error(torch.tensor([5.0, float("-inf")]), masked) == 0.25
    assert relative_error(torch.tensor([4.0, 0.0]), masked) is None


def errors(precision: str, **values: object) -> dict[str, float]:
    config = build_config("numerics", {**SMALL, "precision": precision, **values})
    reference = reference_of(config)
    result = run_pass(precise_pass(config, reference))
    return {
        name: fact.value
        for name, fact in error_facts(result, reference, gradient_table(result, reference, 1.0)).items()
    }


def test_errors_are_ordered_as_the_formats_are():
    by_precision = {precision: errors(precision) for precision in ("fp32", "bf16_autocast", "bf16")}
    for name in ("error_logits", "error_gradient_median", "error_gradient_max"):
        assert 0 < by_precision["fp32"][name] < 1e-5 < 1e-3 < by_precision["bf16_autocast"][name] < 0.1
        assert by_precision["bf16"][name] > by_precision["bf16_autocast"][name] / 2
    assert by_precision["fp32"]["reference"] == "fp64"
    assert by_precision["fp32"]["logits_module"] == "head"


def test_fp32_compared_with_itself_is_exact():
    facts = errors("fp32", reference="fp32", attention="plain")
    assert facts["error_logits"] == facts["error_loss"] == facts["error_gradient_max"] == 0
    assert facts["reference_reason"] == "fp32 was asked for"


def test_a_reference_whose_loss_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="its loss is not finite in fp64"):
        reference_of(config_of("endless", reference="fp64"))


def config_of(name: str, **values: object) -> NumericsConfig:
    return build_config("numerics", {"model": f"numerics_models:{name}", "precision": "fp32", **values})


@pytest.mark.parametrize("error", [MemoryError("no"), RuntimeError("expected Float")])
def test_fp32_is_the_reference_where_fp64_cannot_run(monkeypatch: pytest.MonkeyPatch, error: Exception):
    real = numerics_errors.count_output_gradients

    def only_fp32(subject: object, *, scale: float) -> object:
        if next(subject.module.parameters()).dtype == torch.float64:  # type: ignore[attr-defined]
            raise error
        return real(subject, scale=scale)  # type: ignore[arg-type]

    monkeypatch.setattr(numerics_errors, "count_output_gradients", only_fp32)
    config = build_config("numerics", {**SMALL, "precision": "bf16_autocast"})
    reference = reference_of(config)
    assert reference.dtype == "fp32"
    assert ("does not fit in memory" if isinstance(error, MemoryError) else "expected Float") in reference.reason
    with pytest.raises(type(error)):
        reference_of(build_config("numerics", {**SMALL, "reference": "fp64"}))


def test_weights_and_batch_are_those_of_the_reference():
    """This model's weights and batches do not depend on a seed."""
    reference = reference_of(config_of("unseeded"))
    subject = precise_pass(config_of("unseeded"), reference)
    assert torch.equal(subject.batch["x"], reference.batch["x"])
    assert all(torch.equal(value, reference.weights[name]) for name, value in subject.module.state_dict().items())
    result = run_pass(subject)
    assert relative_error(result.logits, reference.logits) < 1e-6  # type: ignore[operator]


def test_dropout_is_off():
    reference = reference_of(config_of("dropping"))
    result = run_pass(precise_pass(config_of("dropping"), reference))
    assert relative_error(result.logits, reference.logits) < 1e-6  # type: ignore[operator]


def test_a_model_without_modules_has_no_logits():
    with pytest.raises(ValueError, match="no logits to compare"):
        reference_of(config_of("bare"))


def test_logits_that_the_model_names_are_taken():
    result = run_pass(precise_pass(config_of("naming"), reference_of(config_of("naming"))))
    assert result.logits.shape == (4, 8)
    assert isinstance(result.logits, torch.Tensor)
    assert not isinstance(result.logits, nn.Parameter)
