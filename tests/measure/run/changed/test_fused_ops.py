"""Which modules of a script `--apply ops=trainstep` gives our ops: those that compute the same, whatever they are called."""

import os
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
from trainstep.measure.run.changed import fused_ops
from trainstep.measure.run.changed.applied import Applied
from trainstep.measure.run.changed.fused_ops import fusable_parts, with_our_ops
from trainstep.records.store import Store

WIDTH = 24


class Norm(nn.Module):
    """As Llama's, Mistral's and Qwen's; `shift` 1 is Gemma's formula."""

    def __init__(self, *, shift: float = 0.0, eps: float = 1e-6, name: str = "variance_epsilon") -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), shift
        setattr(self, name, eps)
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (self.shift + self.weight) * normed.to(hidden.dtype)


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module, *, product: bool = True) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40)
        self.down_proj, self.act_fn, self.product = nn.Linear(40, WIDTH), activation, product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        return self.down_proj(gate * up if self.product else gate + up)


def notes() -> Applied:
    return Applied({"ops": "trainstep"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        Norm,
        lambda: Norm(name="eps", eps=1e-5),
        lambda: nn.RMSNorm(WIDTH, eps=1e-6),
        lambda: Mlp(nn.SiLU()),
    ],
    ids=["norm", "norm with eps", "torch's norm", "mlp"],
)
def test_what_computes_the_same_is_changed_and_gives_the_same(make: Any, dtype: torch.dtype):
    module = make().to(dtype)
    x = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    names = list(module.state_dict())

    def both() -> list[torch.Tensor]:
        y = module(x)
        parameters = [x, *module.parameters()]
        return [y, *torch.autograd.grad(y.float().square().sum(), parameters)]

    assert fusable_parts(module) == 1
    assert "forward" not in vars(module), "counting changes nothing"
    before, applied = both(), notes()
    with_our_ops(applied, module)
    assert applied.counts["ops"] == 1
    assert vars(module)["forward"].__func__.__module__ == fused_ops.__name__
    assert list(module.state_dict()) == names
    loose = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for ours, theirs in zip(both(), before, strict=True):
        torch.testing.assert_close(ours, theirs, **loose)
    assert fusable_parts(module) == 0
    with_our_ops(applied, module)
    assert applied.counts["ops"] == 1, "once is enough"


class Sharded(nn.Parameter):
    """As the parameters of FSDP2, which are no plain ones."""


def with_sharded_weight() -> nn.Module:
    module = Norm()
    module.weight = Sharded(module.weight.detach())
    return module


class TakesTwo(Norm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden * F.silu(gate))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Norm(shift=1.0),
        lambda: nn.LayerNorm(WIDTH, bias=False, eps=1e-6),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH),
        lambda: nn.RMSNorm((2, WIDTH), eps=1e-6),
        lambda: Mlp(nn.GELU()),
        lambda: Mlp(nn.SiLU(), product=False),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: Norm().double(),
        lambda: nn.RMSNorm(WIDTH, eps=1e-6, device="meta"),
        TakesTwo,
        with_sharded_weight,
    ],
)
def test_what_computes_something_else_stays(make: Any):
    module = nn.Sequential(make())
    applied = notes()
    with_our_ops(applied, module)
    assert (fusable_parts(module), applied.counts["ops"]) == (0, 0)
    assert "no part of the script's module computes" in applied.not_applied["ops"]


def test_looking_leaves_the_random_numbers_of_the_script_alone():
    module = nn.Sequential(Norm(), Mlp(nn.SiLU()))
    torch.manual_seed(3)
    fusable_parts(module)
    drawn = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.randn(4))


def test_what_was_compiled_is_compiled_anew(monkeypatch: pytest.MonkeyPatch):
    module = nn.Sequential(Norm())
    module.compile(backend="eager")
    x = torch.randn(2, WIDTH)
    module(x)
    with_our_ops(notes(), module)
    monkeypatch.setattr(fused_ops, "rms_norm", lambda x, weight, eps: torch.zeros_like(x))
    assert module(x).eq(0).all()
    torch.compiler.reset()


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )


def test_a_llama_is_changed_with_its_loss():
    model = SimpleNamespace(llama=tiny_llama())
    wrapped = nn.ModuleDict({"llama": model.llama})
    assert fusable_parts(wrapped) == 1
    tokens = torch.randint(40, (2, 9))
    before = model.llama(input_ids=tokens, labels=tokens)
    applied = notes()
    with_our_ops(applied, wrapped)
    assert (applied.counts["ops"], applied.not_applied) == (1, {})
    after = model.llama(input_ids=tokens, labels=tokens)
    assert before.logits is not None
    assert after.logits is None, "its logits never exist whole"
    torch.testing.assert_close(after.loss, before.loss)


def test_a_llama_with_another_activation_says_why_it_stays():
    llama = tiny_llama()
    llama.config.hidden_act = "gelu"
    applied = notes()
    with_our_ops(applied, llama)
    assert applied.not_applied == {"ops": "model: its activation must be silu, but is gelu"}


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
parts = [nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6) if {norm} else nn.LayerNorm(16), nn.Linear(16, 1)]
model = nn.Sequential(*parts)
if {compiled}:
    model.compile(backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, name: str, *, norm: bool, compiled: bool, options: list[str]) -> Any:
    script, out = folder / f"{name}.py", folder / f"{name}.jsonl"
    script.write_text(SCRIPT.format(norm=norm, compiled=compiled))
    words = [sys.executable, "-m", "trainstep", "run", "--quiet", "--no-page", "--inspect-every", "0"]
    words += [*options, "--stop-after", "10", "--out", str(out), str(script)]
    environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return Store(out).read()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_script_trains_alike_with_our_ops(tmp_path: Path, compiled: bool):
    plain = run(tmp_path, "plain", norm=True, compiled=compiled, options=[])
    changed = run(tmp_path, "changed", norm=True, compiled=compiled, options=["--apply", "ops=trainstep"])
    assert (plain.fact("fusable_parts"), plain.fact("not_applied")) == (1, None)
    assert (changed.fact("applied"), changed.fact("not_applied")) == ("ops=trainstep", None)
    losses = [record.tables["losses"]["loss"] for record in (plain, changed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 10


@pytest.mark.slow
def test_a_script_without_such_modules_is_told(tmp_path: Path):
    record = run(tmp_path, "other", norm=False, compiled=False, options=["--apply", "ops=trainstep"])
    assert record.fact("not_applied").startswith("ops: no part of the script's module computes")
