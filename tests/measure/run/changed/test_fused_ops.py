"""Which modules of a script `--apply ops=trainstep` gives our ops: those that compute the same, whatever they are called."""

import functools
import io
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cell_maker import import_path
from trainstep.measure.run.changed import fused_ops, steering
from trainstep.measure.run.changed.applied import Applied
from trainstep.measure.run.changed.fused_ops import fusable_parts, with_our_ops
from trainstep.ops import hugging_face_llama
from trainstep.ops.rms_norm import RMSNorm
from trainstep.records.facts import facts_of
from trainstep.records.store import Store

WIDTH = 24


class Norm(nn.Module):
    """As Llama's, Mistral's and Qwen's; `shift` 1 is Gemma's formula."""

    def __init__(self, *, shift: float = 0.0, eps: float = 1e-6, name: str = "variance_epsilon") -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), shift
        setattr(self, name, eps)
        self._eps = eps

    def normed(self, wide: torch.Tensor) -> torch.Tensor:
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)

    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return (self.shift + self.weight) * self.normed(hidden.float()).to(hidden.dtype)


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40)
        self.down_proj, self.act_fn = nn.Linear(40, WIDTH), activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class InTwoLines(Mlp):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result  # noqa: RET504  (as Transformers' MLPs are written)


@pytest.fixture(autouse=True)
def _on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Modules count as on a GPU, where ops have kernels; the ops themselves run plain PyTorch here."""
    if request.node.name != "test_without_a_kernel_nothing_is_changed":
        monkeypatch.setattr(fused_ops, "has_kernel", lambda *_: True)


def test_without_a_kernel_nothing_is_changed():
    module, applied = nn.Sequential(Norm(), Mlp()), notes()
    with_our_ops(applied, module)
    assert applied.not_applied["ops"].startswith("where the model is, trainstep's ops are plain PyTorch")
    assert not any("forward" in vars(part) for part in module.modules())


def notes() -> Applied:
    return Applied({"ops": "trainstep"})


def results_and_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make",
    [Norm, lambda: Norm(name="eps", eps=1e-5), lambda: nn.RMSNorm(WIDTH, eps=1e-6), Mlp, InTwoLines],
    ids=["norm", "norm with eps", "torch's norm", "mlp", "mlp in two lines"],
)
def test_what_computes_the_same_is_changed_and_gives_the_same(make: Any, dtype: torch.dtype):
    module = make().to(dtype)
    x = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    names = list(module.state_dict())
    assert fusable_parts(module) == 1
    assert "forward" not in vars(module), "counting changes nothing"
    before, applied = results_and_gradients(module, x), notes()
    with_our_ops(applied, module)
    assert (applied.counts["ops"], applied.not_applied) == (1, {})
    assert vars(module)["forward"].__func__.__module__ == fused_ops.__name__
    assert list(module.state_dict()) == names
    loose = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for ours, theirs in zip(results_and_gradients(module, x), before, strict=True):
        torch.testing.assert_close(ours, theirs, **loose)
    assert fusable_parts(module) == 0
    with_our_ops(applied, module)
    assert applied.counts["ops"] == 1, "once is enough"


class OverHalf(Norm):
    def normed(self, wide: torch.Tensor) -> torch.Tensor:
        return wide * torch.rsqrt(wide[..., : WIDTH // 2].square().mean(-1, keepdim=True) + self._eps)


class InGroups(Norm):
    def normed(self, wide: torch.Tensor) -> torch.Tensor:
        return super().normed(wide.unflatten(-1, (2, WIDTH // 2))).flatten(-2)


class OverAll(Norm):
    def normed(self, wide: torch.Tensor) -> torch.Tensor:
        return wide * torch.rsqrt(wide.square().mean() + self._eps)


class EpsilonOutside(Norm):
    def normed(self, wide: torch.Tensor) -> torch.Tensor:
        return wide / (wide.square().mean(-1, keepdim=True).sqrt() + self._eps)


class Asserts(Norm):
    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert hidden.dim() == 4
        return super().forward(hidden)


class TakesTwo(Norm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden * F.silu(gate))


class DropsOut(Norm):
    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return F.dropout(super().forward(hidden), 0.5, self.training)


class Adds(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def doubled(forward: Any) -> Any:
    @functools.wraps(forward)
    def called(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * forward(self, x)

    return called


class Decorated(Mlp):
    forward = doubled(Mlp.forward)


class SiLU(nn.Module):
    """As another has it: GELU, nearly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def with_changed_activation(kind: str) -> nn.Module:
    mlp = Mlp()
    if kind == "hook":
        mlp.act_fn.register_forward_hook(lambda _module, _inputs, y: 2 * y)
    else:
        mlp.act_fn.forward = lambda x: 2 * x
    return mlp


