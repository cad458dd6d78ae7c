"""One ceiling of a machine to measure: the fastest it multiplies or copies."""

from dataclasses import dataclass

from trainstep.config.fields import check_choices, check_integer, check_positive, described

KINDS = ("matmul", "copy", "host_to_device", "device_to_host", "peer_copy")


@dataclass(frozen=True, kw_only=True)
class CeilingConfig:
    """`matmul`: n x n times n x n; the copies move `mib` MiB. Raises ValueError naming the field."""

    kind: str = described("what to measure", "matmul", KINDS)
    dtype: str = described("of the matmul", "fp32", ("fp32", "tf32", "bf16", "fp16"))
    n: int = described("side of the square matmul", 8192)
    mib: int = described("MiB copied", 1024)
    device: str = described("where it runs", "cpu", ("cpu", "cuda"))
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
