"""Which compiled losses `--apply ops=trainstep` fuses with their head, that they stay what they were, and what is left alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

from trainstep.measure.run.changed import fused_loss
from trainstep.measure.run.changed.applied import Applied
from trainstep.measure.run.changed.fused_loss import count_losses, with_our_loss
from trainstep.measure.run.changed.late_logits import LateLogits, late_logits
from trainstep.ops import operators

WIDTH, VOCABULARY = 16, 40
Forward = Callable[["Model", Tensor, Tensor], Any]


class Model(nn.Module):
    """An embedding and a head; `forward(self, hidden, tokens)` is the loss to look at."""

    def __init__(self, loss: Forward, *, bias: bool = False) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.class_weights = torch.rand(VOCABULARY)
        self.loss = loss

    def forward(self, tokens: Tensor) -> Any:
        return self.loss(self, self.tokens(tokens), tokens)


@pytest.fixture(autouse=True)
def _compiles_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logits count as on a GPU, and AOTAutograd leaves its graphs to PyTorch: what a graph computes is what is tested."""
    torch.compiler.reset()
    monkeypatch.setattr(fused_loss, "has_kernel", lambda *_: True)
    monkeypatch.setattr(
        torch._TorchCompileInductorWrapper, "__call__", lambda _self, graph, inputs, **_: aot_eager(graph, inputs)
    )
    yield
    torch.compiler.reset()


def notes() -> Applied:
    return Applied({"ops": "trainstep"})


