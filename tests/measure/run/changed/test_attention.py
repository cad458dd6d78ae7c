"""What `--apply` changes of a script's attention: our kernel where it takes the call, and no mask where that is causal."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as by_torch

from trainstep.measure.run.changed import attention
from trainstep.measure.run.changed.applied import Applied


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Installs changes, and takes back what they wrapped."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", by_torch)

    def installed(**changes: str) -> Applied:
        applied = Applied(changes)
        applied.install()
        return applied

    return installed


def test_attention_is_ours_where_the_kernel_takes_the_call(install, monkeypatch: pytest.MonkeyPatch):
    original = torch.nn.functional.scaled_dot_product_attention
    called = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *arguments, **options: called.append(1) or original(*arguments, **options),
    )
    monkeypatch.setattr(attention, "_INTERPRETED", True)
    applied = install(attention="trainstep")
    q, k, v = torch.randn(3, 1, 2, 16, 8, dtype=torch.float32).unbind()
    ours = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (applied.counts["attention"], called) == (1, [])
    torch.testing.assert_close(ours, original(q, k, v, is_causal=True))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    for options in ({"attn_mask": mask}, {"dropout_p": 0.5}):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (applied.counts["attention"], len(called)) == (1, 3)


def test_attention_under_autocast_is_ours_whatever_dtypes_come_in(install, monkeypatch: pytest.MonkeyPatch):
    """A rotation in fp32 gives fp32 queries and keys beside bf16 values, which autocast casts for torch's attention too."""
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention, "_INTERPRETED", True)
    applied = install(attention="trainstep")
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    with pytest.raises(RuntimeError):
        torch.nn.functional.scaled_dot_product_attention(q, k, v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.nn.functional.scaled_dot_product_attention(q, k, v.bfloat16(), is_causal=True)
        torchs = original(q, k, v.bfloat16(), is_causal=True)
    assert (applied.counts["attention"], ours.dtype) == (1, torchs.dtype)
    torch.testing.assert_close(ours, torchs, rtol=0.02, atol=0.02)


def test_attention_on_a_cpu_is_left_to_torch(install):
    applied = install(attention="trainstep")
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert applied.not_applied.keys() == {"attention"}


def causal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call that reaches torch."""
    seen: list[dict[str, Any]] = []

    def noted(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(options)
        return by_torch(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_causal_mask_is_said_in_words(calls: list[dict[str, Any]], dtype: torch.dtype):
    applied = Applied({"mask": "causal"})
    applied.install()
    q, k, v = torch.randn(3, 2, 2, 17, 8).unbind()
    mask = causal(17)[None, None]
    given = mask if dtype == torch.bool else torch.zeros(1, 1, 17, 17).masked_fill(~mask, torch.finfo(dtype).min)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, given, scale=0.5)
    torch.testing.assert_close(y, by_torch(q, k, v, given, scale=0.5))
    assert (calls[0]["attn_mask"], calls[0]["is_causal"], calls[0]["scale"]) == (None, True, 0.5)
    assert not applied.not_applied


@pytest.mark.parametrize(
    "mask",
    [
        causal(17).triu(-3),  # a window
        causal(17) & (torch.arange(17) > 2),  # padding
        torch.ones(17, 17, dtype=torch.bool),
        causal(18)[1:, :17],  # sees one more
        torch.zeros(17, 17).masked_fill(~causal(17), -1.0),  # a bias
        torch.zeros(17, 17).masked_fill(~causal(17), -torch.inf).requires_grad_(),
        torch.linspace(0, 1, 17).masked_fill(~causal(17), -torch.inf),
    ],
)
def test_any_other_mask_is_kept(calls: list[dict[str, Any]], mask: torch.Tensor):
    applied = Applied({"mask": "causal"})
    applied.install()
    q, k, v = torch.randn(3, 1, 1, 17, 8).unbind()
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert calls[0]["attn_mask"] is mask
    assert applied.not_applied.keys() == {"mask"}


def test_masks_are_looked_at_until_the_window_begins(calls: list[dict[str, Any]]):
    """And one that is not causal keeps all of its shape: in the window nobody could tell them apart."""
    applied = Applied({"mask": "causal"})
    applied.install()

    def attend(mask: torch.Tensor) -> bool:
        q, k, v = torch.randn(3, 1, 1, len(mask), 8).unbind()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return calls[-1]["attn_mask"] is None

    window = causal(17).triu(-3)
    assert attend(causal(5))
    assert [attend(mask) for mask in (causal(17), window, causal(17))] == [True, False, False]
    applied.in_warmups = False
    assert [attend(mask) for mask in (causal(17), window, causal(5), causal(7))] == [False, False, True, True]
    assert not attend(causal(9).triu(-3)), "the first of a new shape is looked at"


def test_our_kernel_takes_what_had_a_causal_mask(install, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_INTERPRETED", True)
    applied = install(mask="causal", attention="trainstep")
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal(16))
    torch.testing.assert_close(y, by_torch(q, k, v, is_causal=True))
    assert not applied.not_applied


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_compiled_model_of_hugging_face_attends_without_its_mask(kind: str, calls: list[dict[str, Any]]):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "use_cache": False}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **sizes)
        model = transformers.GPT2LMHeadModel(config).eval()  # its dropout is on by default
    else:
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **sizes))
    tokens = torch.randint(64, (2, 12))
    compiled = torch.compile(model, backend="eager")
    before = compiled(input_ids=tokens, labels=tokens).loss
    assert calls[-1]["attn_mask"] is not None, "no tracing sees that no token is padding or packed"
    applied = Applied({"mask": "causal"})
    applied.change_module(torch.nn.ModuleDict({"inner": model}))
    after = compiled(input_ids=tokens, labels=tokens).loss
    assert (calls[-1]["attn_mask"], calls[-1]["is_causal"]) == (None, True)
    torch.testing.assert_close(after, before)
    assert applied.counts["mask"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["Mistral", "Bert", "Bart"])
def test_a_model_that_needs_its_masks_keeps_them(kind: str):
    """A window, an encoder, an encoder with a decoder: without masks they compute something else."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    if kind == "Mistral":
        config = transformers.MistralConfig(**shape, num_key_value_heads=2, sliding_window=4)
        model = transformers.MistralForCausalLM(config)
    elif kind == "Bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**shape))
    else:
        sides = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=64, d_model=16, **sides))
    applied = Applied({"mask": "causal"})
    applied.change_module(model)
    assert applied.not_applied["mask"].startswith("not all of the model's attentions")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_another_attention_keeps_it(monkeypatch: pytest.MonkeyPatch):
    class Model(torch.nn.Module):
        config = SimpleNamespace(_attn_implementation="eager")

        def set_attn_implementation(self, name: str) -> None:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AttentionInterface=lambda: {"sdpa": by_torch}))
    applied = Applied({"mask": "causal"})
    applied.change_module(Model())
    assert applied.not_applied == {"mask": "the model's attention is eager, not sdpa"}
