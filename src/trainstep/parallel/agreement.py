"""Agreement of ranks: tensors equal to the bit, work that failed on no rank, the largest number of all hosts.

Tensors are compared by hashes:

    hash = sum of bits_i w_i  modulo 2^64, twice, with two rows of odd weights that depend on the position i alone

The bits are those of the elements, read as integers, so NaN equals itself and -0 is not 0. An odd weight has an inverse modulo
2^64, so a single element that differs always changes the hash. Several differences escape only if they cancel in both sums at once;
the weights look random, so that is unlikely.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.liveness.standstill import rank_words
from trainstep.parallel.ranks import Ranks

KINDS = ("parameters", "buffers", "gradients", "optimizer")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22
"""Elements hashed at a time: they are widened to 64 bits, in half a dozen temporary tensors of 32 MiB."""
_MULTIPLIERS = ((-0x61C8864680B583EB, -0x40A7B892E31B1A47), (-0x4B47D0C5A7ECB3F5, -0x6B2FB644ECCEEE15))
"""Two pairs of large odd numbers, for weights that look random (Steele 2014 and others use the like)."""
_ERRORS_KEPT = (FileExistsError, OSError, ValueError)
"""Errors that every rank raises as such; the most special class first."""
_T = TypeVar("_T")


class ReplicasDisagree(RuntimeError):
    """A tensor is not the same on all ranks.

    `differing`: by tensor the ranks that differ from the majority; all ranks where there is no majority.
    """

    def __init__(self, message: str, differing: dict[str, list[int]]) -> None:
        super().__init__(message)
        self.differing = differing


def agreed(work: Callable[[], _T], collectives: Collectives) -> _T:
    """Call `work` on every rank; returns its result on this rank if it failed on no rank, else raises on every rank.

    A rank that fails alone would leave the others waiting for it in their next collective. `work` itself must use no collective.
    Every rank raises the error of the first rank that has one: a ValueError or OSError as such, else a RuntimeError that quotes it.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # noqa: BLE001  (the other ranks must know of any)
        error = raised
    kind = next((cls.__name__ for cls in _ERRORS_KEPT if isinstance(error, cls)), type(error).__name__)
    outcomes = [json.loads(text) for text in collectives.gather_texts(json.dumps(error and [kind, str(error)]))]
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        if rank == collectives.ranks.rank and error is not None:
            raise error
        first_kind, sentence = outcome
        for cls in _ERRORS_KEPT:
            if cls.__name__ == first_kind:
                raise cls(f"{sentence} (found by rank {rank})")
        raise RuntimeError(f"rank {rank} failed: {first_kind}: {sentence}")
    return result


@torch.no_grad()
def check_agreement(
    module: nn.Module,
    ranks: Ranks,
    *,
    what: str | Sequence[str] = "parameters",
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise ReplicasDisagree if a tensor is not the same on all ranks, naming the tensor and the ranks that differ.

    Every rank must call it, and all raise. `what`: one or several of parameters, buffers, gradients, and optimizer: the state of
    `optimizer`, if it is not sharded.
    Costs a pass over the tensors on their device (each 4 Mi elements are widened to int64 for it) and two messages: 16 bytes a
    rank, then 16 a tensor and rank. The host waits for the result.
    """
    named = list(_tensors(module, (what,) if isinstance(what, str) else what, optimizer))
    names = [name for name, _ in named]
    collectives = Collectives(ranks)
    _check_same_tensors(names, collectives)
    if not named:
        return
    hashes = torch.stack([_hash(tensor, ranks.device) for _, tensor in named])
    hashes_of_ranks = _all_gather(hashes, collectives).view(ranks.world_size, len(names), 2).tolist()
    differing = {}
    for index, name in enumerate(names):
        odd_ranks = _odd_ranks([tuple(rank_hashes[index]) for rank_hashes in hashes_of_ranks])
        if odd_ranks:
            differing[name] = odd_ranks
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
    """Check that all ranks are about to send hashes of tensors of the same names: else they would wait for each other for ever."""
    row = torch.tensor([[len(names), zlib.crc32(json.dumps(names).encode())]], device=collectives.ranks.device)
    rows = [tuple(row) for row in _all_gather(row, collectives).tolist()]
    odd_ranks = _odd_ranks(rows)
    if odd_ranks:
        counts = ", ".join(f"{rows[rank][0]} on rank {rank}" for rank in odd_ranks)
        raise ReplicasDisagree(f"ranks have not the same tensors by number and name: {counts}", {"names": odd_ranks})


def _all_gather(rows: Tensor, collectives: Collectives) -> Tensor:
    gathered = rows.new_empty(collectives.ranks.world_size * rows.shape[0], rows.shape[1])
    collectives.all_gather(gathered, rows, label="hashes").wait()
    return gathered


def _odd_ranks(values: Sequence[object]) -> list[int]:
    """The ranks that differ from the value of more than half of the ranks; all ranks where there is no such value."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [rank for rank, other in enumerate(values) if other != value]


def _hash(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Two int64 sums, (2,), on `device`. Dtype, shape and whether there is a tensor enter the hash too."""
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
    shown = [f"{name} on {rank_words(ranks)}" for name, ranks in list(differing.items())[:10]]
    more = f", and {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
    return f"{len(differing)} of the tensors are not the same on all {world_size} ranks: {'; '.join(shown)}{more}"


class HostAgreement:
    """The largest number of all ranks, by one message on gloo between the hosts while the GPUs work.

        agree = HostAgreement(ranks)
        if agree(0 if ready else 1) == 0: ...      # every rank is ready

    CapturedStep asks at every step: ranks must capture together, and a rank must not launch a graph while another runs its step
    eagerly and finds that fewer parameters were used. A dead rank ends the call on all ranks. Beside NCCL it makes a group of its
    own, so every rank must construct it, in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        group: Any = ranks.group  # never the number that torch gives to a process outside of the group
        if group is not None and dist.get_backend(group) != "gloo":
            group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._collectives = Collectives(replace(ranks, group=group, device=torch.device("cpu")))
        self._watch = ranks.watch if group is not ranks.group else None

    def __call__(self, number: int) -> int:
        """The largest number of all ranks. Waits for all of them."""
        largest = torch.tensor(number)
        if self._watch is not None:  # while graphs send the messages, the watch hears of no other call
            self._watch.progress.called("all_reduce agreement")
        self._collectives.all_reduce(largest, reduction="maximum", label="agreement").wait()
        return int(largest)