def by_hand(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = model.head(hidden)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def as_transformers_has_it(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = model.head(hidden).float()
    shifted, targets = logits[..., :-1, :].contiguous(), F.pad(tokens, (0, 1), value=-100)[..., 1:-1].contiguous()
    return F.cross_entropy(shifted.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100, reduction="mean")


def summed_and_smoothed(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = model.head(hidden).reshape((hidden.shape[0] * hidden.shape[1], -1))
    return nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1, ignore_index=3)(logits, tokens.reshape(-1))


def by_a_function(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = F.linear(weight=model.head.weight, input=hidden.flatten(0, 1)).to(torch.float32)
    return F.cross_entropy(logits, tokens.flatten())


def results(model: nn.Module, tokens: Tensor, autocast: bool) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("loss", [by_hand, as_transformers_has_it, summed_and_smoothed, by_a_function])
def test_the_loss_is_fused_and_stays_what_it_was(loss: Forward, autocast: bool, monkeypatch: pytest.MonkeyPatch):
    model, tokens, applied = Model(loss), torch.randint(0, VOCABULARY, (3, 7)), notes()
    plain = results(model, tokens, autocast)
    op, seen = fused_loss.linear_cross_entropy, set()

    def counted(hidden: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
        seen.add((hidden.shape[-1], options["chunk_tokens"]))
        return op(hidden, *inputs, **options)

    monkeypatch.setattr(fused_loss, "linear_cross_entropy", counted)
    with_our_loss(applied)
    model.compile(fullgraph=True)
    fused = results(model, tokens, autocast)
    chunk = {False: 6_710_784, True: 13_421_568}[autocast]  # 1 GiB of logits of 40 words
    assert (applied.counts["ops"], applied.not_applied, seen) == (1, {}, {(WIDTH, chunk)})
    assert fused[0].dtype == plain[0].dtype
    loose = {"rtol": 0.02, "atol": 0.01} if autocast else {}
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, **loose)


def test_batches_of_other_sizes_have_their_own_loss():
    model, applied = Model(as_transformers_has_it), notes()
    batches = [torch.randint(0, VOCABULARY, shape) for shape in ((3, 7), (2, 5), (4, 9))]
    plain = [results(model, tokens, False) for tokens in batches]
    with_our_loss(applied)
    model.compile(dynamic=True)
    for tokens, expected in zip(batches, plain, strict=True):
        for ours, theirs in zip(results(model, tokens, False), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert applied.counts["ops"] >= 1


def test_a_16_bit_loss_outside_autocast_keeps_its_dtype_and_fp16_waits_for_the_scaler(monkeypatch: pytest.MonkeyPatch):
    waits: list[bool] = []
    op = fused_loss.linear_cross_entropy
    monkeypatch.setattr(
        fused_loss,
        "linear_cross_entropy",
        lambda *inputs, **options: waits.append(not options["gradients_in_forward"]) or op(*inputs, **options),
    )
    with_our_loss(notes())
    for dtype in (torch.bfloat16, torch.float16):
        torch.compiler.reset()
        model, tokens = Model(summed_and_smoothed).to(dtype), torch.randint(0, VOCABULARY, (2, 5))
        plain = model(tokens)
        model.compile()
        assert model(tokens).dtype == plain.dtype == dtype
        torch.testing.assert_close(model(tokens), plain, rtol=0.02, atol=0.02)
    assert waits == [False, False, True, True]


def returned(model: Model, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(hidden)
    return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))


def returned_twice_and_cast(model: Model, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = model.head(hidden).float()
    return logits, F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1)), logits


@pytest.mark.parametrize("loss", [returned, returned_twice_and_cast])
def test_returned_logits_come_when_they_are_used(loss: Forward):
    model, tokens, applied = Model(loss), torch.randint(0, VOCABULARY, (3, 7)), notes()

    def trained(uses_logits: bool) -> list[Tensor]:
        model.zero_grad()
        logits, value, *_ = model(tokens)
        (value + (0.1 * logits[:, 0].sum() if uses_logits else 0.0)).backward()
        return [value.detach(), logits.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]

    plain = [trained(uses_logits) for uses_logits in (False, True)]
    with_our_loss(applied)
    model.compile(fullgraph=True)
    logits, value, *again = model(tokens)
    assert isinstance(logits, LateLogits)
    assert all(each is logits or isinstance(each, LateLogits) for each in again)
    assert not isinstance(value, LateLogits)
    assert applied.counts["ops"] == 1
    for expected, uses_logits in zip(plain, (False, True), strict=True):
        for ours, theirs in zip(trained(uses_logits), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Qwen3"])
def test_a_compiled_model_of_transformers_has_our_loss_and_late_logits(name: str):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    tokens, applied = torch.randint(0, VOCABULARY, (2, 9)), notes()
    plain = model(input_ids=tokens, labels=tokens)
    expected = torch.autograd.grad(plain.loss, [*model.parameters()])
    with_our_loss(applied)
    model.compile()
    fused = model(input_ids=tokens, labels=tokens)
    assert applied.counts["ops"] == 1
    assert isinstance(fused.logits, LateLogits)
    torch.testing.assert_close(fused.loss, plain.loss)
    for ours, theirs in zip(torch.autograd.grad(fused.loss, [*model.parameters()]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(fused.logits + 0.0, plain.logits)


def with_a_bias(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, model.head.weight, model.class_weights).flatten(0, 1), tokens.flatten())


def with_class_weights(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten(), weight=model.class_weights)


def of_each_token(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).flatten(0, 1), tokens.flatten(), reduction="none").mean()


def of_probabilities(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = model.head(hidden).flatten(0, 1)
    return F.cross_entropy(logits, F.one_hot(tokens.flatten(), VOCABULARY).float())


def of_scaled_logits(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy((model.head(hidden) * 0.5).flatten(0, 1), tokens.flatten())


def of_part_of_the_vocabulary(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden)[..., :-1].flatten(0, 1), tokens.flatten().clamp(max=VOCABULARY - 2))


def of_tokens_in_another_order(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).transpose(0, 1).flatten(0, 1), tokens.T.flatten())


def of_chosen_tokens(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden)[tokens % 2 == 0], tokens[tokens % 2 == 0])


def with_classes_in_the_middle(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).transpose(1, 2), tokens)


def rounded_to_bf16(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).to(torch.bfloat16).flatten(0, 1), tokens.flatten())


