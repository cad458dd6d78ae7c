"""Is it right: an implementation's output and gradients against ops/reference.py in a wider dtype, on as much as is affordable.

`check_values(config, tensors, attend)` gives facts. A few whole key heads are compared, with every query head that reads them,
the reference going over them in chunks of queries, so that S = 65536 costs a second or less and no S x S matrix exists.
The same chunks in the dtype itself say what plain PyTorch loses there: the measure of what error is normal.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention_inputs import Tensors
from trainstep.measure.peers import as_BHSD, own_settings
from trainstep.ops import reference
from trainstep.ops.flash_attention import flash_attention
from trainstep.records.facts import Fact, facts_of
from trainstep.training.attention import Attention

Values = Mapping[str, Tensor]
"""output, and unless forward alone dq, dk, dv: laid out as inputs are, or a slice (chosen key heads, their query heads, S, D)."""

_PAIRS = {"cuda": 2**26, "cpu": 2**22}
"""Query-key pairs of all heads compared; one key head always is, whatever it costs."""
_CHUNK_PAIRS = {"cuda": 2**25, "cpu": 2**22}
"""In memory at once: of fp64 256 MiB a matrix, and five or six of them live."""


def check_values(config: AttentionConfig, tensors: Tensors, attend: Attention) -> dict[str, Fact]:
    """Facts: errors as max |x - ref| / max |ref|, has_nan (a NaN or an infinity), deterministic (two runs bitwise equal)."""
    values = _run(config, tensors, attend)
    again = _run(config, tensors, attend)
    deterministic = all(torch.equal(values[name], again[name]) for name in values)
    finite = all(bool(torch.isfinite(value).all()) for value in values.values())
    facts = facts_of(
        has_nan=int(not finite),
        deterministic=int(deterministic),
    )
    del again
    chosen = chosen_key_heads(config)
    slices = {name: _slice(config, as_BHSD(value, config.layout), chosen) for name, value in values.items()}
    if config.implementation == "trainstep":
        slices["lse"] = _slice(config, _log_sum_exp(config, tensors)[..., None], chosen)
    del values
    wide = torch.float64 if config.dtype == "fp32" else torch.float32
    exact = reference_values(config, tensors, chosen, wide)
    same_dtype = reference_values(config, tensors, chosen, tensors.q.dtype)
    for name, value in slices.items():
        facts |= _error_fact(f"error_{name}", value, exact[name])
    for name in slices:
        own_name = "error_same_dtype" if name == "output" else f"error_same_dtype_{name}"
        facts |= _error_fact(own_name, same_dtype[name], exact[name])
    total = config.batch * config.group_heads
    facts |= facts_of(error_checked=f"{len(chosen)} of {total} key heads against {str(wide).partition('.')[2]}")
    return facts


def chosen_key_heads(config: AttentionConfig) -> list[int]:
    """Numbers (batch x key heads, counted through) of the key heads compared, spread evenly: as many as _PAIRS pays for."""
    total = config.batch * config.group_heads
    pairs = config.seq * config.key_count * (config.heads // config.group_heads)
    count = min(max(_PAIRS[config.device] // pairs, 1), total)
    return [place * total // count for place in range(count)]


def reference_values(config: AttentionConfig, tensors: Tensors, chosen: list[int], dtype: torch.dtype) -> Values:
    """The chosen heads' output, log-sum-exp and gradients by ops/reference.py in a dtype, chunk by chunk of queries."""
    whole = [as_BHSD(x.detach(), config.layout) for x in (tensors.q, tensors.k, tensors.v, tensors.do)]
    q, k, v, do = (_slice(config, x, chosen).to(dtype) for x in whole)
    sums = torch.promote_types(dtype, torch.float32)  # of gradients over chunks
    found = {
        "output": torch.zeros_like(q),
        "lse": q.new_full((*q.shape[:-1], 1), float("-inf"), dtype=sums),
        "dq": torch.zeros_like(q),
        "dk": torch.zeros_like(k, dtype=sums),
        "dv": torch.zeros_like(v, dtype=sums),
    }
    heads = q.shape[0] * q.shape[1]
    rows = max(_CHUNK_PAIRS[config.device] // (heads * config.key_count), 1)
    for first, end, seen, masked in query_chunks(config, rows):
        leaves = [x.detach().requires_grad_() for x in (q[..., first:end, :], k[..., :seen, :], v[..., :seen, :])]
        with torch.enable_grad():
            o = reference.attention(*leaves, causal=masked, causal_alignment="bottom_right")
        found["output"][..., first:end, :] = o.detach()
        if config.implementation == "trainstep":
            lse = reference.attention_lse(
                leaves[0].detach(), leaves[1].detach(), causal=masked, causal_alignment="bottom_right"
            )
            found["lse"][..., first:end, 0] = lse
        if config.direction != "forward":
            dq, dk, dv = torch.autograd.grad(o, leaves, do[..., first:end, :])
            found["dq"][..., first:end, :] = dq
            found["dk"][..., :seen, :] += dk
            found["dv"][..., :seen, :] += dv
    return found


def query_chunks(config: AttentionConfig, rows: int) -> Iterator[tuple[int, int, int, bool]]:
    """(first query, end, keys that any of them sees, whether a diagonal that ends at the last of those cuts them).

    A chunk of a causal mask is a causal mask again, aligned at the bottom right. Queries that see no key are in no chunk.
    """
    queries, keys = config.seq, config.key_count
    offset = keys - queries if config.bottom_right else 0
    blind = min(max(-offset, 0), queries) if config.causal else 0
    cut = min(max(keys - offset, 0), queries) if config.causal else 0
    for first in range(blind, cut, rows):
        end = min(first + rows, cut)
        yield first, end, end + offset, True
    for first in range(max(blind, cut), queries, rows):
        yield first, min(first + rows, queries), keys, False


def _run(config: AttentionConfig, tensors: Tensors, attend: Attention) -> Values:
    output = attend(*tensors.leaves)
    if config.direction == "forward":
        return {"output": output.detach()}
    dq, dk, dv = torch.autograd.grad(output, tensors.leaves, tensors.do)
    return {"output": output.detach(), "dq": dq, "dk": dk, "dv": dv}


def _log_sum_exp(config: AttentionConfig, tensors: Tensors) -> Tensor:
    """(B, H, S), of the kernels and tiles that the cell times."""
    with torch.no_grad():
        _, lse = flash_attention(*tensors.leaves, **own_settings(config), return_lse=True)
    return lse.unsqueeze(1) if config.layout == "BSD" else lse


def _slice(config: AttentionConfig, x_BHSD: Tensor, chosen: list[int]) -> Tensor:
    """The chosen key heads' part: (chosen, query heads of each, S, D), or (chosen, 1, S, D) of keys and values."""
    batch, heads, *rest = x_BHSD.shape
    each = heads // config.group_heads
    return x_BHSD.detach().reshape(batch * config.group_heads, each, *rest)[chosen]


def _error_fact(name: str, value: Tensor, exact: Tensor) -> dict[str, Fact]:
    """max |x - ref| / max |ref| over what the reference has finite (a query that sees no key has a log-sum-exp of -inf).

    Nothing where it is no finite number: `has_nan` tells.
    """
    seen = torch.isfinite(exact)
    exact, value = exact[seen], value[seen].to(exact.dtype)
    if not exact.numel():
        return {}
    largest = exact.abs().max().item()
    error = (value - exact).abs().max().item() / (largest or 1.0)
    return facts_of(**{name: error}) if error < float("inf") else {}
