"""The host's time to enqueue the kernels of an eager step, by phase.

Plain PyTorch costs about the same for each launch: Python, dispatch, autograd and the driver. A compiled block has one call, with
its guards and its own autograd function, whatever it launches by itself. An operator of ops/ launches one kernel through a
function in Python and Triton's launcher, also from within a compiled block. A mode of recomputation that keeps chosen results
sees every operator in Python. How fast a host is differs between machines by a factor of two, and between moments: the range is
the calibration's.
"""

from collections.abc import Mapping, Sequence

from trainstep.config.run import Phase, RunConfig
from trainstep.plan.model_ops import model_of
from trainstep.plan.time.calibration import Calibration, HostCost
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.kernels import Kernel, Kind

_PER_MODEL = 0.5
"""A model compiled whole has one call, but launches as many kernels: it costs about half of what its blocks cost one by one."""
_AROUND_BLOCKS = 40
"""Kernels around compiled blocks that are enqueued one by one: norm, head, loss."""
_OPERATORS = (Kind.FUSED, Kind.FUSED_COLUMNS)
_OPERATOR_LAUNCHES = {Phase.FORWARD: 9, Phase.BACKWARD: 7}
"""How many launches of plain PyTorch cost the host as much as one kernel of ops/. By results/h200/predicted_again.jsonl (2 steps,
which 9 and 7 make 12 % too long) 8 and 6; by results/h200/plan_grids.jsonl (8, relative to the plain steps of that slower host) 9
and 7. While the ops made views and changed devices they cost twice as much (results/h200/predicted.jsonl)."""
_SEEN_LAUNCHES = 5
"""How many launches cost as much as a mode that sees the operators of one kernel (xl, 8 x 1,024, the same file)."""


def host_time(
    run: RunConfig,
    kernels: Mapping[str, Sequence[tuple[Kernel, int]]],
    calibration: Calibration,
    *,
    tensors: int,
    messages: Mapping[str, int],
) -> dict[str, Interval]:
    """The host's time by phase; empty where the calibration has no costs of a host. `tensors`: number of parameters.

    `messages`: how many, by the phase whose hooks send them.
    """
    times = {}
    for phase, counted in kernels.items():
        enqueued = sum(count for _, count in counted)
        ours = sum(count for kernel, count in counted if kernel.kind in _OPERATORS)
        launches = enqueued + ours * (_OPERATOR_LAUNCHES.get(Phase(phase), 1) - 1)
        if run.recompute in ("selective", "narrow") and phase in (Phase.FORWARD, Phase.BACKWARD):
            launches += _SEEN_LAUNCHES * sum(count for _, count in kernels[Phase.FORWARD])
        costs: list[tuple[float, HostCost]] = []
        block = calibration.host.get(f"compiled block {phase}")
        if run.compile != "none" and phase in (Phase.FORWARD, Phase.BACKWARD) and block is not None:
            calls = run.accumulation * model_of(run).layers
            again = calls / run.recompute_every if run.recompute != "none" and phase == Phase.BACKWARD else 0
            costs.append(((calls + again) * (_PER_MODEL if run.compile == "model" else 1.0), block))
            around = min(enqueued - ours, run.accumulation * _AROUND_BLOCKS)
            launches = around + ours * _OPERATOR_LAUNCHES.get(Phase(phase), 1)
        if phase == Phase.OPTIMIZER:
            launches = tensors
        launch = calibration.host.get("optimizer tensor" if phase == Phase.OPTIMIZER else f"{phase} launch")
        if launch is not None:
            costs.append((launches, launch))
        message = calibration.host.get("message")
        if message is not None:
            costs.append((messages.get(phase, 0), message))
        if costs:
            times[phase] = Interval(
                time_s=sum(number * cost.middle_s for number, cost in costs),
                low_s=sum(number * cost.low_s for number, cost in costs),
                high_s=sum(number * cost.high_s for number, cost in costs),
            )
    return times
