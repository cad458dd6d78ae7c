"""Predicts whether a training step fits on a GPU, and what to cut first.

    prediction = predict(config, gpu_memory_bytes=spec.memory_bytes)
    prediction.fits, prediction.needed_bytes, prediction.low_bytes, prediction.high_bytes
    cuts(prediction)                      # changes of options, one after another, until it fits

A process needs what the allocator reserves, and beside it the CUDA context, kernels and NCCL's buffers. Torch returns cached
segments before it fails, so a step whose tensors fit, but not what it would like to reserve, runs with retries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainstep.config.model import ModelConfig
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import RunConfig
from trainstep.costs.traced_step import TracedStep
from trainstep.plan.activations import kept_bytes
from trainstep.plan.live_tensors import ACTIVATION, COPY, GRADIENTS, LOGITS, PARAMETERS, STATE
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import RECOMPUTED, TILED, model_of
from trainstep.plan.peak_memory import computed_run, expected_memory
from trainstep.plan.step_memory import replay
from trainstep.plan.step_replay import StepMemory

CONTEXT_BYTES = 617 * 2**20
"""The CUDA context, measured on H200 (results/h200/memory.jsonl, ddp.jsonl: context_bytes)."""
KERNELS_BYTES = 132 * 2**20
"""Kernels of torch that a step loads (results/h200/memory.jsonl: kernels_bytes)."""
_TRITON_BYTES = 70 * 2**20
"""Further bytes where Triton's kernels are loaded too (results/h200/memory_captured.jsonl)."""
NCCL_BYTES = 844 * 2**20
"""NCCL's buffers, the same for 2 and 4 ranks of a machine (results/h200/ddp.jsonl, ddp_xl_four.jsonl: nccl_bytes)."""

# Relative half-widths of intervals. Where records were graded (`trainstep plan --grade results/h200`) at least 95 % of the errors
# are smaller; options that no record has yet get twice to four times as much.
_MEASURED_ALLOCATED, _MEASURED_RESERVED = 0.02, 0.04
_COMPILED_RESERVED = 0.085
_MOST_CUTS = 5
_LEAST_SHARE = 0.03
"""A change that saves less is not suggested."""
_UNMEASURED_ALLOCATED, _UNMEASURED_RESERVED = 0.05, 0.1


Trace = Callable[[RunConfig], TracedStep]
"""Traces a run's model (training/trace.py). ValueError if it cannot be traced."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A rank's memory. `interval`: relative half-widths of allocated and reserved bytes. `unmeasured`: options no record has.

    `traced`: the trace of a model of the user's own; `trace`: makes the traces of changed runs.
    """

    config: RanksConfig
    memory: StepMemory
    outside: dict[str, int]
    """Bytes that the process takes beside the allocator, by term."""
    interval: tuple[float, float]
    unmeasured: tuple[str, ...]
    gpu_memory_bytes: int | None = None
    traced: TracedStep | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)

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
        """The memory that the driver would show: what the allocator reserves, and what is outside of it."""
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
        """Memory left beside what is needed; negative if it is short. If not even the tensors fit, it is what they lack."""
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


def predict(
    config: RanksConfig, *, gpu_memory_bytes: int | None = None, steps: int = 3, trace: Trace | None = None
) -> Prediction:
    """The memory of the fullest rank. ValueError for what has no formulas. `steps`: as of `replay`.

    A model of the user's own needs `trace`.
    """
    traced = None
    if trace is not None and not isinstance(config.run.model, ModelConfig):
        traced = trace(computed_run(config))
    memory = max(
        (replay(config, rank=rank, steps=steps, traced=traced) for rank in _fullest_ranks(config)),
        key=lambda memory: memory.peak.allocated_bytes,
    )
    unmeasured = tuple(_unmeasured(config))
    return Prediction(
        config=config,
        memory=memory,
        outside=beside_allocator(config),
        interval=interval_of(config),
        unmeasured=unmeasured,
        gpu_memory_bytes=gpu_memory_bytes,
        traced=traced,
        trace=trace,
    )


