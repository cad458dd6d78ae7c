"""Random attention problems, and the check of an implementation against references: algorithm, interpreter and GPU alike."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numerics import assert_as_accurate_as
from trainstep.ops import flash_attention, flash_attention_backward, reference


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem. `strided`: the memory layout of q, k and v, as models produce it."""

    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    queries: int
    keys: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    causal: bool = True
    alignment: str = "top_left"
    strided: str = "BHSD"
    seed: int = 0
    magnitude: float = 1.0

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the output's gradient, random normal."""
        torch.manual_seed(self.seed)
        q = self._laid_out(self.heads, self.queries)
        k, v = (self._laid_out(self.key_heads, self.keys) for _ in range(2))
        do = self._laid_out(self.heads, self.queries)
        return tuple(x.to(device) for x in (q * self.magnitude, k, v, do))  # type: ignore[return-value]

    def _laid_out(self, heads: int, positions: int) -> Tensor:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape).to(self.dtype)

        if self.strided == "BSHD":
            return normal(self.batch, positions, heads, self.head_dim).transpose(1, 2)
        if self.strided == "fused":  # one of the three outputs of a fused projection
            return normal(self.batch, positions, 3, heads, self.head_dim)[:, :, 1].transpose(1, 2)
        if self.strided == "padded":  # a row longer than the head
            return normal(self.batch, heads, positions, self.head_dim + 3)[..., : self.head_dim]
        if self.strided == "offset":  # a base without alignment
            flat = normal(self.batch * heads * positions * self.head_dim + 1)
            return flat[1:].view(self.batch, heads, positions, self.head_dim)
        return normal(self.batch, heads, positions, self.head_dim)

    @property
    def pairs(self) -> int:
        return self.batch * self.heads * self.queries * self.keys


ROWS = 32
"""The least number of queries of a random case: the largest of a few errors says little about an implementation."""

Attend = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, *, causal, causal_alignment) -> output and log-sum-exp, with gradients."""


class _ByItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        o, lse = flash_attention(q, k, v, **options, return_lse=True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        return *flash_attention_backward(do, *ctx.saved_tensors, **ctx.options), None


def attend_by_itself(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, causal_alignment: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call flash_attention and flash_attention_backward directly; one head is passed as (B, S, D)."""
    options = {"is_causal": causal, "causal_alignment": causal_alignment, "enable_gqa": True, **options}
    if q.shape[1] > 1:
        return _ByItself.apply(q, k, v, options)  # type: ignore[no-any-return, no-untyped-call]
    o, lse = _ByItself.apply(*(x.squeeze(1) for x in (q, k, v)), options)  # type: ignore[no-untyped-call]
    return o.unsqueeze(1), lse.unsqueeze(1)


