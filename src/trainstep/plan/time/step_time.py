"""The time of a step by phase and class, with an interval: what the device computes, what the host enqueues, what messages expose.

    predicted = step_time(config, calibration)
    predicted.step.time_s, predicted.step.low_s, predicted.step.high_s
    predicted.phases["backward"], predicted.classes["matmul"], predicted.lines       # lines: every term with its formula

Device: each kernel takes what the calibration says of its kind and size, at the clock that the power limit leaves in the long
run, and the gap before it. In an eager step the host enqueues kernels phase by phase, and a phase ends when both are done:

    end of a phase = max(host's end of the phase, device's end of the phase before + the phase's kernels)

In a captured step the host launches one graph, and only the device's time counts. Messages: message_time.py.

Interval: kernels of one shape share an error, and errors of different shapes are independent. The device's half-width is 1.64 times
the root of their sum of squares; an error of the clock (power.py) and half of the gaps are two more independent errors in it. The
errors of device, messages, a graph's launch and host are independent too: each end of the step's interval is the root of the sum of
squares of what each of them changes alone. The host's range is its calibration's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import Phase, RunConfig
from trainstep.plan.model_ops import model_of
from trainstep.plan.peak_memory import computed_run
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.host_time import host_time
from trainstep.plan.time.interval import Interval
from trainstep.plan.time.kernels import CLASSES, Kernel, Kind, class_of
from trainstep.plan.time.message_time import Exposed, copied_gradients, exposed_messages, summing_ranks, updated_share
from trainstep.plan.time.power import Load, load_of, sustained_clock
from trainstep.plan.time.step_kernels import StepKernels, step_kernels

GAPS = "gaps between kernels"
HOST = "host"
MESSAGES = "exposed messages"
STRAGGLERS = "waiting for the slowest rank"
MACHINE = 0.02
"""Relative standard deviation between machines of one kind, and between steps."""
DEVIATIONS = 1.64
"""Standard deviations within which 90 % of normal errors are."""
_POWER = 0.15
"""How much longer 16-bit matmuls may take at the upper end where nothing is known of the GPU's power (2.7B, 1,024 tokens,
results/h200/captured.jsonl: 1,530 of 1,980 MHz)."""
_CLOCK = 0.05
"""The same at both ends where power.py knows the clock."""
GRAPH_LAUNCH = {"low_s": 0.7, "time_s": 1.0, "high_s": 3.0}
"""A graph's launch at the ends of the interval: 0.3 to 0.9 ms of the same graph on two hosts (captured.jsonl, fused.jsonl)."""
KernelsOf = Callable[..., StepKernels]
MessagesOf = Callable[[RanksConfig, Calibration, Mapping[str, Interval], Interval | None], Exposed]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A term of the step's time: equal kernels of one phase."""

    phase: str
    op: str
    what: Kind
    dtype: str
    formula: str
    count: int
    time_s: float
    """Seconds of all of them."""
    spread: float
    load: Load
    """Their time and power in a burst."""
    guess: str = ""

    @property
    def kind(self) -> str:
        """The kind and dtype, `matmul bf16` for example."""
        return f"{self.what} {self.dtype}".strip()


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A predicted step of one rank. `phases`: what each phase adds to the step. `classes`: the device's time by class, and what is
    beside it: gaps between kernels, exposed messages, and how long the step waits for the host."""

    config: RanksConfig
    calibration: Calibration
    step: Interval
    phases: Mapping[str, Interval]
    device: Mapping[str, Interval]
    """The device's busy time in each phase."""
    host: Mapping[str, Interval]
    """The host's time to enqueue each phase; empty if captured."""
    classes: Mapping[str, float]
    lines: tuple[Line, ...]
    messages: Exposed
    model_flops: int
    """FLOPs of one rank's step."""
    clock: float = 1.0
    """The share of the GPU's highest clock that the power limit leaves."""

    @property
    def is_captured(self) -> bool:
        return self.config.run.capture != "none"

    @property
    def host_bound(self) -> bool:
        """Whether the host makes the step longer, by a tenth or more."""
        return self.classes[HOST] > 0.1 * self.step.time_s

    @property
    def host_may_limit(self) -> bool:
        """Whether a host at the slow end of its range would take longer than the device and what messages expose."""
        host_s = sum(part.high_s for part in self.host.values())
        return host_s > sum(part.time_s for part in self.device.values()) + self.messages.total.time_s

    @property
    def tokens(self) -> int:
        """Tokens that all ranks read in a step."""
        return self.config.ranks * self.config.run.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.time_s

    def mfu(self, peak_flops: float) -> float:
        """Model FLOPs over what the peak would have done."""
        return self.model_flops / self.step.time_s / peak_flops

    def gpu_hours(self, tokens: float) -> Interval:
        """GPU-hours to train on so many tokens: steps x time x ranks."""
        steps = tokens / self.tokens
        return self.step * (steps * self.config.ranks / 3600)

    @property
    def guesses(self) -> tuple[str, ...]:
        """What was not measured, and what it was taken from."""
        return tuple(dict.fromkeys(line.guess for line in self.lines if line.guess))