def of_an_item_of_a_tuple(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = model.head(hidden.flatten(0, 1)).chunk(3)[0]
    return F.cross_entropy(logits, tokens.flatten()[:7])


def under_another_autocast(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def without_a_gradient_of_the_head(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model.head(hidden)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def of_hidden_states_that_are_written_over(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    hidden = hidden.detach().clone()
    logits = model.head(hidden).detach()
    hidden.zero_()
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def returned_before_hidden_states_are_written_over(model: Model, hidden: Tensor, tokens: Tensor) -> Any:
    hidden = hidden.detach().clone()
    logits = F.linear(hidden, model.head.weight.detach())
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    hidden += 1
    return logits, loss


def of_another_dtype_by_view(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).view(torch.float32).flatten(0, 1), tokens.flatten())


def of_one_logit(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, model.head.weight[0]), tokens[:, 0].clamp(max=6))


def of_rows_that_only_look_whole(model: Model, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model.head(hidden).view(VOCABULARY, -1)[:, :21].T.contiguous(), tokens.flatten())


@pytest.mark.parametrize(
    "loss",
    [
        with_a_bias, with_class_weights, of_each_token, of_probabilities, of_scaled_logits, of_part_of_the_vocabulary,
        of_tokens_in_another_order, of_chosen_tokens, with_classes_in_the_middle, rounded_to_bf16, of_rows_that_only_look_whole,
        of_an_item_of_a_tuple, under_another_autocast, without_a_gradient_of_the_head, of_hidden_states_that_are_written_over,
        returned_before_hidden_states_are_written_over, of_another_dtype_by_view, of_one_logit,
    ],
)  # fmt: skip
def test_another_loss_stays(loss: Forward):
    model, tokens, applied = Model(loss), torch.randint(0, VOCABULARY, (3, 7)), notes()
    plain = model(tokens)
    with_our_loss(applied)
    model.compile()
    torch.testing.assert_close(model(tokens), plain)
    assert applied.counts["ops"] == 0


def with_accuracy(model: Model, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(hidden)
    return (logits.argmax(-1) == tokens).float().mean(), F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def with_logits_of_the_last_token(model: Model, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(hidden)[:, :-1]
    return logits, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("loss", [with_accuracy, with_logits_of_the_last_token])
def test_a_loss_whose_logits_serve_for_more_stays_and_says_so(loss: Forward):
    model, applied = Model(loss), notes()
    with_our_loss(applied)
    model.compile()
    model(torch.randint(0, VOCABULARY, (3, 7)))
    assert applied.not_applied["ops"].startswith("the compiled model uses its logits for more than its loss")


def test_without_a_kernel_the_loss_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_loss, "has_kernel", operators.has_kernel)
    model, applied = Model(by_hand), notes()
    with_our_loss(applied)
    model.compile()
    model(torch.randint(0, VOCABULARY, (3, 7)))
    assert applied.counts["ops"] == 0


def test_a_graph_that_nobody_foresaw_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_loss, "_loss_of", lambda _: 1 / 0)
    model, applied = Model(by_hand), notes()
    with_our_loss(applied)
    model.compile()
    assert model(torch.randint(0, VOCABULARY, (3, 7))).dim() == 0
    assert applied.counts["ops"] == 0


def test_a_graph_that_cannot_be_changed_to_the_end_stays(monkeypatch: pytest.MonkeyPatch):
    model, tokens, applied = Model(returned), torch.randint(0, VOCABULARY, (3, 7)), notes()
    plain = model(tokens)
    monkeypatch.setattr(fused_loss, "_same_rows", lambda *_: 1 / 0)
    with_our_loss(applied)
    model.compile()
    torch.testing.assert_close(model(tokens), plain)
    assert applied.counts["ops"] == 0


def test_counting_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_loss, "_fuse", lambda *_: pytest.fail("it is only counted"))
    counted = count_losses()
    for loss in (by_hand, with_accuracy):
        torch.compiler.reset()
        model = Model(loss)
        model.compile()
        model(torch.randint(0, VOCABULARY, (3, 7)))
    assert counted() == 1


def late(hidden: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> LateLogits:
    return late_logits(hidden, weight, matmul_dtype=torch.float32, dtype=dtype)


def test_late_logits_say_their_shape_without_being_made(monkeypatch: pytest.MonkeyPatch):
    logits = late(torch.randn(2, 5, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.bfloat16)
    monkeypatch.setattr(F, "linear", lambda *_: pytest.fail("nobody used them"))
    assert (logits.shape, logits.dtype, logits.dim()) == ((2, 5, VOCABULARY), torch.bfloat16, 3)
    assert (logits.size(-1), logits.device.type, logits.numel()) == (VOCABULARY, "cpu", 10 * VOCABULARY)


def test_late_logits_first_used_without_a_graph_have_one_later():
    hidden, weight = torch.randn(2, WIDTH, requires_grad=True), nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    logits = late(hidden, weight)
    with torch.no_grad():
        best = logits.argmax(-1)
    assert torch.equal(best, (hidden @ weight.T).argmax(-1))
    torch.stack([logits, 2 * logits]).sum().backward()
    torch.testing.assert_close(weight.grad, 3 * hidden.sum(0).expand(VOCABULARY, -1))


def test_late_logits_of_weights_that_have_changed_say_so():
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    logits, used = late(torch.randn(2, WIDTH), weight), late(torch.randn(2, WIDTH), weight)
    before = used.softmax(-1)
    with torch.no_grad():
        weight.add_(1)
    torch.testing.assert_close(used.softmax(-1), before)
    with pytest.raises(RuntimeError, match="use them before the optimizer's step, or run without ops=trainstep"):
        logits.softmax(-1)


class Doubled(torch.autograd.Function):
    """Gets past __torch_function__, as losses and wrappers of others do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize(
    "use", [Doubled.apply, lambda logits: 2 * logits, lambda logits: 2 * logits.float(), torch.nn.Module.__call__]
)
def test_whoever_uses_late_logits_has_their_gradient(use: Any):
    use = nn.LogSoftmax(-1) if use is torch.nn.Module.__call__ else use
    hidden, weight = torch.randn(3, WIDTH, requires_grad=True), nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    factors = torch.randn(3, VOCABULARY)
    (use(late(hidden, weight)) * factors).sum().backward()
    gradients = hidden.grad, weight.grad
    (
        use(F.linear(again := hidden.detach().requires_grad_(), other := weight.detach().requires_grad_())) * factors
    ).sum().backward()
    torch.testing.assert_close(gradients, (again.grad, other.grad))


def test_late_logits_of_an_evaluation_have_no_graph():
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = late(torch.randn(2, WIDTH), weight)
        assert not logits.requires_grad
        assert logits.numpy().shape == (2, VOCABULARY)
        assert logits.argmax(-1).shape == (2,)


def test_late_logits_that_were_used_stay_what_they_were():
    hidden, weight = torch.randn(2, WIDTH, requires_grad=True), nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    logits = late(hidden, weight)
    with torch.no_grad():
        best = logits.argmax(-1)
        weight.add_(1)
    assert torch.equal(logits.detach().argmax(-1), best), (
        "an accuracy, and the same for a log behind the optimizer's step"
    )


def test_what_is_written_into_late_logits_stays():
    hidden, weight = torch.randn(2, WIDTH, requires_grad=True), nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    logits = late(hidden, weight)
    logits[..., 5:] = -1e4
    logits.logsumexp(-1).sum().backward()
    assert weight.grad is not None
    assert not weight.grad[5:].any()
    assert weight.grad[:5].any()
    logits = late(hidden, weight)
    with torch.no_grad():
        logits[..., 5:] = -1e4
    for again in (logits, logits.detach(), logits.float()):
        assert (again.softmax(-1)[..., 5:] == 0).all()


def test_late_logits_that_are_cast_and_looked_at_are_not_made(monkeypatch: pytest.MonkeyPatch):
    logits = late(torch.randn(2, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH), torch.bfloat16)
    monkeypatch.setattr(F, "linear", lambda *_: pytest.fail("nobody used them"))
    cast = logits.float()  # as accelerate does with all results of a model
    assert (cast.dtype, cast.shape, cast.requires_grad, logits.detach().requires_grad) == (
        torch.float32,
        (2, VOCABULARY),
        True,
        False,
    )
    assert isinstance(cast, LateLogits)


def test_late_logits_ignore_autocast_and_work_in_inference_mode():
    with torch.inference_mode():
        hidden = torch.randn(2, WIDTH)
        weight = torch.randn(VOCABULARY, WIDTH)
        with torch.autocast("cpu", torch.bfloat16):
            logits = late(hidden, weight) + 0.0
        torch.testing.assert_close(logits, F.linear(hidden, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [by_hand, as_transformers_has_it, returned])
def test_on_a_gpu_loss_and_gradients_are_as_near_to_fp32_as_torchs(loss: Forward, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", torch._TorchCompileInductorWrapper.__call__)
    sizes = 2048, 256

    def made() -> Model:
        torch.manual_seed(0)
        model = Model(loss)
        model.tokens, model.head = nn.Embedding(*sizes), nn.Linear(sizes[1], sizes[0], bias=False)
        return model.to("cuda")

    tokens = torch.randint(0, sizes[0], (5, 1000), device="cuda")

    def trained(model: Model, autocast: bool) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            result = model(tokens)
        value = result[1] if isinstance(result, tuple) else result
        value.backward()
        return [value.detach(), *(parameter.grad for parameter in model.parameters())]

    exact, plain = trained(made(), False), trained(made(), True)
    applied, model = notes(), made()
    with_our_loss(applied)
    model.compile()
    fused = trained(model, True)
    assert applied.counts["ops"] == 1
    for ours, theirs, right in zip(fused, plain, exact, strict=True):
        allowed = 2 * (theirs - right).abs().max() + torch.finfo(torch.bfloat16).eps * right.abs().max()
        assert (ours - right).abs().max() <= allowed
