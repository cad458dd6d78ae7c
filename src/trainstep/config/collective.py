"""One collective among so many ranks: a cell of the workload `collective`."""

import math
from dataclasses import dataclass

from trainstep.config.fields import check_choices, check_integer, check_positive, described

BACKENDS = ("gloo", "nccl")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOST_RANKS = 64
"""Of one machine: each is a process with torch in it, and a connection to each of the others."""


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """A collective on one tensor, called again and again. Raises ValueError naming the field."""

    operation: str = described(
        "what the ranks do", "all_reduce", ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    )
    backend: str = described("what sends: gloo through the host, nccl between GPUs", "gloo", BACKENDS)
    ranks: int = described("processes; with nccl one GPU each; 1: the cost of the call alone", 2)
    dtype: str = described("of the tensor", "fp32", tuple(ELEMENT_BYTES))
    mib: float = described("MiB of the whole tensor: what is reduced, gathered or sent; 0.001 is 1 KiB", 1.0)
    device: str = described("where the tensor is", "cpu", ("cpu", "cuda"))
    warmups: int = described("calls before the timed ones", 5)
    steps: int = described("timed calls", 20)
    seed: int = described("seed of the tensor", 0)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "steps")
        check_integer(self, "ranks", at_least=1, at_most=_MOST_RANKS)
        check_integer(self, "warmups", at_least=0)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        if not 0 < self.mib < math.inf or self.mib > 2**20:
            raise ValueError(f"mib: must be over 0 and at most {2**20}, not {self.mib:g}")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend: nccl sends between GPUs; on a CPU take gloo")

    @property
    def elements(self) -> int:
        """Of the whole tensor: `mib`, rounded up so that each rank's part is alike."""
        asked = math.ceil(round(self.mib * 2**20) / ELEMENT_BYTES[self.dtype])
        return max(math.ceil(asked / self.ranks), 1) * self.ranks

    @property
    def payload_bytes(self) -> int:
        """Of the whole tensor."""
        return self.elements * ELEMENT_BYTES[self.dtype]