def step_time(
    config: RanksConfig,
    calibration: Calibration,
    *,
    messages_of: MessagesOf = exposed_messages,
    kernels_of: KernelsOf = step_kernels,
    sustained: bool = True,
) -> StepTime:
    """The time of a step. ValueError for what has no formulas, or is not in the calibration.

    `sustained`: in training, where the power limit acts; else in a second of steps after a pause.

    `messages_of`: what messages add to the device's phases; those between nodes are plan/fleet's. `kernels_of`: the kernels, where
    they are not those of trainstep's own step.
    """
    run = config.run
    kernels = kernels_of(
        run,
        updated_share=updated_share(config),
        copies_gradients=copied_gradients(config),
        summing_ranks=summing_ranks(config),
        compute=computed_run(config),
    )
    by_phase = _kernels_by_phase(kernels, run)
    lines = [
        _line(phase, kernel, count, kernels.symbols, calibration)
        for phase, counted in by_phase.items()
        for kernel, count in counted
    ]
    clock = sustained_clock([line.load for line in lines]) if sustained and calibration.power_limited else 1.0
    lines = [replace(line, time_s=line.load.at(clock)) for line in lines]
    gap_s = calibration.gaps.get("graph" if run.capture != "none" else "eager", 0.0)
    device = {phase: _device(lines, phase, gap_s, calibration) for phase in by_phase}
    update = None
    if run.mode == "step" and run.update != "after_backward":
        own = [(kernel, kernel.count) for kernel in kernels.optimizer]
        update = _device(
            [_line("", kernel, count, kernels.symbols, calibration) for kernel, count in own], "", gap_s, calibration
        )
    messages = messages_of(config, calibration, device, update)
    host = host_time(run, by_phase, calibration, tensors=kernels.tensors, messages=messages.messages)
    if run.capture != "none":  # what AdamW's loop and foreach enqueue is in no graph
        left_out = (Phase.OPTIMIZER,) if run.adamw in ("loop", "foreach") else ()
        host = {phase: cost for phase, cost in host.items() if phase in left_out}
    launch_s = 0.0
    if run.capture != "none":
        launch_s = calibration.gaps.get("graph launch", 0.0) * sum(line.count for line in lines)
    phases, step = _pipeline(device, host, messages, launch_s)
    classes = dict.fromkeys(CLASSES, 0.0)
    for line in lines:
        classes[class_of(line.what)] += line.time_s
    classes[GAPS] = gap_s * sum(line.count for line in lines)
    classes[MESSAGES] = messages.total.time_s - messages.waiting_s
    if messages.waiting_s:
        classes[STRAGGLERS] = messages.waiting_s
    classes[HOST] = max(0.0, step.time_s - sum(classes.values()))
    return StepTime(
        config=config,
        calibration=calibration,
        step=step,
        phases=phases,
        device=device,
        host=host,
        classes=classes,
        lines=tuple(lines),
        messages=messages,
        model_flops=run.model_flops(model_of(run)) if kernels.model_flops is None else kernels.model_flops,
        clock=clock,
    )


def _kernels_by_phase(kernels: StepKernels, run: RunConfig) -> dict[str, list[tuple[Kernel, int]]]:
    """Each phase's kernels with their number in a whole step. With update in_backward the update is backward's."""
    times = run.accumulation
    phases: dict[str, list[tuple[Kernel, int]]] = {
        Phase.FORWARD: [(kernel, times * kernel.count) for kernel in kernels.forward]
    }
    if run.mode in ("forward_backward", "step"):
        phases[Phase.BACKWARD] = [(kernel, times * kernel.count) for kernel in kernels.backward]
        phases[Phase.BACKWARD] += [(kernel, (times - 1) * kernel.count) for kernel in kernels.added if times > 1]
    if run.mode == "step":
        update = [(kernel, kernel.count) for kernel in kernels.optimizer]
        if run.update == "after_backward":
            phases[Phase.OPTIMIZER] = update
        else:
            phases[Phase.BACKWARD] += update
    return phases