class Sharded(nn.Parameter):
    """As the parameters of FSDP2, which are no plain ones."""


def with_weight(module: Any, weight: nn.Parameter) -> nn.Module:
    module.weight = weight
    return module


def hooked() -> nn.Module:
    module = Norm()
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Norm(shift=1.0),
        lambda: with_weight(Norm(shift=1.0), nn.Parameter(torch.zeros(WIDTH))),
        lambda: nn.LayerNorm(WIDTH, bias=False, eps=1e-6),
        lambda: with_weight(nn.LayerNorm(WIDTH, bias=False, eps=1e-6), nn.Parameter(torch.zeros(WIDTH))),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH),
        lambda: nn.RMSNorm((2, WIDTH), eps=1e-6),
        lambda: nn.RMSNorm(WIDTH, eps=1e-6, device="meta"),
        lambda: with_weight(Norm(), nn.Parameter(torch.ones(1))),
        lambda: with_weight(Norm(), Sharded(torch.ones(WIDTH))),
        lambda: Norm().double(),
        lambda: Norm().eval(),
        lambda: DropsOut(),
        *(OverHalf, InGroups, OverAll, lambda: EpsilonOutside(eps=1e-3), Asserts, TakesTwo, hooked),
        *(lambda: Mlp(nn.GELU()), Adds, Swapped, lambda: nn.Linear(WIDTH, WIDTH), Decorated, lambda: Mlp(SiLU())),
        lambda: with_changed_activation("hook"),
        lambda: with_changed_activation("forward"),
        lambda: nn.DataParallel(Norm()),
    ],
)
def test_what_computes_something_else_stays(make: Any):
    module = nn.Sequential(make())
    applied = notes()
    with_our_ops(applied, module)
    assert (fusable_parts(module), applied.counts["ops"]) == (0, 0)
    assert "no part of the script's module computes" in applied.not_applied["ops"]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [Norm, lambda: nn.RMSNorm(WIDTH, eps=1e-6)], ids=["norm", "torch's norm"])
def test_the_dtype_of_a_result_is_the_modules(make: Any, weight: torch.dtype, given: torch.dtype, autocast: bool):
    module, x = make().to(weight), torch.randn(5, WIDTH).to(given)

    def result() -> torch.Tensor | str:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                return module(x)
            except RuntimeError as error:
                return str(error)

    before = result()
    with_our_ops(notes(), module)
    after = result()
    if isinstance(before, str):
        assert after == before
    else:
        assert (after.dtype, "forward" in vars(module)) == (before.dtype, True)
        torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)


def test_what_our_op_does_not_take_goes_to_the_modules_own_forward():
    norm = RMSNorm(WIDTH)
    x, residual = torch.randn(2, 3, WIDTH).unbind()
    expected = norm(x, residual)
    with_our_ops(notes(), norm)
    for got, wanted in zip(norm(x, residual), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    own = Norm()
    with_our_ops(notes(), own)
    torch.testing.assert_close(own(hidden=x), own(x))
    torch.testing.assert_close(own(x, None), own(x))


class InPlainHalves(Norm):
    """Without a cast, so that squares of fp16 are lost."""

    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self._eps) * self.weight


