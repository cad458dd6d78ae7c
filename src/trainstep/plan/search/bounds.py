"""Cheap bounds of a step's time and memory: no step of these options is faster, or needs less, than they say.

    bounds = Bounds(calibration)
    bounds.time_s(config), bounds.bytes(config)

Time: the device's kernels, without messages and without the host. A rank's passes are computed once without recomputation, and once
with each mode in every block; a step that recomputes every k-th block, or has some narrow ones, is between two of these, in
proportion to its blocks.
Memory: the larger of two sums of peak_memory.py, the end of forward with what forward keeps, and the fullest moment without it.
Temporary tensors are left out, and so is what the allocator rounds up.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import RunConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.plan.activations import kept_bytes
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import model_of
from trainstep.plan.peak_memory import computed_run, expected_memory
from trainstep.plan.prediction import beside_allocator, interval_of
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.kernels import Kernel
from trainstep.plan.time.message_time import updated_share
from trainstep.plan.time.step_kernels import StepKernels, step_kernels


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Seconds and launches of a micro-batch's passes, and of adding its gradients to those before."""

    time_s: float
    launches: float
    added_s: float
    added_launches: int


class Bounds:
    """Bounds with what they share. ValueError for what has no formulas."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._known: dict[Hashable, Any] = {}

    def time_s(self, config: RanksConfig) -> float:
        """The least time of a step."""
        run = config.run
        if run.mode != "step":
            return 0.0
        gap_s = self._calibration.gaps.get("graph" if run.capture != "none" else "eager", 0.0)
        passes = self._passes(computed_run(config))
        update_s, update_launches = self._update(run, updated_share(config))
        again = run.accumulation - 1
        launches = run.accumulation * passes.launches + again * passes.added_launches + update_launches
        return run.accumulation * passes.time_s + again * passes.added_s + update_s + gap_s * launches

    def bytes(self, config: RanksConfig) -> int:
        """The least bytes that the process needs."""
        return self._tensor_bytes(config) + sum(beside_allocator(config).values())

    def sure_bytes(self, config: RanksConfig) -> int:
        """The least memory of a GPU on which it surely fits."""
        high = self._tensor_bytes(config) * (1 + interval_of(config)[1])
        return round(high) + sum(beside_allocator(config).values())

    def _tensor_bytes(self, config: RanksConfig) -> int:
        run = config.run
        key = (
            "held",
            config.ranks,
            config.sync,
            run.precision,
            run.ops,
            run.adamw,
            run.update,
            min(run.accumulation, 2),
        )
        if key not in self._known:
            expected = expected_memory(config, self.parameters(run))
            if expected is None:
                raise ValueError(f"sync: what {config.sync.name} of torch holds is not known")
            self._known[key] = expected.peak.total_bytes, expected.after_forward.total_bytes
        peak, after_forward = self._known[key]
        least: int = max(peak, after_forward + self.kept_bytes(computed_run(config)))
        return least

    def kept_bytes(self, run: RunConfig) -> int:
        """What forward keeps for backward: each further group of blocks adds as many bytes as the second one."""
        key = ("kept", *_compute_of(run, run.recompute), run.recompute_every, run.narrow_blocks)
        if key not in self._known and run.narrow_blocks:
            self._known[key] = sum(kept_bytes(run).values())
        elif key not in self._known:
            layers, every = model_of(run).layers, run.recompute_every
            groups, rest = divmod(layers, every)
            few = [rest + every, rest + 2 * every] if groups > 2 else [layers, layers]
            first, second = (
                sum(kept_bytes(replace(run, model=replace(model_of(run), layers=count))).values()) for count in few
            )
            self._known[key] = first + (groups - 1) * (second - first)
        kept: int = self._known[key]
        return kept

    def parameters(self, run: RunConfig) -> Sequence[ParameterSize]:
        key = "parameters", run.precision, run.ops
        if key not in self._known:
            self._known[key] = transformer_parameters(model_of(run), run.precision, run.ops)
        cached: Sequence[ParameterSize] = self._known[key]
        return cached

    def _passes(self, run: RunConfig) -> _Passes:
        key = ("passes", *_compute_of(run, run.recompute), run.recompute_every, run.narrow_blocks)
        if key not in self._known:
            layers = model_of(run).layers
            passes = self._passes_of(run, "none")
            passes = _between(passes, self._passes_of(run, run.recompute), _recomputed_blocks(run) / layers)
            if run.narrow_blocks:
                passes = _between(passes, self._passes_of(run, "narrow"), run.narrow_blocks / layers)
            self._known[key] = passes
        cached: _Passes = self._known[key]
        return cached

    def _passes_of(self, run: RunConfig, mode: str) -> _Passes:
        """The passes with every block recomputed in this mode."""
        key = ("every block", *_compute_of(run, mode))
        if key not in self._known:
            kernels = step_kernels(_every_block(run, mode))
            passes = (*kernels.forward, *kernels.backward)
            self._known[key] = _Passes(
                time_s=self._seconds(passes, kernels),
                launches=sum(kernel.count for kernel in passes),
                added_s=self._seconds(kernels.added, kernels),
                added_launches=sum(kernel.count for kernel in kernels.added),
            )
        cached: _Passes = self._known[key]
        return cached

    def _update(self, run: RunConfig, share: float) -> tuple[float, int]:
        key = "update", run.precision, run.ops, run.adamw, run.clip_grad_norm, share
        if key not in self._known:
            kernels = step_kernels(run, updated_share=share)
            launches = sum(kernel.count for kernel in kernels.optimizer)
            self._known[key] = self._seconds(kernels.optimizer, kernels), launches
        time_s, launches = self._known[key]
        return time_s, launches

    def _seconds(self, kernels: Sequence[Kernel], of: StepKernels) -> float:
        return sum(kernel.count * self._calibration.kernel_s(kernel, of.symbols).time_s for kernel in kernels)


def _between(passes: _Passes, others: _Passes, share: float) -> _Passes:
    """The passes with this share of the blocks as in `others`."""
    return replace(
        passes,
        time_s=passes.time_s + share * (others.time_s - passes.time_s),
        launches=passes.launches + share * (others.launches - passes.launches),
    )


def _compute_of(run: RunConfig, mode: str) -> tuple[Hashable, ...]:
    """What a rank's passes depend on."""
    return run.batch_size, run.precision, run.ops, run.compile, run.attention, mode


def _every_block(run: RunConfig, mode: str) -> RunConfig:
    return replace(run, recompute=mode, recompute_every=1, narrow_blocks=0)


def _recomputed_blocks(run: RunConfig) -> int:
    return 0 if run.recompute == "none" else -(-model_of(run).layers // run.recompute_every)
