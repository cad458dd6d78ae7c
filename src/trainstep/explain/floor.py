"""The least time that a step needs on a calibrated machine, and the step that plan predicts after a change.

    floor_of(config, calibration)              # {"matmul": s, "attention": s, "memory-bound": s, "optimizer": s, "messages": s}

The floor is the time of the same mathematics computed in the best way: each class's work at the ceiling that was calibrated.

    matmul         model FLOPs without recomputation / the highest rate of 16-bit matmuls
    attention      FLOPs of the causal triangle, 2 matmuls forward and 5 backward / the same rate
    memory-bound   bytes of the compiled step in bf16_autocast / bandwidth of large contiguous kernels
    optimizer      AdamW's bytes in one pass over what this rank updates / that bandwidth
    messages       transfer of all payloads, in buckets, less the backward that can hide it

It includes no launches, no gaps and no partly filled waves of tiles, so no step reaches it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.config.parallel import STRATEGY_FIELDS, RanksConfig
from trainstep.config.run import RunConfig
from trainstep.costs.attention import attention_backward_flops, attention_flops
from trainstep.costs.transformer import adamw_bytes
from trainstep.explain.changes import MANY_MESSAGES
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import model_of
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.kernels import Kind, class_of
from trainstep.plan.time.message_time import updated_share
from trainstep.plan.time.step_kernels import step_kernels
from trainstep.plan.time.step_time import StepTime, step_time

MATMUL, ATTENTION, MEMORY, OPTIMIZER, MESSAGES = "matmul", "attention", "memory-bound", "optimizer", "messages"
SIXTEEN_BITS = ("bf16", "fp16")


def floor_of(config: RanksConfig, calibration: Calibration, predicted: StepTime) -> dict[str, float]:
    """The least seconds for each class of work. ValueError without formulas. `predicted`: the predicted step of the same config."""
    run = config.run
    model = model_of(run)
    rate = max(speed.flops_per_s for name, speed in calibration.matmuls.items())
    bandwidth = max(nbytes / time_s for nbytes, time_s in calibration.traffic[Kind.CONTIGUOUS][0].points)
    heads = run.batch_size * model.heads * model.layers
    forward = attention_flops(heads, run.context, run.context, model.head_dim, causal=True)
    backward = attention_backward_flops(heads, run.context, run.context, model.head_dim, causal=True)
    trains = run.mode in ("forward_backward", "step")
    attention = run.accumulation * (forward + backward * trains)
    matmuls = run.model_flops(model) - run.accumulation * forward * (3 if trains else 1)
    best = reference(run)
    kernels = step_kernels(best)
    passes = (*kernels.forward, *(kernels.backward if trains else ()))
    nbytes = run.accumulation * sum(
        kernel.count * kernel.nbytes(kernels.symbols) for kernel in passes if class_of(kernel.kind) == MEMORY
    )
    floor = {MATMUL: matmuls / rate, ATTENTION: attention / rate, MEMORY: nbytes / bandwidth}
    if run.mode == "step":
        numel = sum(parameter.numel for parameter in transformer_parameters(model, run.precision, run.ops))
        floor[OPTIMIZER] = updated_share(config) * adamw_bytes(numel, 4) / bandwidth
    hidden_s = sum(line.time_s for line in predicted.lines if line.phase == "backward")
    sent_s = predicted.messages.sent_s
    if (
        config.sync.name in MANY_MESSAGES
        and (buckets := changed(config, {"sync": "bucketed"}, calibration)) is not None
    ):
        sent_s = min(sent_s, buckets.messages.sent_s)
    floor[MESSAGES] = max(0.0, sent_s - hidden_s)
    return floor


def check_calibration(calibration: Calibration, *, device: str, gpu: str | None, has_formulas: bool = True) -> None:
    """ValueError if the user's calibration is of another machine than the step's, or nothing would be computed with it."""
    if device != "cuda" or not has_formulas:
        step = "of a model without formulas" if device == "cuda" else "on a CPU"
        raise ValueError(f"calibration: has no effect, because no floor is known for a step {step}; leave it out")
    if gpu is not None and (machine_spec(calibration.name) or calibration.name) != (machine_spec(gpu) or gpu):
        raise ValueError(
            f"calibration: it was measured on {calibration.name}, and the step on {gpu}; leave it out, or measure one there"
        )


def reference(run: RunConfig) -> RunConfig:
    """The config whose bytes are the memory-bound floor: the same mathematics, compiled, 16-bit matmuls, no recomputation."""
    precision = run.precision if run.precision in ("bf16", "fp16_autocast", "bf16_master") else "bf16_autocast"
    return replace(
        run,
        precision=precision,
        attention="sdpa",
        compile="block",
        ops="plain",
        recompute="none",
        recompute_every=1,
        narrow_blocks=0,
        recompute_budget_gib=None,
        adamw="fused",
        update="after_backward",
        capture="none",
    )


def changed(config: RanksConfig, fields: Mapping[str, Any], calibration: Calibration) -> StepTime | None:
    """The predicted step with these fields of its run or its strategy (`sync`) changed; None if refused or without formulas."""
    of_sync = {"name" if name == "sync" else name: value for name, value in fields.items() if name in STRATEGY_FIELDS}
    of_run = {name: value for name, value in fields.items() if name not in STRATEGY_FIELDS}
    try:
        return step_time(
            replace(config, run=replace(config.run, **of_run), sync=replace(config.sync, **of_sync)), calibration
        )
    except (ValueError, TypeError):
        return None