def test_a_dtype_in_which_a_norm_is_another_stays_the_modules():
    module = InPlainHalves(eps=1e-8)
    with_our_ops(applied := notes(), module)
    assert applied.counts["ops"] == 1
    x = 1e-4 * torch.randn(3, WIDTH)
    torch.testing.assert_close(
        module(x.half()), InPlainHalves.forward(module, x.half()), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(module(x), InPlainHalves.forward(module, x))


def test_a_result_keeps_its_order_in_memory():
    norm = Norm()
    x = torch.randn(2, WIDTH, 5).transpose(1, 2)
    expected = norm(x)
    with_our_ops(notes(), norm)
    torch.testing.assert_close(norm(x), expected)
    assert norm(x).stride() == expected.stride() != norm(x.contiguous()).stride()


class Counts(Norm):
    calls = 0

    def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.calls += 1
        random.random()
        return super().forward(hidden)


def test_a_norm_with_a_state_is_looked_at_without_a_trace():
    module = nn.Sequential(Counts())
    random.seed(5)
    assert fusable_parts(module) == 1
    drawn = random.random()
    random.seed(5)
    assert (random.random(), module[0].calls) == (drawn, 0)


def test_a_projection_that_is_wrapped_is_called():
    mlp = Mlp()
    mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Linear(40, 40))  # as an adapter does
    x = torch.randn(3, WIDTH)
    expected = mlp(x)
    with_our_ops(applied := notes(), mlp)
    assert applied.counts["ops"] == 1
    torch.testing.assert_close(mlp(x), expected)


def test_looking_changes_nothing_of_the_script():
    module = nn.Sequential(Norm(), Mlp(), DropsOut())
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    assert fusable_parts(module) == 2
    drawn = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.randn(4))
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def test_what_was_compiled_is_compiled_anew(monkeypatch: pytest.MonkeyPatch):
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    module, x = Root(), torch.randn(2, WIDTH)
    module.compile(backend=backend, fullgraph=True)
    expected = module(x)
    with_our_ops(notes(), module)
    torch.testing.assert_close(module(x), expected)
    module(2 * x)
    assert len(graphs) == 2, "one before, one after"
    monkeypatch.setattr(fused_ops, "rms_norm", lambda x, *_, **__: torch.zeros_like(x))
    torch.compiler.reset()
    module.mlp.down_proj.bias.data.zero_()
    module.mlp.up_proj.bias.data.zero_()
    torch.testing.assert_close(module(x), x), "our op is in the graph"
    torch.compiler.reset()


def test_a_changed_module_can_be_saved_whole_and_has_its_own_forward_then():
    module, x = nn.Sequential(Norm(), Mlp()), torch.randn(2, WIDTH)
    with_our_ops(notes(), module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), module(x))


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )
    return model.train()


TOKENS = torch.arange(18).reshape(2, 9)


def test_a_llama_is_changed_with_its_loss():
    llama = tiny_llama()
    wrapped = nn.ModuleDict({"llama": llama})
    assert fusable_parts(wrapped) == 5 + 2 + 1, "five norms, two MLPs, a loss"
    before = llama(input_ids=TOKENS, labels=TOKENS)
    applied = notes()
    with_our_ops(applied, wrapped)
    assert (applied.counts["ops"], applied.not_applied) == (8, {})
    after = llama(input_ids=TOKENS, labels=TOKENS)
    assert before.logits is not None
    assert after.logits is None, "its logits never exist whole"
    torch.testing.assert_close(after.loss, before.loss)


@pytest.mark.parametrize(
    "kind", ["wrapped forward", "own loss", "another kind of loss", "adapter on the head", "hook on the head"]
)
def test_a_llamas_own_loss_stays_where_it_is_more_than_the_usual(kind: str):
    llama = tiny_llama()
    if kind == "wrapped forward":  # as accelerate's mixed precision does
        own = llama.forward
        llama.forward = lambda *inputs, **options: own(*inputs, **options)
    elif kind == "own loss":
        llama.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 123
    elif kind == "another kind of loss":
        llama.loss_type = "ForMaskedLM"
    elif kind == "adapter on the head":
        llama.lm_head = nn.Sequential(llama.lm_head, nn.Linear(40, 40))
    else:
        llama.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 2)
    before = llama(input_ids=TOKENS, labels=TOKENS)
    with_our_ops(notes(), llama)
    after = llama(input_ids=TOKENS, labels=TOKENS)
    torch.testing.assert_close(after.loss, before.loss)
    assert after.logits is not None


