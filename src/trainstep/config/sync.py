"""How the ranks of a run keep their gradients and parameters together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainstep.config.fields import check_choices, described

OURS = ("none", "naive", "flat", "overlapped", "bucketed", "sharded", "sharded_flat", "fsdp")
PEERS = ("torch_ddp", "torch_zero", "torch_fsdp2")
SYNCS = OURS + PEERS
BUCKETED = ("bucketed", "sharded", "torch_ddp", "torch_zero")
"""Those whose messages of gradients are buckets."""
IN_UNITS = ("sharded_flat", "fsdp", "torch_fsdp2")
"""Those that gather a block before it runs: their hooks stand on the blocks, so a model compiled whole would swallow them."""
USED_BY = {
    "bucket_mib": (*BUCKETED, "sharded_flat"),
    "first_bucket_mib": ("bucketed", "sharded"),
    "last_bucket_mib": ("bucketed", "sharded"),
    "reduce_dtype": (*OURS[1:], "torch_fsdp2"),
    "keeps_gradient_dtype": ("flat", "bucketed", "sharded"),
    "compute_dtype": ("fsdp", "torch_fsdp2"),
    "reshard_after_forward": ("fsdp", "torch_fsdp2"),
    "ahead": ("fsdp",),
}
"""Option -> the ways that it means something to."""


def needless(values: Mapping[str, Any]) -> frozenset[str]:
    """The options that the way which these values name, `sync`, does not have: they would tell alike cells apart."""
    sync = values.get("sync", SyncConfig.sync) or "none"  # a person's none is no value yet
    return frozenset(name for name, ways in USED_BY.items() if sync in SYNCS and sync not in ways)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """One way of going parallel and its options. Raises ValueError naming the field and the way out."""

    sync: str = described(
        "none: each rank trains for itself, the yardstick; naive, flat, overlapped, bucketed: gradients averaged (DDP); sharded: "
        "and optimizer state by whole tensors (ZeRO 1); sharded_flat: gradients and state in flat shards (ZeRO 1, 2); fsdp: "
        "parameters too; torch_...: torch's own",
        "bucketed",
        SYNCS,
    )
    bucket_mib: float | None = described(
        "MiB of gradients in a message, of bucketed ways, or of parameters in neighbouring blocks that sharded_flat sends "
        "together; by default a quarter of all, the less the more there are, a sixteenth from 32 GiB on, but of bucketed ways "
        "at least 25; torch's: 25",
        None,
    )
    first_bucket_mib: float | None = described("of the first message, if another", None)
    last_bucket_mib: float | None = described("of the last message, if another", None)
    reduce_dtype: str = described("gradients are averaged in: own, their own dtype, or bf16", "own", ("own", "bf16"))
    keeps_gradient_dtype: bool = described(
        "gradients averaged in bf16 are copied back to fp32; without, they stay in their buckets, which adamw trainstep takes",
        True,
    )
    compute_dtype: str = described(
        "fsdp gathers parameters and computes in: own, their own dtype, or bf16; what is updated keeps its own",
        "own",
        ("own", "bf16"),
    )
    reshard_after_forward: bool = described("fsdp frees a block's parameters behind its forward", True)
    ahead: int = described("blocks that fsdp gathers before their turn, 0 to 2", 1)

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("bucket_mib", "first_bucket_mib", "last_bucket_mib"):
            size = getattr(self, name)
            if size is None:
                continue
            if not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < math.inf:
                raise ValueError(f"{name}: must be a positive number of MiB, not {size!r}")
        if self.ahead not in (0, 1, 2):
            raise ValueError(f"ahead: must be 0, 1 or 2, not {self.ahead!r}")
        if not self.keeps_gradient_dtype and (
            self.reduce_dtype == "own" or self.sync not in ("flat", "bucketed", "sharded")
        ):
            raise ValueError(
                "keeps_gradient_dtype: only gradients that flat, bucketed and sharded average with reduce_dtype bf16 can stay so"
            )
        if self.compute_dtype != "own" and self.sync not in USED_BY["compute_dtype"]:
            raise ValueError(
                f"compute_dtype: only fsdp and torch_fsdp2 gather parameters in another dtype; with {self.sync} take precision "
                "bf16_autocast"
            )
        if self.reduce_dtype != "own" and self.sync in ("torch_ddp", "torch_zero"):
            raise ValueError(f"reduce_dtype: {self.sync} averages gradients in their own dtype here; leave it at own")
