"""Makes an attention cell's inputs and checks an implementation's output and gradients against ops/reference.py.

`check_values(config, tensors, attend)` returns facts. It compares a few whole key heads, with every query head that reads them,
against the reference in a wider dtype. The reference goes over them in chunks of queries, so that S = 65536 costs a second or less
and no S x S matrix exists. The same chunks in the cell's own dtype show what plain PyTorch loses there, which is a normal error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.costs.attention import AttentionSizes, attention_backward_flops, attention_bytes, attention_flops
from trainstep.measure.attention.peers import as_BHSD, own_settings
from trainstep.measure.step.lone_pass import relative_error
from trainstep.ops import reference
from trainstep.ops.flash_attention import flash_attention
from trainstep.records.facts import Fact, facts_of
from trainstep.training.attention import Attention
from trainstep.training.precision import DTYPES

Values = Mapping[str, Tensor]
"""`output` and, unless the direction is forward, `dq`, `dk`, `dv`: each in its input's layout or as a `_slice`."""
_PAIRS = {"cuda": 2**26, "cpu": 2**22}
"""Device -> the most query-key pairs compared over all heads. One key head is always compared, whatever it costs."""
_CHUNK_PAIRS = {"cuda": 2**25, "cpu": 2**22}
"""Device -> the most query-key pairs in memory at once: 256 MiB per matrix in fp64, of which five or six are live."""
_WRITTEN_OUT = ("plain", "plain_compiled", "sdpa_math")
"""Implementations that write the matrix of scores to memory."""
_PARTS = ("inputs", "scores", "softmax", "lse", "output", "gradients")


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Inputs and the output's gradient, in the config's layout; q, k, v are leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def random_tensors(config: AttentionConfig, device: torch.device) -> Tensors:
    """Random normal inputs in the config's layout."""
    # Constant operands would switch fewer transistors, so the clock would be higher than in real use.
    generator = torch.Generator(device).manual_seed(config.seed)

    def normal(heads: int, positions: int) -> Tensor:
        shape = {
            "BHSD": (config.batch, heads, positions, config.head_dim),
            "BSHD": (config.batch, positions, heads, config.head_dim),
            "BSD": (config.batch, positions, config.head_dim),
        }[config.layout]
        return torch.randn(shape, dtype=DTYPES[config.dtype], device=device, generator=generator)

    q, do = (normal(config.heads, config.seq) for _ in range(2))
    k, v = (normal(config.group_heads, config.key_count).requires_grad_() for _ in range(2))
    return Tensors(q=q.requires_grad_(), k=k, v=v, do=do)


def check_values(config: AttentionConfig, tensors: Tensors, attend: Attention) -> dict[str, Fact]:
    """Facts: errors as max |x - ref| / max |ref|, has_nan (NaN or infinite values), deterministic (two runs are bitwise equal)."""
    values = _run(config, tensors, attend)
    repeated = _run(config, tensors, attend)
    deterministic = all(torch.equal(values[name], repeated[name]) for name in values)
    finite = all(bool(torch.isfinite(value).all()) for value in values.values())
    facts = facts_of(has_nan=int(not finite), deterministic=int(deterministic))
    del repeated
    chosen = chosen_key_heads(config)
    slices = {name: _slice(config, as_BHSD(value, config.layout), chosen) for name, value in values.items()}
    if config.implementation == "trainstep":
        slices["lse"] = _slice(config, _log_sum_exp(config, tensors)[..., None], chosen)
    del values
    wide = torch.float64 if config.dtype == "fp32" else torch.float32
    exact = reference_values(config, tensors, chosen, wide)
    same_dtype = reference_values(config, tensors, chosen, tensors.q.dtype)
    for name, value in slices.items():
        facts |= facts_of(**{f"error_{name}": relative_error(value, exact[name])})
    for name in slices:
        fact_name = "error_same_dtype" if name == "output" else f"error_same_dtype_{name}"
        facts |= facts_of(**{fact_name: relative_error(same_dtype[name], exact[name])})
    total = config.batch * config.group_heads
    facts |= facts_of(error_checked=f"{len(chosen)} of {total} key heads against {str(wide).partition('.')[2]}")
    return facts


def counted_facts(config: AttentionConfig) -> dict[str, Fact]:
    """The pass's FLOPs and bytes by formula."""
    shape = AttentionSizes(
        batch=config.batch,
        heads=config.heads,
        key_heads=config.group_heads,
        queries=config.seq,
        keys=config.key_count,
        head_dim=config.head_dim,
    )
    counted = attention_bytes(
        shape,
        element_bytes=DTYPES[config.dtype].itemsize,
        written_out=config.implementation in _WRITTEN_OUT,
        backward=config.direction != "forward",
    )
    sizes = (config.batch * config.heads, config.seq, config.key_count, config.head_dim)
    forward = attention_flops(*sizes, causal=config.causal, bottom_right=config.bottom_right)
    backward = attention_backward_flops(*sizes, causal=config.causal, bottom_right=config.bottom_right)
    flops = {"forward": forward, "backward": backward, "both": forward + backward}[config.direction]
    parts = {f"{name}_bytes": count for name, count in asdict(counted).items()}
    return facts_of(flops=flops, **parts, needed_bytes=counted.needed)


