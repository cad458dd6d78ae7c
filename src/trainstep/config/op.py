"""The config of one op: which op, which implementation of it, its sizes, and how it is timed.

`OpConfig(op="rms_norm", implementation="liger", tokens=8192, width=4096, dtype="bf16", device="cuda")` is a cell of the workload
`op`. A config that no implementation could run is a ValueError. A config that only this implementation cannot run is still a cell
of the table, and its `refusal` says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainstep.config.attention import DIRECTIONS
from trainstep.config.fields import check_choices, check_integer, check_positive, described
from trainstep.costs.single_op import SIZES

OPS = tuple(SIZES)
PACKAGES: Mapping[str, tuple[str, str]] = {
    "liger": ("liger-kernel", "0.8.5"),
    "quack": ("quack-kernels", "0.6.5"),
    "cudnn": ("nvidia-cudnn-frontend", "1.32.0"),
}
"""Optional implementation -> the package to install, and the version whose functions measure/op/peers.py calls."""
HAVE: Mapping[str, tuple[str, ...]] = {
    "trainstep": OPS,
    "eager": OPS,
    "compile": OPS,
    "torch": ("rms_norm", "adamw"),
    "liger": ("rms_norm", "add_rms_norm", "rotary", "swiglu", "linear_cross_entropy"),
    "quack": ("rms_norm", "add_rms_norm", "rotary", "linear_cross_entropy"),
    "cudnn": ("rms_norm",),
}
"""Implementation -> the ops that it has."""
IMPLEMENTATIONS = tuple(HAVE)
UPDATES = ("adamw",)
"""Ops that update their inputs, and have no backward pass."""
_DEFAULT_SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "cpu": {
        "rms_norm": {"tokens": 256, "width": 512},
        "add_rms_norm": {"tokens": 256, "width": 512},
        "rotary": {"tokens": 256, "heads": 4, "head_dim": 64},
        "swiglu": {"tokens": 256, "width": 512},
        "linear_cross_entropy": {"tokens": 128, "width": 128, "vocabulary": 1024},
        "adamw": {"parameters": 2**18},
    },
    "cuda": {
        "rms_norm": {"tokens": 8192, "width": 4096},
        "add_rms_norm": {"tokens": 8192, "width": 4096},
        "rotary": {"tokens": 8192, "heads": 32, "head_dim": 128},
        "swiglu": {"tokens": 8192, "width": 11008},
        "linear_cross_entropy": {"tokens": 32768, "width": 4096, "vocabulary": 151936},
        "adamw": {"parameters": 500_000_000},
    },
}
"""Device -> op -> its sizes if they are not given: small on a CPU, those of published comparisons on a GPU."""
_ALL_SIZES = tuple(dict.fromkeys(name for names in SIZES.values() for name in names))


def _sized(meaning: str) -> int | None:
    size: int | None = described(f"{meaning}; none: a size that suits the op and the device", None)
    return size


@dataclass(frozen=True, kw_only=True)
class OpConfig:
    """One op's forward, backward or both, and how it is timed. A size that is left out is filled in; ValueError names the field."""

    op: str = described("the op", "rms_norm", OPS)
    implementation: str = described(
        "who computes it: trainstep's kernel, its reference in PyTorch (eager or compiled), torch's own fused op, or a package",
        "trainstep",
        IMPLEMENTATIONS,
    )
    direction: str = described("which pass is timed; an update of adamw is both", "both", DIRECTIONS)
    dtype: str = described(
        "dtype of inputs and outputs; of adamw's parameters, gradients and moments", "fp32", ("fp32", "fp16", "bf16")
    )
    tokens: int | None = _sized("tokens, the rows of the op's tensors (not of adamw)")
    width: int | None = _sized(
        "channels of a token: C of a norm and of linear_cross_entropy; F of swiglu, whose gate and up have 2 F together"
    )
    heads: int | None = _sized("heads of rotary's queries")
    key_heads: int | None = described("heads of rotary's keys; none: as many as queries", None)
    head_dim: int | None = _sized("width of a head of rotary")
    vocabulary: int | None = _sized("vocabulary of linear_cross_entropy")
    parameters: int | None = _sized("elements of the parameter that adamw updates")
    sum_dtype: str = described(
        "dtype in which trainstep's linear_cross_entropy sums the weight's gradient over chunks of tokens: fp32, or own, that of "
        "the inputs, which takes less time and memory, but rounds after each chunk; other implementations have their own way",
        "fp32",
        ("fp32", "own"),
    )
    l2: str = described(
        "the GPU's cache before each pass: hot, as the last pass left it, or cold, filled with other data",
        "hot",
        ("hot", "cold"),
    )
    device: str = described("device to run on", "cpu", ("cpu", "cuda"))
    seed: int = described("seed of the inputs", 0)
    warmups: int = described("passes before the timed ones, after a first that may compile; recorded separately", 3)
    steps: int = described("timed passes", 20)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "steps")
        check_integer(self, "warmups", at_least=0)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        names = SIZES[self.op]
        for name in _ALL_SIZES:
            if name not in names and getattr(self, name) is not None:
                raise ValueError(f"{name}: {self.op} has no such size; its sizes are {', '.join(names)}")
        for name, size in _DEFAULT_SIZES[self.device][self.op].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)  # the only write, before anything reads the field
        if "key_heads" in names and self.key_heads is None:
            object.__setattr__(self, "key_heads", self.heads)
        check_positive(self, *names)
        if self.op == "rotary" and self.sizes["head_dim"] % 2:
            raise ValueError(f"head_dim: rotary turns pairs of channels, so it must be even, not {self.head_dim}")
        if self.op in UPDATES and self.direction != "both":
            raise ValueError(f"direction: {self.op} is an update without a backward pass; leave it at both")
        if self.sum_dtype != "fp32" and self.op != "linear_cross_entropy":
            raise ValueError(
                f"sum_dtype: only linear_cross_entropy sums over chunks, {self.op} does not; leave it at fp32"
            )
        if self.device == "cpu" and self.l2 == "cold":
            raise ValueError("l2: cold is about a GPU's cache; on a CPU leave it at hot")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the op has, by name."""
        return {name: getattr(self, name) for name in SIZES[self.op]}

    @property
    def refusal(self) -> str | None:
        """Why this implementation cannot run this config, as far as that is known without trying; None if it may run."""
        name = self.implementation
        if self.op not in HAVE[name]:
            return f"implementation: {name} has no {self.op}"
        if name in PACKAGES and self.device == "cpu":
            return f"implementation: {name} runs on GPUs only"
        return None


def fields_without_effect(op: str) -> frozenset[str]:
    """The fields that this op does not have: other ops' sizes, and an update's direction."""
    others = {"direction"} if op in UPDATES else set()
    if op != "linear_cross_entropy":
        others.add("sum_dtype")
    return frozenset(_ALL_SIZES) - set(SIZES.get(op, _ALL_SIZES)) | others
