"""The configs of a collective among ranks, and of a ceiling of the machine: its fastest matmul or copy.

They are the cells of the workloads `collective` and `ceiling`.
"""

import math
from dataclasses import dataclass

from trainstep.config.fields import check_choices, check_integer, check_positive, described
from trainstep.config.nodes import NODES_HELP, check_nodes
from trainstep.config.parallel import TRANSPORTS
from trainstep.costs.rank_groups import Level

BACKENDS = ("gloo", "nccl")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LEVELS = {"all": Level.ALL, "in_nodes": Level.IN_GROUPS, "across_nodes": Level.ACROSS_GROUPS}
"""Name -> among which ranks the messages go, where the ranks of a node are a group."""
_MOST_RANKS = 64
"""Ranks of a collective on one node: each rank is a process that imports torch and connects to every other rank."""
KINDS = ("matmul", "copy", "host_to_device", "device_to_host", "peer_copy")


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """A collective that is called repeatedly on one tensor. ValueError names the field."""

    operation: str = described(
        "what the ranks do", "all_reduce", ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    )
    backend: str = described("gloo, through the host, or nccl, between GPUs", "gloo", BACKENDS)
    ranks: int = described("processes; with nccl one GPU each; 1: only the cost of the call", 2)
    nodes: int = described(NODES_HELP, 1)
    level: str = described(
        "among whom; in_nodes: the ranks of each node, all nodes at once; across_nodes: the ranks with the same place on every "
        "node, all places at once; default: all, and over several nodes each of the three",
        "all",
        tuple(LEVELS),
    )
    transport: str = described(
        "how the tensor travels; library: by NCCL or gloo; copies: by the GPUs' copy engines into each other's memory, between "
        "ranks of one machine, of any size",
        "library",
        TRANSPORTS,
    )
    inbox_mib: int = described("MiB of each rank's memory that copies pass through", 256)
    dtype: str = described("dtype of the tensor", "fp32", tuple(ELEMENT_BYTES))
    mib: float = described("MiB of the whole tensor that is reduced, gathered or sent; 0.001 is 1 KiB", 1.0)
    device: str = described("device of the tensor", "cpu", ("cpu", "cuda"))
    warmups: int = described("calls before the timed ones", 5)
    steps: int = described("timed calls", 20)
    seed: int = described("seed of the tensor", 0)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "steps")
        check_integer(self, "ranks", at_least=1)
        check_nodes(self.ranks, self.nodes)
        if self.ranks // self.nodes > _MOST_RANKS:
            raise ValueError(
                f"ranks: must be at most {_MOST_RANKS * self.nodes}, not {self.ranks}: {_MOST_RANKS} on each node"
            )
        if self.level != "all" and self.nodes == 1:
            raise ValueError(f"level: {self.level} needs several nodes; leave it out on one")
        if self.level == "in_nodes" and self.ranks == self.nodes:
            raise ValueError("level: in_nodes needs several ranks on each node; leave it out, or take more ranks")
        check_integer(self, "warmups", at_least=0)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        if not 0 < self.mib < math.inf or self.mib > 2**20:
            raise ValueError(f"mib: must be over 0 and at most {2**20}, not {self.mib:g}")
        check_integer(self, "inbox_mib", at_least=1)
        if self.transport == "copies" and (self.operation == "broadcast" or self.nodes > 1):
            what = "a broadcast" if self.operation == "broadcast" else "what goes to another node"
            raise ValueError(f"transport: {what} is sent by the library; leave it at library")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend: nccl sends between GPUs; on a CPU take gloo")

    @property
    def members(self) -> int:
        """Ranks among which each message goes."""
        on_each = self.ranks // self.nodes
        return {"all": self.ranks, "in_nodes": on_each, "across_nodes": self.nodes}[self.level]

    @property
    def node_messages(self) -> int:
        """How many rings, of all messages that go at once, lead through each node and its link to the next node."""
        on_each = self.ranks // self.nodes
        return 0 if self.nodes == 1 else {"all": 1, "in_nodes": 0, "across_nodes": on_each}[self.level]

    @property
    def elements(self) -> int:
        """Elements of the whole tensor: `mib`, rounded up so that each rank's part has the same size."""
        elements = math.ceil(round(self.mib * 2**20) / ELEMENT_BYTES[self.dtype])
        return max(math.ceil(elements / self.ranks), 1) * self.ranks

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class CeilingConfig:
    """One ceiling of a machine. `matmul`: n x n times n x n; the copies move `mib` MiB. ValueError names the field."""

    kind: str = described("what to measure", "matmul", KINDS)
    dtype: str = described("dtype of the matmul", "fp32", ("fp32", "tf32", "bf16", "fp16"))
    n: int = described("side of the square matmul", 8192)
    mib: int = described("MiB copied", 1024)
    device: str = described("device to run on", "cpu", ("cpu", "cuda"))
    peer: int = described("the other GPU of a peer copy", 1)
    warmups: int = described("calls before the timed ones", 3)
    steps: int = described("timed calls", 10)
    seed: int = described("seed of the operands", 0)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "n", "mib", "steps", "peer")
        check_integer(self, "warmups", at_least=0)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        if self.device == "cpu" and self.kind not in ("matmul", "copy"):
            raise ValueError(f"kind: {self.kind} needs a GPU; on a CPU take matmul or copy")
        if self.device == "cpu" and self.dtype == "tf32":
            raise ValueError("dtype: tf32 is a mode of NVIDIA matrix units; on a CPU take fp32 or bf16")