def accounting_words(facts: dict[str, Fact]) -> str:
    """`the pass needs at least 1,234 bytes: inputs 34, scores 1,200`, for a failure's message."""
    counted = ((part, facts[f"{part}_bytes"].value) for part in _PARTS)
    parts = ", ".join(f"{part} {count:,}" for part, count in counted if count)
    return f"the pass needs at least {facts['needed_bytes'].value:,} bytes: {parts}"


def chosen_key_heads(config: AttentionConfig) -> list[int]:
    """Indices into batch x key heads of the key heads compared: as many as _PAIRS allows, spread evenly."""
    total = config.batch * config.group_heads
    pairs = config.seq * config.key_count * (config.heads // config.group_heads)
    count = min(max(_PAIRS[config.device] // pairs, 1), total)
    return [place * total // count for place in range(count)]


def reference_values(config: AttentionConfig, tensors: Tensors, chosen: list[int], dtype: torch.dtype) -> Values:
    """The chosen heads' output, log-sum-exp and gradients by ops/reference.py in this dtype, in chunks of queries."""
    whole = [as_BHSD(x.detach(), config.layout) for x in (tensors.q, tensors.k, tensors.v, tensors.do)]
    q, k, v, do = (_slice(config, x, chosen).to(dtype) for x in whole)
    sum_dtype = torch.promote_types(dtype, torch.float32)  # gradients are summed over chunks
    values = {
        "output": torch.zeros_like(q),
        "lse": q.new_full((*q.shape[:-1], 1), float("-inf"), dtype=sum_dtype),
        "dq": torch.zeros_like(q),
        "dk": torch.zeros_like(k, dtype=sum_dtype),
        "dv": torch.zeros_like(v, dtype=sum_dtype),
    }
    heads = q.shape[0] * q.shape[1]
    rows = max(_CHUNK_PAIRS[config.device] // (heads * config.key_count), 1)
    for first, end, seen_keys, masked in query_chunks(config, rows):
        leaves = [
            x.detach().requires_grad_() for x in (q[..., first:end, :], k[..., :seen_keys, :], v[..., :seen_keys, :])
        ]
        with torch.enable_grad():
            o = reference.attention(*leaves, causal=masked, causal_alignment="bottom_right")
        values["output"][..., first:end, :] = o.detach()
        if config.implementation == "trainstep":
            lse = reference.attention_lse(
                leaves[0].detach(), leaves[1].detach(), causal=masked, causal_alignment="bottom_right"
            )
            values["lse"][..., first:end, 0] = lse
        if config.direction != "forward":
            dq, dk, dv = torch.autograd.grad(o, leaves, do[..., first:end, :])
            values["dq"][..., first:end, :] = dq
            values["dk"][..., :seen_keys, :] += dk
            values["dv"][..., :seen_keys, :] += dv
    return values


def query_chunks(config: AttentionConfig, rows: int) -> Iterator[tuple[int, int, int, bool]]:
    """Chunks (first query, end, number of keys that the chunk sees, whether it is masked).

    A chunk of a causal mask is a causal mask again, aligned at the bottom right. Queries that see no key are in no chunk.
    """
    queries, keys = config.seq, config.key_count
    offset = keys - queries if config.bottom_right else 0
    first_seeing = min(max(-offset, 0), queries) if config.causal else 0  # queries before it see no key
    first_full = min(max(keys - offset, 0), queries) if config.causal else 0  # queries from it on see all keys
    for first in range(first_seeing, first_full, rows):
        end = min(first + rows, first_full)
        yield first, end, end + offset, True
    for first in range(max(first_seeing, first_full), queries, rows):
        yield first, min(first + rows, queries), keys, False


def _run(config: AttentionConfig, tensors: Tensors, attend: Attention) -> Values:
    output = attend(*tensors.leaves)
    if config.direction == "forward":
        return {"output": output.detach()}
    dq, dk, dv = torch.autograd.grad(output, tensors.leaves, tensors.do)
    return {"output": output.detach(), "dq": dq, "dk": dk, "dv": dv}


def _log_sum_exp(config: AttentionConfig, tensors: Tensors) -> Tensor:
    """The log-sum-exp, (B, H, S), of the kernels and tiles that the cell times."""
    with torch.no_grad():
        _, lse = flash_attention(*tensors.leaves, **own_settings(config), return_lse=True)
    return lse.unsqueeze(1) if config.layout == "BSD" else lse


def _slice(config: AttentionConfig, x_BHSD: Tensor, chosen: list[int]) -> Tensor:
    """The chosen key heads' part: (chosen, query heads per key head, S, D), or (chosen, 1, S, D) for keys and values."""
    batch, heads, *rest = x_BHSD.shape
    return x_BHSD.detach().reshape(batch * config.group_heads, heads // config.group_heads, *rest)[chosen]