def test_labels_by_position_and_a_second_patch_of_a_pickle():
    llama = tiny_llama()
    expected = llama(TOKENS, None, None, None, None, TOKENS).loss
    with_our_ops(notes(), llama)
    torch.testing.assert_close(llama(TOKENS, None, None, None, None, TOKENS).loss, expected)
    again = pickle.loads(pickle.dumps(llama))
    assert again(input_ids=TOKENS, labels=TOKENS).logits is not None, "its own forward"
    assert fusable_parts(again) == 8
    with_our_ops(notes(), again)
    assert again(input_ids=TOKENS, labels=TOKENS).logits is None


def test_gradients_in_fp16_wait_for_the_scaler(monkeypatch: pytest.MonkeyPatch):
    llama, given = tiny_llama(), []
    original = hugging_face_llama.linear_cross_entropy
    monkeypatch.setattr(
        hugging_face_llama,
        "linear_cross_entropy",
        lambda *inputs, **options: given.append(options["gradients_in_forward"]) or original(*inputs, **options),
    )
    hugging_face_llama.patch(llama)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            llama(input_ids=TOKENS, labels=TOKENS)
    llama(input_ids=TOKENS, labels=TOKENS)
    assert given == [False, True, True]


SCRIPT = """
import torch
from torch import nn

from trainstep.measure.run.changed import fused_ops

fused_ops.has_kernel = lambda *_: {kernels}  # True: as on a GPU
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6) if {norm} else nn.LayerNorm(16), nn.Linear(16, 1))

    def forward(self, x):
        return self.parts(x)


model = Model()
if {compiled}:
    model.compile(backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(
    folder: Path, name: str, *, norm: bool = True, compiled: bool = False, options: list[str], kernels: bool = True
) -> Any:
    script, out = folder / f"{name}.py", folder / f"{name}.jsonl"
    script.write_text(SCRIPT.format(norm=norm, compiled=compiled, kernels=kernels))
    words = [sys.executable, "-m", "trainstep", "run", "--quiet", "--no-page", "--inspect-every", "0"]
    words += [*options, "--stop-after", "10", "--out", str(out), str(script)]
    environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return Store(out).read()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_script_trains_alike_with_our_ops(tmp_path: Path, compiled: bool):
    plain = run(tmp_path, "plain", compiled=compiled, options=[])
    changed = run(tmp_path, "changed", compiled=compiled, options=["--apply", "ops=trainstep"])
    assert (changed.fact("applied"), changed.fact("not_applied")) == ("ops=trainstep", None)
    graphs = [record.fact("compiled_graphs", 0) for record in (plain, changed)]
    assert graphs == ([1, 2] if compiled else [0, 0]), "compiled once more with our op"
    losses = [record.tables["losses"]["loss"] for record in (plain, changed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 10


@pytest.mark.slow
def test_a_script_without_such_modules_is_told(tmp_path: Path):
    record = run(tmp_path, "other", norm=False, options=["--apply", "ops=trainstep"])
    assert record.fact("not_applied").startswith("ops: no part of the script's module computes")
    record = run(tmp_path, "cpu", kernels=False, options=["--apply", "ops=trainstep"])
    assert record.fact("not_applied").startswith("ops: where the model is, trainstep's ops are plain PyTorch")


@pytest.mark.parametrize(
    ("changes", "on_gpu", "count"), [({}, True, 1), ({}, False, None), ({"gc": "off"}, True, None)]
)
def test_the_originals_first_process_counts_on_a_gpu(
    changes: dict[str, str], on_gpu: bool, count: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(steering, "_is_on_gpu", lambda _: on_gpu)
    hooks: Any = SimpleNamespace(
        called=nn.Sequential(Norm()), followed=None, unfollow=lambda: None, follow=lambda _: None, batch_size=None
    )
    steered = steering.Steering(changes)
    steered.step_ended(2, hooks, lambda: (), lambda *_: None)
    assert steered.facts.get("fusable_parts") == facts_of(fusable_parts=count).get("fusable_parts")
