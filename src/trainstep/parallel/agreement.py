"""Whether what should be equal on all ranks is, to the bit: hashes are compared, not tensors. And whether all ranks succeeded.

    hash = sum of bits_i w_i  modulo 2^64, twice, with two rows of odd weights that depend on the position i alone

Bits are the elements' own, as integers, so NaN equals itself and -0 is not 0. An odd weight has an inverse modulo 2^64: a single
element that differs always shows. Several must cancel in both sums at once to escape, which weights that look random leave to luck.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks

KINDS = ("parameters", "buffers", "gradients", "optimizer")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22
"""Elements hashed at once: they are widened to 64 bits, in half a dozen temporary tensors of 32 MiB."""
_MULTIPLIERS = ((-0x61C8864680B583EB, -0x40A7B892E31B1A47), (-0x4B47D0C5A7ECB3F5, -0x6B2FB644ECCEEE15))
"""Two pairs of large odd numbers, for weights that look random (Steele 2014 and others use the like)."""

_T = TypeVar("_T")


class ReplicasDisagree(RuntimeError):
    """`differing`: the ranks that differ from the majority, by tensor; all ranks where there is no majority."""

    def __init__(self, message: str, differing: dict[str, list[int]]) -> None:
        super().__init__(message)
        self.differing = differing


def agreed(work: Callable[[], _T], collectives: Collectives) -> _T:
    """What `work` returned on this rank, once it is known that it failed on none; else an exception on every rank.

    A rank that fails alone would leave the others waiting for it in their next collective. `work` itself must use none. Every rank
    raises what failed on the first rank that has an error: a ValueError or OSError as such, else a RuntimeError that quotes it.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # noqa: BLE001  (the other ranks must know of any)
        error = raised
    kind = next((known.__name__ for known in _KINDS_OF_ERRORS if isinstance(error, known)), type(error).__name__)
    outcomes = [json.loads(text) for text in collectives.gather_texts(json.dumps(error and [kind, str(error)]))]
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        if rank == collectives.ranks.rank and error is not None:
            raise error
        first_kind, sentence = outcome
        for known in _KINDS_OF_ERRORS:
            if known.__name__ == first_kind:
                raise known(f"{sentence} (found by rank {rank})")
        raise RuntimeError(f"rank {rank} failed: {first_kind}: {sentence}")
    return result


_KINDS_OF_ERRORS = (FileExistsError, OSError, ValueError)


@torch.no_grad()
def check_agreement(
    module: nn.Module,
    ranks: Ranks,
    *,
    what: str | Sequence[str] = "parameters",
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """ReplicasDisagree if a tensor is not the same on all ranks, naming it and who is odd. Every rank must call it, and all raise.

    `what`: one or several of parameters, buffers, gradients, and optimizer: the state of `optimizer`, if it is not sharded.
    Costs a pass over the tensors on their device (each 4 Mi elements are widened to int64 for it) and two messages: 16 bytes a
    rank, then 16 a tensor and rank. The host waits for the result.
    """
    named = list(_tensors(module, (what,) if isinstance(what, str) else what, optimizer))
    names = [name for name, _ in named]
    collectives = Collectives(ranks)
    _check_same_tensors(names, collectives)
    if not named:
        return
    mine = torch.stack([_hash(tensor, ranks.device) for _, tensor in named])
    everybodys = _all_gather(mine, collectives).view(ranks.world_size, len(names), 2).tolist()
    differing = {}
    for index, name in enumerate(names):
        odd = _odd_ones([tuple(hashes[index]) for hashes in everybodys])
        if odd:
            differing[name] = odd
    if differing:
        raise ReplicasDisagree(_sentence(differing, ranks.world_size), differing)


def _tensors(
    module: nn.Module, what: Sequence[str], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor | None]]:
    unknown = set(what) - set(KINDS)
    if unknown:
        raise ValueError(f"what: must be of {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    if "optimizer" in what and optimizer is None:
        raise ValueError("optimizer: must be given for what='optimizer'")
    if "parameters" in what:
        yield from module.named_parameters()
    if "buffers" in what:
        yield from module.named_buffers()
    if "gradients" in what:
        yield from ((f"gradient of {name}", parameter.grad) for name, parameter in module.named_parameters())
    if "optimizer" in what and optimizer is not None:
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value


def _check_same_tensors(names: Sequence[str], collectives: Collectives) -> None:
    """That ranks are about to send as many hashes, of tensors of the same names: else they would wait for each other for ever."""
    row = torch.tensor([[len(names), zlib.crc32(json.dumps(names).encode())]], device=collectives.ranks.device)
    rows = [tuple(row) for row in _all_gather(row, collectives).tolist()]
    odd = _odd_ones(rows)
    if odd:
        counts = ", ".join(f"{rows[rank][0]} on rank {rank}" for rank in odd)
        raise ReplicasDisagree(f"ranks have not the same tensors by number and name: {counts}", {"names": odd})


def _all_gather(rows: Tensor, collectives: Collectives) -> Tensor:
    gathered = rows.new_empty(collectives.ranks.world_size * rows.shape[0], rows.shape[1])
    collectives.all_gather(gathered, rows, label="hashes").wait()
    return gathered


def _odd_ones(values: Sequence[object]) -> list[int]:
    """Ranks whose value is not that of more than half of them; all where there is no such value."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [rank for rank, other in enumerate(values) if other != value]


def _hash(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Two int64 sums, (2,), on `device`; dtype and shape count too, and so does being there at all."""
    kind = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
    sums = torch.full((2,), zlib.crc32(kind.encode()), dtype=torch.int64, device=device)
    if tensor is None or not tensor.numel():
        return sums
    bits = _bits(tensor)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=tensor.device)
        parts = [(chunk * _weights(position, *multipliers)).sum() for multipliers in _MULTIPLIERS]
        sums += torch.stack(parts).to(device)
    return sums


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, (n,)."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = plain.resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _weights(position: Tensor, first: int, second: int) -> Tensor:
    """An odd number for each position; int64 products wrap around."""
    mixed = (position + 1) * first
    mixed = (mixed ^ (mixed >> 32)) * second
    return (mixed ^ (mixed >> 29)) | 1


def _sentence(differing: dict[str, list[int]], world_size: int) -> str:
    shown = [
        f"{name} on ranks {', '.join(map(str, odd))}" if len(odd) > 1 else f"{name} on rank {odd[0]}"
        for name, odd in list(differing.items())[:10]
    ]
    more = f", and {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
    return f"{len(differing)} of the tensors are not the same on all {world_size} ranks: {'; '.join(shown)}{more}"