def interval_of(config: RanksConfig) -> tuple[float, float]:
    """The relative half-widths of allocated and reserved bytes."""
    if any(_unmeasured(config)):
        return _UNMEASURED_ALLOCATED, _UNMEASURED_RESERVED
    return _MEASURED_ALLOCATED, _COMPILED_RESERVED if config.run.compile == "model" else _MEASURED_RESERVED


def _unmeasured(config: RanksConfig) -> Iterator[str]:
    """The options of which there is no record, so that formulas were checked on a CPU or by torch's fake tensors alone; and
    those whose records are further off: compiled blocks that keep some results (10 %, results/h100/plan_grids.jsonl)."""
    run, sync = config.run, config.sync
    options = {
        run.model.name: not isinstance(run.model, ModelConfig),
        f"recompute {run.recompute} of compiled blocks": run.compile != "none"
        and run.recompute in ("selective", "narrow"),
        f"adamw {run.adamw}": run.adamw in ("loop", "foreach"),
        f"attention {run.attention}": run.attention in ("flex", "sdpa_cudnn", "flash_attn_4"),
        f"shard_ranks {sync.shard_ranks}": sync.shard_ranks is not None and sync.shard_ranks < config.ranks,
    }
    yield from (name for name, applies in options.items() if applies)


def _fullest_ranks(config: RanksConfig) -> Sequence[int]:
    """The ranks that may hold most. `sharded` gives whole tensors to ranks, so that one of them has most state."""
    if config.sync.name != "sharded" or config.ranks == 1:
        return (0,)  # the others hold the same on every rank
    if not isinstance(config.run.model, ModelConfig):
        return range(config.ranks)
    parameters = transformer_parameters(config.run.model, config.run.precision, config.run.ops)
    memories = [expected_memory(config, parameters, rank=rank) for rank in range(config.ranks)]
    state = [0 if memory is None else memory.after_step.total_bytes for memory in memories]
    return (state.index(max(state)),)


def beside_allocator(config: RanksConfig) -> dict[str, int]:
    """What a process takes beside the allocator, in bytes by term."""
    run = config.run
    uses_triton = run.compile != "none" or run.ops == "fused" or "trainstep" in (run.attention, run.adamw)
    outside = {"CUDA context": CONTEXT_BYTES, "kernels": KERNELS_BYTES + (_TRITON_BYTES if uses_triton else 0)}
    if config.ranks > 1:
        outside["NCCL"] = NCCL_BYTES
    if config.ranks > 1 and config.sync.transport == "copies":
        outside["inbox of copies"] = config.sync.inbox_mib * 2**20
    return outside


def cuts(prediction: Prediction) -> list[Cut]:
    """Changes of options, each on top of those before it, until the step fits; the largest category is cut first.

    One change if it fits already, or no GPU is known; empty if nothing saves 3 %.
    """
    chosen: list[Cut] = []
    for _ in range(_MOST_CUTS):
        before = chosen[-1].prediction if chosen else prediction
        cut = _first_cut(before)
        if cut is None:
            break
        chosen.append(cut)
        if cut.prediction.fits is not False and not cut.prediction.is_tight:
            break
    return chosen


def _first_cut(prediction: Prediction) -> Cut | None:
    """The first change that saves 3 % of what is needed, from the largest category on, and in a category from the mildest on."""
    categories = prediction.memory.peak.categories
    least_bytes = _LEAST_SHARE * prediction.needed_bytes
    for term in sorted(categories, key=lambda name: -categories[name]):
        if categories[term] < least_bytes:
            break
        for options, config in _changes(prediction, term):
            if prediction.fits and prediction.traced and config.run != prediction.config.run:
                continue  # the hint is not needed, and would cost another trace
            try:
                after = predict(config, gpu_memory_bytes=prediction.gpu_memory_bytes, steps=2, trace=prediction.trace)
            except ValueError:  # a model without blocks cannot recompute them
                continue
            cut = Cut(term=term, options=options, prediction=after)
            if cut.saved_bytes(prediction) >= least_bytes:
                return cut
    return None