def _line(phase: str, kernel: Kernel, count: int, symbols: Mapping[str, int], calibration: Calibration) -> Line:
    estimate = calibration.kernel_s(kernel, symbols)
    return Line(
        phase=phase,
        op=kernel.op,
        what=kernel.kind,
        dtype=kernel.dtype,
        formula=kernel.formula,
        count=count,
        time_s=count * estimate.time_s,
        spread=estimate.spread,
        load=load_of(kernel, symbols, one_s=estimate.time_s, count=count),
        guess=estimate.guess,
    )


def _device(lines: Sequence[Line], phase: str, gap_s: float, calibration: Calibration) -> Interval:
    own = [line for line in lines if line.phase == phase]
    time_s = sum(line.time_s for line in own)
    gaps_s = gap_s * sum(line.count for line in own)
    alike: dict[tuple[str, str], float] = {}
    for line in own:
        key = line.kind, line.formula
        alike[key] = alike.get(key, 0.0) + line.spread * line.time_s
    errors_s = [*alike.values(), MACHINE * time_s, calibration.extra_spread * time_s]
    half_s = _root([*(DEVIATIONS * error_s for error_s in errors_s), gaps_s / 2])
    slowed_s = sum(line.time_s for line in own if line.load.slows)
    faster_s, slower_s = (_CLOCK * slowed_s,) * 2 if calibration.power_limited else (0.0, _POWER * slowed_s)
    total_s = time_s + gaps_s
    return Interval(
        time_s=total_s,
        low_s=max(0.0, total_s - _root([half_s, faster_s])),
        high_s=total_s + _root([half_s, slower_s]),
    )


def _root(values: Iterable[float]) -> float:
    """The root of the sum of squares: how far independent errors go together."""
    return math.hypot(*values)


_SOURCES = ("device", "messages", "launch", "host")
"""The sources of independent errors."""


def _pipeline(
    device: Mapping[str, Interval], host: Mapping[str, Interval], messages: Exposed, launch_s: float
) -> tuple[dict[str, Interval], Interval]:
    """What each phase adds, and the whole step. An end of an interval is the root of the sum of squares of what each source changes
    when it alone is at this end."""
    middle = _added(device, host, messages, launch_s, dict.fromkeys(_SOURCES, "time_s"))
    sides: dict[str, dict[str, list[float]]] = {}
    for end in ("low_s", "high_s"):
        sides[end] = {name: [] for name in (*device, "step")}
        for source in _SOURCES:
            added = _added(device, host, messages, launch_s, dict.fromkeys(_SOURCES, "time_s") | {source: end})
            for phase in device:
                sides[end][phase].append(added[phase] - middle[phase])
            sides[end]["step"].append(sum(added.values()) - sum(middle.values()))
    middle["step"] = sum(middle.values())
    intervals = {
        name: Interval(
            time_s=time_s,
            low_s=max(0.0, time_s - _root(sides["low_s"][name])),
            high_s=time_s + _root(sides["high_s"][name]),
        )
        for name, time_s in middle.items()
    }
    return intervals, intervals.pop("step")


def _added(
    device: Mapping[str, Interval],
    host: Mapping[str, Interval],
    messages: Exposed,
    launch_s: float,
    ends: Mapping[str, str],
) -> dict[str, float]:
    """What each phase adds, with each source at the given end of its interval. The device ends a phase when it has run the phases
    before and this one's kernels, but not before the host has enqueued them."""
    added = {}
    before_s = host_end_s = 0.0
    device_end_s = launch_s * GRAPH_LAUNCH[ends["launch"]]
    for phase, busy in device.items():
        host_end_s += getattr(host[phase], ends["host"]) if phase in host else 0.0
        busy_s = getattr(busy, ends["device"]) + getattr(messages.of(phase), ends["messages"])
        device_end_s = max(host_end_s, device_end_s + busy_s)
        added[phase], before_s = device_end_s - before_s, device_end_s
    return added
