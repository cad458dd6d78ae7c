"""A patched Llama has the same losses and gradients. The last test runs this file in Triton's interpreter."""

import copy
import inspect
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import in_the_interpreter
from numerics import assert_as_accurate_as
from op_check import DEVICES, INTERPRETED, interpret
from trainstep.ops import hugging_face_llama, linear_cross_entropy, rms_norm, rotary, swiglu

try:
    import transformers
    from transformers.models.llama import modeling_llama
except ImportError as error:
    if os.environ.get("TRAINSTEP_REQUIRE_TRANSFORMERS") == "1":
        raise
    pytest.skip(f"needs transformers (pip install trainstep[hf]): {error}", allow_module_level=True)

TOKENS, VOCABULARY = 23, 61


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interpret(monkeypatch, linear_cross_entropy, rms_norm, rotary, swiglu)
    rotation = modeling_llama.apply_rotary_pos_emb
    yield
    modeling_llama.apply_rotary_pos_emb = rotation


def llama(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(sizes | heads | changes), attn_implementation="eager")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model.train().to(device, dtype)


def inputs(device: str = "cpu") -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def loss_and_gradients(model: Any, **options: Any) -> dict[str, Tensor]:
    loss = model(**inputs(model.device.type), **options).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    # In the dtype whose rounding it has: the loss alone is always in fp32.
    return {"loss": loss.detach().to(model.dtype), **dict(zip(dict(model.named_parameters()), gradients, strict=True))}


def test_a_patched_model_has_the_signature_by_which_trainer_selects_columns():
    model = llama()
    names = list(inspect.signature(model.forward).parameters)
    assert {"input_ids", "labels"} <= set(names)
    hugging_face_llama.patch(model)
    assert list(inspect.signature(model.forward).parameters) == names


def test_a_copy_keeps_the_ops_and_a_pickle_the_weights():
    model = llama()
    hugging_face_llama.patch(model)
    assert model(**inputs()).logits is None
    assert copy.deepcopy(model)(**inputs()).logits is None
    unpickled = pickle.loads(pickle.dumps(model))
    assert unpickled(**inputs()).logits is not None
    torch.testing.assert_close(unpickled(**inputs()).loss, model(**inputs()).loss)
    hugging_face_llama.patch(unpickled)
    assert unpickled(**inputs()).logits is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "head_dim": 40}], ids=str)
def test_losses_and_gradients_are_as_accurate_as_before(changes: dict[str, Any], dtype: torch.dtype, device: str):
    """Gradients by the norm of their errors: behind many ops the largest one of one run is too much a matter of chance."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bf16 off instead of rounding it, and errors add up")
    model = llama(device, dtype, **changes)
    before, exact = loss_and_gradients(model), loss_and_gradients(copy.deepcopy(model).double())
    hugging_face_llama.patch(model)
    hugging_face_llama.patch(model)
    results = loss_and_gradients(model)
    assert_as_accurate_as(results.pop("loss"), before["loss"], exact["loss"], "loss")
    for name, result in results.items():
        error, theirs = ((each[name].double() - exact[name]).norm() for each in (results, before))
        assert result.dtype == before[name].dtype
        assert error <= 2 * theirs, f"{name}: {error:.3g}, and twice {theirs:.3g} is allowed"


def test_every_op_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """Norms, MLPs, rotations and the loss of one step call ours: two layers with two norms each, and the last norm."""
    calls: list[str] = []
    for name in ("rms_norm", "swiglu", "rotary", "linear_cross_entropy"):
        ours = getattr(hugging_face_llama, name)

        def counted(*args: Any, name: str = name, ours: Any = ours, **options: Any) -> Any:
            calls.append(name)
            return ours(*args, **options)

        monkeypatch.setattr(hugging_face_llama, name, counted)
    model = llama()
    hugging_face_llama.patch(model)
    model(**inputs())
    assert {name: calls.count(name) for name in calls} == {
        "rms_norm": 5,
        "rotary": 2,
        "swiglu": 2,
        "linear_cross_entropy": 1,
    }


def test_logits_are_there_where_they_are_wanted():
    model = llama()
    expected = model(**inputs()).logits
    hugging_face_llama.patch(model)
    assert model(**inputs()).logits is None
    torch.testing.assert_close(model(input_ids=inputs()["input_ids"]).logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.eval()(**inputs()).logits, expected, rtol=1e-4, atol=1e-4)


def test_options_of_the_loss_are_kept():
    model = llama()
    fixed = [{"num_items_in_batch": 7}, {"shift_labels": inputs()["labels"].roll(2, 1)}, {"ignore_index": 3}]
    expected = [model(**inputs(), **options).loss for options in fixed[:2]]
    hugging_face_llama.patch(model)
    for options, loss in zip(fixed, expected, strict=False):
        torch.testing.assert_close(model(**inputs(), **options).loss, loss)


def test_shift_labels_may_be_flat():
    model = llama()
    flat = {"shift_labels": inputs()["labels"].roll(2, 1).flatten()}
    expected = model(**inputs(), **flat).loss
    hugging_face_llama.patch(model)
    torch.testing.assert_close(model(**inputs(), **flat).loss, expected)


def test_a_tuple_has_none_in_the_place_of_the_logits():
    model = llama()
    expected = model(**inputs(), return_dict=False, output_hidden_states=True)
    hugging_face_llama.patch(model)
    loss, logits, *others = model(**inputs(), return_dict=False, output_hidden_states=True)
    torch.testing.assert_close(loss, expected[0])
    assert logits is None
    assert [type(part) for part in others] == [type(part) for part in expected[2:]]


def test_swish_is_another_name_of_silu():
    model = llama(hidden_act="swish")
    expected = model(**inputs()).loss
    hugging_face_llama.patch(model)
    torch.testing.assert_close(model(**inputs()).loss, expected)


def test_a_copy_of_a_patched_model_has_its_own_weights():
    model = llama()
    hugging_face_llama.patch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    assert model(**inputs()).loss != twin(**inputs()).loss
    assert model.state_dict().keys() == llama().state_dict().keys()


@pytest.mark.parametrize(
    ("model", "words"),
    [(torch.nn.Linear(2, 2), "must be a LlamaForCausalLM, but is a Linear"), ("gelu", "must be silu, but is gelu")],
)
def test_other_models_are_refused(model: Any, words: str):
    with pytest.raises(ValueError, match=words):
        hugging_face_llama.patch(llama(hidden_act=model) if isinstance(model, str) else model)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_a_patched_model_in_the_interpreter():
    assert (
        in_the_interpreter("tests/ops/test_hugging_face_llama.py", "-k", "accurate or wanted or options or flat") >= 5
    )