def _changes(prediction: Prediction, term: str) -> Iterator[tuple[str, RanksConfig]]:
    """Changes that cut a category and that the config allows; those that cost least time come first."""
    config, run = prediction.config, prediction.config.run
    changes: list[dict[str, object]] = []
    is_own = prediction.traced is not None
    if term in (ACTIVATION, COPY):
        if run.attention not in TILED and not is_own:
            changes.append({"attention": "sdpa"})
        if run.precision in ("fp32", "tf32"):
            changes.append({"precision": "bf16_autocast"})
        changes += _recomputations(prediction)
        if run.batch_size % 2 == 0 and not run.updates_in_backward:
            changes.append({"batch_size": run.batch_size // 2, "accumulation": 2 * run.accumulation})
    if term in (ACTIVATION, LOGITS) and run.ops != "fused" and not is_own:
        changes.append({"ops": "fused"})
    for change in changes:
        yield from _allowed(config, run=change)
    if term in (PARAMETERS, GRADIENTS, STATE) and run.trains:
        if term == GRADIENTS and not run.updates_in_backward:
            yield from _allowed(config, run={"update": "in_backward", "adamw": "trainstep"})
        if config.sync.name != "fsdp":
            yield from _allowed(config, sync="fsdp")


def _recomputations(prediction: Prediction) -> list[dict[str, object]]:
    """Changes of recomputation: first the mildest that may be enough by the formula of kept bytes, then stronger ones."""
    run = prediction.config.run
    if run.recompute_every != 1 or run.compile == "model":
        return []
    modes = RECOMPUTED[RECOMPUTED.index(run.recompute) + 1 :] if run.recompute in RECOMPUTED else RECOMPUTED
    every = {"narrow_blocks": 0} if run.narrow_blocks else {}
    if prediction.gpu_memory_bytes is None or prediction.traced:
        return [{"recompute": mode, **every} for mode in modes]
    kept = sum(kept_bytes(run).values())
    missing = prediction.high_bytes - prediction.gpu_memory_bytes

    def saved(**changes: object) -> int:
        return kept - sum(kept_bytes(replace(run, **changes)).values())  # type: ignore[arg-type]

    enough: list[dict[str, object]] = [
        {"recompute": mode, **every} for mode in modes if saved(recompute=mode, narrow_blocks=0) >= missing
    ]
    few: list[dict[str, object]] = []
    if run.recompute == "selective" and run.narrow_blocks < (layers := model_of(run).layers):
        each = saved(narrow_blocks=run.narrow_blocks + 1)
        if each > 0 and (blocks := run.narrow_blocks + max(1, -(-missing // each))) < layers:
            few = [{"narrow_blocks": blocks}]
    return [*few, *(enough or [{"recompute": mode, **every} for mode in modes[-1:]])]


def _allowed(
    config: RanksConfig, *, run: dict[str, object] | None = None, sync: str = ""
) -> Iterator[tuple[str, RanksConfig]]:
    try:
        if sync:
            ranks = max(2, config.ranks)
            words = f"--sync {sync}" if config.ranks > 1 else f"--ranks {ranks} --sync {sync}"
            kept = ("transport", "inbox_mib", "shard_ranks")
            options = SyncConfig(name=sync, **{name: getattr(config.sync, name) for name in kept})
            yield words, replace(config, ranks=ranks, sync=options)
        else:
            changed: RunConfig = replace(config.run, **run)  # type: ignore[arg-type]
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in (run or {}).items())
            yield words, replace(config, run=changed)
    except ValueError:
        return  # these options do not go together
