"""Predicts whether a training step fits on a GPU, and what to cut first.

    prediction = predict(config, gpu_memory_bytes=spec.memory_bytes)
    prediction.fits, prediction.needed_bytes, prediction.low_bytes, prediction.high_bytes
    first_cut(prediction)                 # the change of one option that lowers the peak most

A process needs what the allocator reserves, and beside it the CUDA context, kernels and NCCL's buffers. Torch returns cached
segments before it fails, so a step whose tensors fit, but not what it would like to reserve, runs with retries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import RunConfig
from trainstep.plan.live_tensors import ACTIVATION, COPY, GRADIENTS, LOGITS, PARAMETERS, STATE
from trainstep.plan.model_ops import TILED
from trainstep.plan.step_memory import StepMemory, replay

CONTEXT_BYTES = 617 * 2**20
"""The CUDA context, measured on H200 (results/h200/memory.jsonl, ddp.jsonl: context_bytes)."""
KERNELS_BYTES = 132 * 2**20
"""Kernels of torch that a step loads (results/h200/memory.jsonl: kernels_bytes)."""
_TRITON_BYTES = 70 * 2**20
"""More where Triton's are loaded too (results/h200/memory_captured.jsonl)."""
NCCL_BYTES = 844 * 2**20
"""NCCL's buffers, the same for 2 and 4 ranks of a machine (results/h200/ddp.jsonl, ddp_xl_four.jsonl: nccl_bytes)."""

# Relative half-widths of intervals. Where records were graded (`trainstep plan --grade results/h200`) at least 95 % of their errors
# are below; what no record has yet is given twice to four times as much.
_MEASURED_ALLOCATED, _MEASURED_RESERVED = 0.02, 0.04
_COMPILED_RESERVED = 0.085
_UNMEASURED_ALLOCATED, _UNMEASURED_RESERVED = 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A rank's memory. `interval`: relative half-widths of allocated and reserved bytes. `unmeasured`: options no record has."""

    config: RanksConfig
    memory: StepMemory
    outside: dict[str, int]
    """Bytes that the process takes beside the allocator, by term."""
    interval: tuple[float, float]
    unmeasured: tuple[str, ...]
    gpu_memory_bytes: int | None = None

    @property
    def allocated_bytes(self) -> int:
        return self.memory.peak.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.memory.peak.reserved_bytes

    @property
    def outside_bytes(self) -> int:
        return sum(self.outside.values())

    @property
    def needed_bytes(self) -> int:
        """What the driver would show: reserved, and what is outside."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def low_bytes(self) -> int:
        return round(self.reserved_bytes * (1 - self.interval[1])) + self.outside_bytes

    @property
    def high_bytes(self) -> int:
        return round(self.reserved_bytes * (1 + self.interval[1])) + self.outside_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the tensors themselves fit; None without a GPU's memory."""
        if self.gpu_memory_bytes is None:
            return None
        return self.allocated_bytes + self.outside_bytes <= self.gpu_memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it may not fit after all, or only with retries: the upper end of the interval is beyond the memory."""
        return self.gpu_memory_bytes is not None and self.high_bytes > self.gpu_memory_bytes

    @property
    def spare_bytes(self) -> int:
        """Memory left beside what is needed; negative if it is short. Short of tensors, if these do not fit."""
        assert self.gpu_memory_bytes is not None
        used = self.needed_bytes if self.fits else self.allocated_bytes + self.outside_bytes
        return self.gpu_memory_bytes - used


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A change of options with what it would need. `options`: as on a command line."""

    term: str
    """The category that it cuts."""
    options: str
    prediction: Prediction

    def saved_bytes(self, before: Prediction) -> int:
        return before.needed_bytes - self.prediction.needed_bytes


def predict(config: RanksConfig, *, gpu_memory_bytes: int | None = None) -> Prediction:
    """The memory of the fullest rank. ValueError for what has no formulas."""
    ranks = range(config.ranks) if config.sync.name == "sharded" else range(1)  # the others hold the same on every rank
    memory = max((replay(config, rank=rank) for rank in ranks), key=lambda memory: memory.peak.allocated_bytes)
    unmeasured = tuple(_unmeasured(config))
    interval = _MEASURED_ALLOCATED, _COMPILED_RESERVED if config.run.compile == "model" else _MEASURED_RESERVED
    if unmeasured:
        interval = _UNMEASURED_ALLOCATED, _UNMEASURED_RESERVED
    return Prediction(
        config=config,
        memory=memory,
        outside=_outside(config),
        interval=interval,
        unmeasured=unmeasured,
        gpu_memory_bytes=gpu_memory_bytes,
    )


