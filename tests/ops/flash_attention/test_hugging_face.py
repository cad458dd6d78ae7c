"""`attn_implementation="trainstep"` in a small Llama: losses and gradients are right, and unsupported inputs are refused."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from numerics import assert_as_accurate_as
from trainstep.ops.flash_attention import hugging_face

try:
    import transformers
except ImportError as error:
    if os.environ.get("TRAINSTEP_REQUIRE_TRANSFORMERS") == "1":
        raise
    pytest.skip(f"needs transformers (pip install trainstep[hf]): {error}", allow_module_level=True)

TOKENS, VOCABULARY = 23, 61


@pytest.fixture(autouse=True)
def registered() -> None:
    hugging_face.register()
    hugging_face.register()


def llama(attention: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(**(sizes | heads | changes), attn_implementation=attention)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train().to(dtype)


def batch(rows: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    tokens = batch()
    logits = model(input_ids=tokens, **inputs).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())  # transformers' own is always in fp32
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "head_dim": 40}])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_step_of_llama_is_as_accurate_as_eager(dtype: torch.dtype, changes: dict[str, int], is_causal: bool):
    results, eager = (
        loss_and_gradients(llama(name, dtype, **changes), is_causal=is_causal) for name in ("trainstep", "eager")
    )
    # the same weights; transformers always computes norms and the softmax in fp32
    exact = loss_and_gradients(llama("eager", dtype, **changes).double(), is_causal=is_causal)
    for name, result in results.items():
        assert_as_accurate_as(result, eager[name], exact[name], name)


def test_a_mask_of_ones_changes_nothing():
    unmasked = loss_and_gradients(llama("trainstep"))
    masked = loss_and_gradients(llama("trainstep"), attention_mask=torch.ones(2, TOKENS, dtype=torch.int64))
    assert all(torch.equal(unmasked[name], masked[name]) for name in unmasked)


def test_gradient_checkpointing_changes_nothing():
    model = llama("trainstep")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, recomputed = loss_and_gradients(llama("trainstep")), loss_and_gradients(model)
    assert all(torch.equal(expected[name], recomputed[name]) for name in expected)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_compiles_as_one_graph(use_cache: bool):
    torch.compiler.reset()
    model = llama("trainstep")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled_results, results = (
        loss_and_gradients(compiled, use_cache=use_cache),
        loss_and_gradients(llama("trainstep")),
    )
    for result, expected in zip(compiled_results.values(), results.values(), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False])
def test_packing_is_refused_in_a_compiled_model_too(use_cache: bool):
    torch.compiler.reset()
    compiled = torch.compile(llama("trainstep"), fullgraph=True, backend="aot_eager")
    positions = torch.cat((torch.arange(9), torch.arange(TOKENS - 9))).expand(2, -1)
    with pytest.raises(RuntimeError, match="restart"):
        compiled(batch(), position_ids=positions, use_cache=use_cache)


@torch.no_grad()
def test_logits_after_cached_tokens_are_the_same():
    """Several queries at once after cached tokens, then one query."""
    model = llama("trainstep").eval()
    tokens = batch()
    uncached = model(tokens).logits
    cache = None
    pieces = []
    for start, end in ((0, 10), (10, 16), (16, 17), (17, TOKENS)):
        out = model(tokens[:, start:end], past_key_values=cache, attention_mask=torch.ones(2, end), use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), uncached)


def test_a_model_can_switch_to_trainstep():
    model = llama("sdpa").eval()
    before = model(batch()).logits
    model.set_attn_implementation("trainstep")
    torch.testing.assert_close(model(batch()).logits, before)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("training", [True, False])
def test_padding_is_refused(side: str, training: bool):
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, slice(3) if side == "left" else slice(-3, None)] = 0
    with pytest.raises(ValueError, match="no padding"):
        llama("trainstep").train(training)(batch(), attention_mask=mask)


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ({"attention_mask": torch.ones(2, 1, TOKENS, TOKENS).tril() == 1}, "masks by rule"),
        ({"position_ids": torch.cat((torch.arange(9), torch.arange(TOKENS - 9)))[None]}, "restart"),
        (
            {"position_ids": torch.cat((torch.arange(9), torch.arange(TOKENS - 9)))[None], "use_cache": False},
            "no packing",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 23])}, "cu_seq_lens_q"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_inputs_that_would_change_the_result_are_refused(inputs: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        llama("trainstep")(batch(), **inputs)


def test_dropout_is_refused_in_training_only():
    model = llama("trainstep", attention_dropout=0.1)
    with pytest.raises(ValueError, match="attention_dropout=0"):
        model(batch())
    model.eval()(batch())


def test_a_sliding_window_shorter_than_the_sequence_is_refused():
    """A wider window changes nothing."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY}

    def logits(attention: str, window: int) -> Tensor:
        torch.manual_seed(0)
        mistral_config = transformers.MistralConfig(**config, sliding_window=window, attn_implementation=attention)
        return transformers.MistralForCausalLM(mistral_config)(batch()).logits  # type: ignore[no-any-return]

    torch.testing.assert_close(logits("trainstep", TOKENS + 1), logits("eager", TOKENS + 1))
    with pytest.raises(ValueError, match="window"):
        logits("trainstep", 8)


def test_a_cache_with_room_ahead_is_refused():
    model = llama("trainstep").eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(ValueError, match="DynamicCache"):
        model(batch(), past_key_values=cache)
