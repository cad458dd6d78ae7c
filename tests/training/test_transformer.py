"""The model has its published parameters, agrees with a second, hand-written implementation, and is causal."""

import dataclasses

import pytest
import torch
from torch import Tensor

from numerics import assert_as_accurate_as
from trainstep.config.model import ModelConfig, size, size_names
from trainstep.training.attention import attention_named
from trainstep.training.transformer import RMSNorm, Transformer

SMALL = ModelConfig(d_model=24, d_ff=40, layers=2, heads=3, vocab_size=31)
CPU = torch.device("cpu")


def transformer(config: ModelConfig = SMALL, *, attention: str = "plain", context: int = 17) -> Transformer:
    """A model with weights far from their initial scale, so that every part of it contributes to the loss."""
    torch.manual_seed(1)
    model = Transformer(config, attention=attention_named(attention, context, CPU), context=context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model


def some_tokens(batch_size: int, context: int, vocab_size: int = 31) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab_size, (batch_size, context + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


class ByHand:
    """A second implementation of the model: complex rotations, a loop over heads and queries, weights by name, any dtype."""

    def __init__(self, model: Transformer, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.weights = {n: p.detach().to(dtype).requires_grad_() for n, p in model.named_parameters()}

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        total = sum(self._sequence_loss(row, goal) for row, goal in zip(tokens, targets, strict=True))
        return total / targets.numel()  # type: ignore[return-value]

    def _sequence_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        w = self.weights
        x = w["embedding.weight"][tokens]
        for layer in range(self.config.layers):
            path = f"blocks.{layer}"
            x = x + self._attention(self._norm(x, f"{path}.attention_norm.weight"), f"{path}.attention")
            h = self._norm(x, f"{path}.mlp_norm.weight")
            gate, up = (h @ w[f"{path}.mlp.{name}.weight"].T for name in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{path}.mlp.down.weight"].T
        logits = self._norm(x, "norm.weight") @ w["head.weight"].T
        return (logits.logsumexp(-1) - logits[torch.arange(len(targets)), targets]).sum()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return torch.stack([row / (row.dot(row) / len(row) + 1e-5).sqrt() for row in x]) * self.weights[name]

    def _attention(self, x: Tensor, path: str) -> Tensor:
        d, width = self.config.d_model, self.config.d_model // self.config.heads
        projected = x @ self.weights[f"{path}.qkv.weight"].T
        heads = []
        for head in range(self.config.heads):
            columns = slice(head * width, (head + 1) * width)
            q, k, v = (projected[:, part * d : (part + 1) * d][:, columns] for part in range(3))
            q, k = self._turn(q), self._turn(k)
            heads.append(
                torch.stack([((k[: i + 1] @ q[i]) / width**0.5).softmax(0) @ v[: i + 1] for i in range(len(x))])
            )
        return torch.cat(heads, dim=-1) @ self.weights[f"{path}.out.weight"].T

    @staticmethod
    def _turn(x: Tensor) -> Tensor:
        positions, width = x.shape
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float64), 10_000.0 ** -(torch.arange(0, width, 2).double() / width)
        ).to(x.dtype)
        pairs = torch.complex(x[:, 0::2], x[:, 1::2]) * torch.polar(torch.ones_like(angles), angles)
        return torch.stack((pairs.real, pairs.imag), dim=-1).reshape(positions, width)


def in_one_vector(weights: dict[str, Tensor], scales: dict[str, Tensor]) -> Tensor:
    """Gradients of all weights, each divided by its scale, in one vector."""
    assert set(weights) == set(scales)
    return torch.cat([(weights[name].grad / scale.to(weights[name].dtype)).flatten() for name, scale in scales.items()])


@pytest.mark.parametrize(
    ("name", "parameters"), [("small", 128_625_408), ("large", 969_411_840), ("2.7B", 3_406_809_600)]
)
def test_parameters_of_the_published_sizes(name: str, parameters: int):
    with torch.device("meta"):
        model = Transformer(size(name), attention=attention_named("plain", 8, CPU), context=8)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters == size(name).parameters


@pytest.mark.parametrize("name", size_names())
def test_parameters_by_group_are_the_configs(name: str):
    config = dataclasses.replace(size(name), layers=3)
    with torch.device("meta"):
        model = Transformer(config, attention=attention_named("plain", 8, CPU), context=8)
    groups = {"embedding": 0, "attention": 0, "mlp": 0, "norms": 0, "head": 0}
    for path, parameter in model.named_parameters():
        parts = path.split(".")
        group = "norms" if parameter.dim() == 1 else next(part for part in parts if part in groups)
        groups[group] += parameter.numel()
    assert groups == config.parameter_counts()


def test_there_are_no_biases_and_no_tied_weights():
    model = transformer()
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert model.head.weight is not model.embedding.weight
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert [norm.eps for norm in norms] == [1e-5] * 5
    assert model.cos.shape == (17, 4)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_initial_weights_have_their_deviation():
    torch.manual_seed(0)
    model = Transformer(size("tiny"), attention=attention_named("sdpa", 8, CPU), context=8)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 1e-3


@pytest.mark.parametrize("attention", ["plain", "sdpa", "trainstep"])
@pytest.mark.parametrize(("batch_size", "context"), [(1, 1), (2, 1), (1, 2), (3, 17)])
def test_loss_and_gradients_are_as_accurate_as_by_hand(attention: str, batch_size: int, context: int):
    model = transformer(attention=attention)
    tokens, targets = some_tokens(batch_size, context)
    in_fp32, truth = (ByHand(model, SMALL, dtype) for dtype in (torch.float32, torch.float64))
    losses = [reference.loss(tokens, targets) for reference in (in_fp32, truth)]
    loss = model(tokens, targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert_as_accurate_as(loss, *losses)
    for each_loss in (loss, *losses):
        each_loss.backward()
    # All in one vector, each parameter's gradient on its own scale, since the worst of only 24 numbers varies by chance.
    scales = {name: weight.grad.abs().max() for name, weight in truth.weights.items()}
    assert_as_accurate_as(
        *(
            in_one_vector(weights, scales)
            for weights in (dict(model.named_parameters()), in_fp32.weights, truth.weights)
        )
    )


def test_bf16_weights_give_an_fp32_loss():
    model = transformer()
    exact = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    model.load_state_dict(exact)
    tokens, targets = some_tokens(3, 17)
    in_fp32, truth = (ByHand(model, SMALL, dtype).loss(tokens, targets) for dtype in (torch.float32, torch.float64))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - truth.item()) < 0.05 * truth.item()
    assert abs(loss.item() - truth.item()) > abs(in_fp32.item() - truth.item())


def test_a_sequence_may_be_shorter_than_the_context():
    tokens, targets = some_tokens(2, 5)
    assert torch.equal(transformer(context=17)(tokens, targets), transformer(context=5)(tokens, targets))


@pytest.mark.parametrize("attention", ["plain", "sdpa", "sdpa_math", "sdpa_flash", "trainstep"])
@pytest.mark.parametrize("changed", [1, 8, 16])
def test_a_token_changes_no_logits_before_it(attention: str, changed: int):
    """Changing token t changes the logits of position t, and none before it."""
    model = transformer(attention=attention)
    tokens, targets = some_tokens(1, 17)
    changed_tokens = tokens.clone()
    changed_tokens[0, changed] = (changed_tokens[0, changed] + 1) % 31
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
    with torch.no_grad():
        model(tokens, targets)
        model(changed_tokens, targets)
    assert torch.equal(logits[0][:, :changed], logits[1][:, :changed])
    assert not torch.equal(logits[0][:, changed], logits[1][:, changed])


def test_sequences_of_a_batch_are_independent():
    model = transformer()
    tokens, targets = some_tokens(2, 17)
    separate_losses = [model(tokens[i : i + 1], targets[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(model(tokens, targets), sum(separate_losses) / 2)