def _outside(config: RanksConfig) -> dict[str, int]:
    run = config.run
    uses_triton = run.compile != "none" or run.ops == "fused" or "trainstep" in (run.attention, run.adamw)
    outside = {"CUDA context": CONTEXT_BYTES, "kernels": KERNELS_BYTES + (_TRITON_BYTES if uses_triton else 0)}
    if config.ranks > 1:
        outside["NCCL"] = NCCL_BYTES
    if config.ranks > 1 and config.sync.transport == "copies":
        outside["inbox of copies"] = config.sync.inbox_mib * 2**20
    return outside


def _unmeasured(config: RanksConfig) -> Iterator[str]:
    """The options of which there is no record, so that formulas were checked on a CPU or by torch's fake tensors alone."""
    run, sync = config.run, config.sync
    options = {
        "ops fused": run.ops == "fused",
        f"recompute {run.recompute}": run.recompute != "none",
        "precision bf16_master": run.precision == "bf16_master",
        "update in_backward": run.updates_in_backward,
        f"accumulation {run.accumulation}": run.accumulation > 1,
        f"adamw {run.adamw}": run.adamw in ("loop", "foreach"),
        f"attention {run.attention}": run.attention in ("flex", "sdpa_cudnn"),
        "compute_dtype bf16": sync.compute_dtype != "own",
        "transport copies": config.ranks > 1 and sync.transport == "copies",
    }
    yield from (name for name, applies in options.items() if applies)


def first_cut(prediction: Prediction) -> Cut | None:
    """The change of one option that lowers what is needed most, of those for the largest terms; None if none lowers it."""
    categories = prediction.memory.peak.categories
    sizes = sorted(categories, key=lambda name: -categories[name])
    found: list[Cut] = []
    for term in sizes:
        for options, config in _changes(prediction.config, term):
            cut = Cut(
                term=term, options=options, prediction=predict(config, gpu_memory_bytes=prediction.gpu_memory_bytes)
            )
            if cut.saved_bytes(prediction) > 0.01 * prediction.needed_bytes:
                found.append(cut)
        if found:
            # The change that costs least of those that make it fit, else the one that saves most.
            fitting = [cut for cut in found if cut.prediction.fits and not cut.prediction.is_tight]
            return next(iter(fitting), None) or max(found, key=lambda cut: cut.saved_bytes(prediction))
    return None


def _changes(config: RanksConfig, term: str) -> Iterator[tuple[str, RanksConfig]]:
    """Changes that cut a category, the cheapest first, of those that the config allows."""
    run = config.run
    runs: list[dict[str, object]] = []
    if term in (ACTIVATION, COPY):
        if run.attention not in TILED:
            runs.append({"attention": "sdpa"})
        if run.ops != "fused":
            runs.append({"ops": "fused"})
        modes = ("none", "selective", "narrow", "block")
        if run.recompute_every == 1 and run.compile != "model":
            runs += [{"recompute": mode} for mode in modes[modes.index(run.recompute) + 1 :]]
        if run.batch_size % 2 == 0:
            runs.append({"batch_size": run.batch_size // 2, "accumulation": 2 * run.accumulation})
    elif term == LOGITS and run.ops != "fused":
        runs.append({"ops": "fused"})
    elif term == GRADIENTS and run.trains:
        runs.append({"update": "in_backward", "adamw": "trainstep"})
    for changes in runs:
        yield from _allowed(config, run=changes)
    if term in (PARAMETERS, GRADIENTS, STATE) and run.trains:
        for sync in ("sharded_flat", "fsdp"):
            if config.ranks > 1 and config.sync.name != sync:
                yield from _allowed(config, sync=sync)
    if term in (PARAMETERS, STATE) and run.precision in ("fp32", "tf32", "bf16_autocast", "fp16_autocast"):
        yield from _allowed(config, run={"precision": "bf16"})


def _allowed(
    config: RanksConfig, *, run: dict[str, object] | None = None, sync: str = ""
) -> Iterator[tuple[str, RanksConfig]]:
    try:
        if sync:
            yield f"--sync {sync}", replace(config, sync=replace(config.sync, name=sync))
        else:
            changed: RunConfig = replace(config.run, **run)  # type: ignore[arg-type]
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in (run or {}).items())
            yield words, replace(config, run=changed)
    except ValueError:
        return  # these options do not go together
