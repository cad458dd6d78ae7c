"""Peak rates of known GPUs, from their data sheets. Unknown hardware gives None, never another chip's number."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainstep.config.fields import nearest


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """Peaks of one GPU. `peak_flops`: dense FLOP/s by matmul dtype; `memory_bytes_per_s`: bandwidth of the memory on the card."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    source: str
    memory_bytes: int
    """Memory on the card, as the driver reports it where we have seen the card; else a data sheet's GB as 10^9 bytes, which is up
    to 7 % less than the driver reports."""
    link_bytes_per_s: float | None = None
    """Bandwidth between GPUs, one way, over all NVLinks of a GPU together; None where the data sheet promises no such link."""


_SEEN_MEMORY_BYTES = {"H200 SXM": 150_754_820_096}
"""results/h200/precision.jsonl: gpu_memory_bytes."""


def _spec(
    name: str,
    fp32: float,
    tf32: float,
    half: float,
    memory_gb: int,
    memory_tb_s: float,
    source: str,
    nvlink_gb_s: float | None = None,
) -> MachineSpec:
    peaks = {"fp32": fp32 * 1e12, "tf32": tf32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}
    return MachineSpec(
        name=name,
        peak_flops=MappingProxyType(peaks),
        memory_bytes_per_s=memory_tb_s * 1e12,
        memory_bytes=_SEEN_MEMORY_BYTES.get(name, memory_gb * 10**9),
        source=f"{source}, dense",
        link_bytes_per_s=None if nvlink_gb_s is None else nvlink_gb_s * 1e9,
    )


# The key is the driver's name for the chip. Columns: TFLOP/s in fp32, TF32 and bf16 = fp16 (fp32 accumulation); memory GB and
# TB/s; NVLink GB/s one way (data sheets print twice that), only where every such GPU has NVLink.
# Where a data sheet prints TF32 and bf16 with sparsity only, the table has half of that number. A slice of a GPU (MIG) has a
# different name, so it has no entry.
_SPECS = {
    "NVIDIA B200": _spec("B200", 80, 1100, 2250, 180, 8.0, "NVIDIA Blackwell architecture technical brief", 900),
    "NVIDIA GH200 480GB": _spec("GH200 96 GB", 67, 494, 990, 96, 4.0, "NVIDIA GH200 data sheet"),
    "NVIDIA H200": _spec("H200 SXM", 67, 495, 990, 141, 4.8, "NVIDIA H200 data sheet", 450),
    "NVIDIA H200 NVL": _spec("H200 NVL", 60, 417.5, 835.5, 141, 4.8, "NVIDIA H200 data sheet"),
    "NVIDIA H100 80GB HBM3": _spec("H100 SXM", 67, 495, 990, 80, 3.35, "NVIDIA H100 data sheet", 450),
    "NVIDIA H100 NVL": _spec("H100 NVL", 60, 417.5, 835.5, 94, 3.9, "NVIDIA H100 data sheet"),
    "NVIDIA H100 PCIe": _spec("H100 PCIe", 51, 378, 756, 80, 2.0, "NVIDIA H100 data sheet"),
    "NVIDIA A100-SXM4-80GB": _spec("A100 SXM 80 GB", 19.5, 156, 312, 80, 2.039, "NVIDIA A100 data sheet", 300),
    "NVIDIA A100-SXM4-40GB": _spec("A100 SXM 40 GB", 19.5, 156, 312, 40, 1.555, "NVIDIA A100 data sheet", 300),
    "NVIDIA A100 80GB PCIe": _spec("A100 PCIe 80 GB", 19.5, 156, 312, 80, 1.935, "NVIDIA A100 data sheet"),
    "NVIDIA A100-PCIE-40GB": _spec("A100 PCIe 40 GB", 19.5, 156, 312, 40, 1.555, "NVIDIA A100 data sheet"),
    "NVIDIA A40": _spec("A40", 37.4, 74.8, 149.7, 48, 0.696, "NVIDIA A40 data sheet"),
    "NVIDIA A10": _spec("A10", 31.2, 62.5, 125, 24, 0.6, "NVIDIA A10 data sheet"),
    "NVIDIA L40S": _spec("L40S", 91.6, 183, 362, 48, 0.864, "NVIDIA L40S data sheet"),
    "NVIDIA L4": _spec("L4", 30.3, 60, 121, 24, 0.3, "NVIDIA L4 data sheet"),
    "NVIDIA RTX 6000 Ada Generation": _spec(
        "RTX 6000 Ada", 91.1, 182.1, 364.2, 48, 0.96, "NVIDIA Ada architecture paper"
    ),
    "NVIDIA RTX A6000": _spec("RTX A6000", 38.7, 77.4, 154.8, 48, 0.768, "NVIDIA Ampere GA102 architecture paper"),
    "NVIDIA GeForce RTX 5090": _spec(
        "RTX 5090", 104.8, 104.8, 209.5, 32, 1.792, "NVIDIA RTX Blackwell architecture paper"
    ),
    "NVIDIA GeForce RTX 5080": _spec(
        "RTX 5080", 56.3, 56.3, 112.6, 16, 0.96, "NVIDIA RTX Blackwell architecture paper"
    ),
    "NVIDIA GeForce RTX 4090": _spec("RTX 4090", 82.6, 82.6, 165.2, 24, 1.008, "NVIDIA Ada architecture paper"),
    "NVIDIA GeForce RTX 4080": _spec("RTX 4080", 48.7, 48.7, 97.5, 16, 0.717, "NVIDIA Ada architecture paper"),
    "NVIDIA GeForce RTX 3090 Ti": _spec("RTX 3090 Ti", 40, 40, 80, 24, 1.008, "NVIDIA Ada architecture paper"),
    "NVIDIA GeForce RTX 3090": _spec("RTX 3090", 35.6, 35.6, 71.0, 24, 0.936, "NVIDIA Ampere GA102 architecture paper"),
}


def machine_spec(gpu_name: str | None) -> MachineSpec | None:
    """The data sheet of the GPU with this name of the driver, or None."""
    return _SPECS.get(gpu_name or "")


def gpu_named(name: str) -> MachineSpec:
    """The data sheet of a GPU by the driver's name or a short one: `h200`, `a100-80gb`. ValueError lists the known."""
    known = {_short(key): spec for key, spec in _SPECS.items()}
    if (spec := _SPECS.get(name) or known.get(_short(name))) is not None:
        return spec
    raise ValueError(
        f"gpu: {name!r} is not known{nearest(_short(name), known)}; known: {', '.join(known)}; or give its memory: "
        "gpu_memory_gib"
    )


def _short(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` as `h100`, `NVIDIA A100-SXM4-80GB` as `a100-sxm4-80gb`, `NVIDIA H200 NVL` as `h200-nvl`."""
    words = name.lower().removeprefix("nvidia ").removeprefix("geforce ").removesuffix(" 80gb hbm3")
    return words.removesuffix(" 480gb").removesuffix(" generation").replace(" ", "-")


def matmul_dtype(precision: str) -> str:
    """The dtype whose matmul peak limits a precision (`bf16_autocast` -> bf16)."""
    return precision.removesuffix("_autocast").removesuffix("_master")