def random_case(seed: int, *, longest: int, dtypes: list[torch.dtype], most_pairs: float = float("inf")) -> Case:
    """The case of this seed: it is the same on every machine, so a failure can be repeated by its seed."""
    draw = random.Random(seed)
    while True:
        key_heads = draw.choice([1, 1, 2, 3])
        heads = key_heads * draw.choice([1, 1, 2, 4])
        queries = draw.choice([1, draw.randint(1, 64), draw.randint(1, longest), draw.randint(1, longest)])
        case = Case(
            batch=max(draw.choice([1, 1, 2, 3]), -(-ROWS // (heads * queries))),
            heads=heads,
            key_heads=key_heads,
            queries=queries,
            keys=draw.choice([queries, queries, draw.randint(1, longest)]),
            head_dim=draw.choice([8, 16, 32, 64, 64, 80, 96, 128, 128, 256, draw.randint(8, 256)]),
            dtype=draw.choice(dtypes),
            causal=draw.random() < 0.7,
            alignment=draw.choice(["top_left", "top_left", "bottom_right"]),
            strided=draw.choice(["BHSD", "BHSD", "BSHD", "fused", "padded", "offset"]),
            seed=seed,
        )
        if case.pairs <= most_pairs:
            return case


def covering(cases: Iterable[Case]) -> list[Case]:
    """Those of the cases, in order, that have a pair of properties (layout, mask, which is longer...) that none before has."""
    seen: set[tuple[Any, ...]] = set()
    taken = []
    for case in cases:
        pairs = set(itertools.combinations(_properties(case).items(), 2))
        if not pairs <= seen:
            seen |= pairs
            taken.append(case)
    return taken


def _properties(case: Case) -> dict[str, Any]:
    tile = 64
    return {
        "dtype": case.dtype,
        "mask": (case.causal, case.causal and case.alignment),
        "strided": case.strided,
        "batch": case.batch > 1,
        "heads": (case.heads > 1, case.heads // case.key_heads),
        "width": next((width for width in (32, 64, 80, 96, 128) if case.head_dim <= width), 256),
        "longer": (case.queries > case.keys) - (case.queries < case.keys),
        "queries": (case.queries > tile, case.queries % tile == 0),
        "keys": (case.keys > tile, case.keys % tile == 0),
        "late": case.seed % 3,  # by which the emulator's order is chosen
    }


def check(attend: Attend, case: Case, *, device: str = "cpu", times: int = 2, strict: Sequence[str] = ()) -> None:
    """Check output, log-sum-exp and the three gradients by the 2x rule; queries that see no key must give exactly 0 and -inf.

    `strict`: the outputs whose bound makes no allowance for terms that cancel.
    """
    q, k, v, do = case.tensors(device)
    ours = _outputs(attend, case, q, k, v, do)
    same_dtype = _outputs(_reference, case, q, k, v, do)
    exact = _outputs(_reference, case, *(x.double() for x in (q, k, v, do)))
    blind = exact["lse"] == float("-inf")
    assert torch.equal(ours["lse"] == float("-inf"), blind)
    assert not ours["o"][blind].any()
    assert not ours["dq"][blind].any()
    for outputs in (ours, same_dtype, exact):
        outputs["lse"] = outputs["lse"][~blind]
    terms = _terms(case, exact["o"], *(x.double() for x in (q, k, v, do)))
    terms = {name: size for name, size in terms.items() if name not in strict}
    for name, output in ours.items():
        if output.numel():
            what = f"{name} of {case}"
            assert_as_accurate_as(output, same_dtype[name], exact[name], what, times=times, terms=terms.get(name))


def _terms(case: Case, o: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, float]:
    """The size of the intermediate values of each result, for the eps term of the rule: often far above the result.

    FlashAttention's p = exp(scores - lse) carries an error of eps |lse| where a softmax's own does not, and its p (dp - delta)
    cancels, to exactly 0 where a query sees one key; plain softmax there subtracts equal roundings, delta = rowsum(do o) others.
    """
    mask = {"causal": case.causal, "causal_alignment": case.alignment}
    lse = reference.attention_lse(q, k, **mask)[..., None]  # type: ignore[arg-type]
    repeats = case.heads // case.key_heads
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scale = case.head_dim**-0.5
    hidden = reference._hidden_pairs(q, k, case.alignment) if case.causal else torch.tensor(False, device=q.device)
    p = torch.exp((scale * q @ k.mT).masked_fill(hidden, float("-inf")) - lse.masked_fill(lse == float("-inf"), 0.0))
    p = p * (1 + lse.abs().masked_fill(lse == float("-inf"), 0.0))
    dp, delta = (
        _rounded(do, v),
        (do * o).square().sum(dim=-1, keepdim=True).sqrt() + (do * o).sum(-1, keepdim=True).abs(),
    )
    ds = scale * p * (dp + delta)
    dq, dk, dv = ds @ k.abs(), ds.mT @ q.abs(), p.mT @ do.abs()
    dk, dv = (x.unflatten(1, (case.key_heads, repeats)).sum(dim=2) for x in (dk, dv))
    scores = (scale * _rounded(q, k)).masked_fill(hidden, 0.0)
    terms = {
        "lse": lse.masked_fill(lse == float("-inf"), 0.0).abs().max() + scores.max(),
        "dq": dq.max(),
        "dk": dk.max(),
        "dv": dv.max(),
        "o": (p @ v.abs()).max(),
    }
    return {name: size.item() for name, size in terms.items()}


def _rounded(x: Tensor, y: Tensor) -> Tensor:
    """The size of the roundings in x y^T: the sum, plus the root of its squared terms, since the sum may be 0 by chance."""
    return (x @ y.mT).abs() + (x.square() @ y.square().mT).sqrt()


def _outputs(attend: Attend, case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attend(*leaves, causal=case.causal, causal_alignment=case.alignment)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def _reference(q: Tensor, k: Tensor, v: Tensor, **mask: object) -> tuple[Tensor, Tensor]:
    return reference.attention(q, k, v, **mask), reference.attention_lse(q, k, **mask)  # type: ignore[arg-type]
