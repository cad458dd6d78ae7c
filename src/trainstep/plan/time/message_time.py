"""What messages between ranks add to a step: each waits for its gradients, and for the message before it; forward, backward and
the update wait for what they need.

A rank's link carries one message at a time. Backward completes gradients evenly from its beginning to its end, those of the last
block first.

    naive, flat                nothing is hidden: all gradients are sent after backward
    overlapped, bucketed,
      sharded, sharded_flat    a bucket, or a unit's gradients, is sent when it is complete
    sharded                    each owner broadcasts what it updated, after its update
    sharded_flat               units are gathered after the update; the next forward waits for each before its blocks
    fsdp                       forward and backward wait for each block's gather, which is sent one block ahead

A message takes what the calibration has for its operation, ranks and bytes, in a graph less what a host's call of it costs; where
it has another operation, by the bytes that a ring sends (costs/collectives.py). What is hidden slows the kernels beside it: NCCL's
own kernels take multiprocessors and memory bandwidth, copy engines bandwidth alone. A message slows them for as long as its bytes
take at the link's best rate; the rest of its time is latency. Kernels that wait for the link anyway lose nothing by it. Buckets and
units are flat: gradients are copied into them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import Phase
from trainstep.costs.collectives import bus_factor
from trainstep.costs.exchange import (
    ROOT,
    Exchange,
    ParameterSize,
    Unit,
    gradients_sent,
    owners_of,
    pack_bytes,
    packs_of,
    units_sent,
)
from trainstep.costs.strategies import MessageKind, Part
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import model_of
from trainstep.plan.peak_memory import exchange_of
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.interval import ENDS, NOTHING, Interval, total_of

_MOST_RANKS = 8
"""The most GPUs of one machine; plan/fleet has messages between machines."""
_FACTORS = {"low_s": 0.88, "time_s": 1.0, "high_s": 1.2}
"""A message's time relative to the calibration's, for each end of the interval."""
_SLOWED = {"low_s": 0.15, "time_s": 0.45, "high_s": 0.75}
"""The kernels beside a hidden message take longer by this share of the time in which its bytes move; fitted to phases of captured
steps (results/h200/captured_ranks.jsonl, results/h100/plan_grids_ranks.jsonl)."""
_CROWDED = 1.25
"""How much longer NCCL's hidden messages take, because their kernels share the device; from the same fit."""
_COPIES = {"low_s": 0.75, "time_s": 0.95, "high_s": 1.5}
"""The time of copies relative to NCCL's, because copies have no calibration of their own (H200s: reduce-scatter 275 GB/s,
all-reduce 331, a copy 392)."""
_COPIED_ALL_REDUCE = 1.42
"""An all-reduce by copies takes this many times what `_COPIES` says: its chunks are averaged between two copies, where ranks meet.
Fitted to one step, bucketed xl between four H200s, 67.4 ms, whose 37 ms of messages at NCCL's rate take 50
(results/h200/copies_four.md)."""
_COPIES_SLOW = 0.3
"""The part of `_SLOWED` that holds for copies, which copy engines make."""
_IN_A_GRAPH = 0.5
"""The fixed time of a message in a graph, as a share of the shortest message's time, because no host calls it: 171 messages beside
backward, and 124 broadcasts (captured steps of results/h100/plan_grids_ranks.jsonl and predicted_ranks.jsonl)."""
_UNIT_S = 65e-6
"""What each gathered unit adds beside that to the pass that waits for it: the median of ten passes of captured fsdp, 0 to 164 us
(results/h200/captured_ranks.jsonl, captured_fsdp.jsonl, captured_fsdp_bf16.jsonl, results/h100/plan_grids_ranks.jsonl,
captured_peers.jsonl); the same by NCCL and by copies, and not explained."""
_AVERAGING = frozenset(
    {MessageKind.GRADIENTS_AT_ONCE, MessageKind.GRADIENTS_IN_BUCKETS, MessageKind.GRADIENTS_OF_UNITS}
)
"""Gradients in flat buffers, which whole tensors are copied into."""
_PASSES = {"all_reduce": 2}
"""How often a ring passes a message around: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """What messages add to each phase, how long all of them take, and their payloads in a step."""

    phases: Mapping[str, Interval] = field(default_factory=dict)
    sent_s: float = 0.0
    messages: Mapping[str, int] = field(default_factory=dict)
    """Messages that a phase's hooks enqueue."""
    payload_bytes: int = 0
    guess: str = ""
    waiting_s: float = 0.0
    """The part of what is added that is the wait for the slowest rank (plan/fleet)."""

    def of(self, phase: str) -> Interval:
        return self.phases.get(phase, NOTHING)

    @property
    def total(self) -> Interval:
        return total_of(self.phases.values())


def updated_share(config: RanksConfig) -> float:
    """The share of the parameters that a rank updates."""
    return 1 / config.ranks if Part.OPTIMIZER_STATE in config.sync.strategy.shards else 1.0


def copied_gradients(config: RanksConfig) -> bool:
    """Whether gradients are copied into flat buffers before they are sent."""
    return config.ranks > 1 and not config.sync.in_place and bool(_AVERAGING & set(config.sync.strategy.sends))


def summing_ranks(config: RanksConfig) -> int:
    """Between how many ranks gradients are averaged by copies, whose sums are kernels of the ranks; 0 where they are not."""
    averages = config.sync.transport == "copies" and _AVERAGING & set(config.sync.strategy.sends)
    return config.ranks if averages else 0


def known_exchange(config: RanksConfig) -> Exchange:
    """The strategy as the formulas of costs/ take it. ValueError for torch's own strategies."""
    exchange = exchange_of(config)
    if exchange is None:
        name, ours = config.sync.name, config.sync.strategy.counterpart
        raise ValueError(f"sync: when {name} of torch sends is not known; take {ours}, ours of its kind")
    return exchange


def exposed_messages(
    config: RanksConfig, calibration: Calibration, device: Mapping[str, Interval], update: Interval | None = None
) -> Exposed:
    """What this strategy's messages add to the device's phases. `update`: the update's kernels, where they are a part of backward.

    ValueError where ranks are of several machines, or the calibration has no messages.
    """
    strategy = config.sync.strategy
    if config.ranks == 1 or not strategy.communicates:
        return Exposed()
    exchange = known_exchange(config)
    if config.ranks > _MOST_RANKS:
        raise ValueError(
            f"ranks: {config.ranks} need several machines; say how many, so that messages between them can be simulated: "
            f"--nodes {-(-config.ranks // _MOST_RANKS)}"
        )
    if config.sync.shard_ranks is not None and config.sync.shard_ranks < config.ranks:
        raise ValueError(
            f"shard_ranks: groups of {config.sync.shard_ranks} have no time where many steps are compared; plan this step by itself"
        )
    if not calibration.collectives:
        raise ValueError(
            f"ranks: {calibration.name} has no messages in its calibration; measure them with trainstep doctor --measure on a "
            "machine with several GPUs"
        )
    link = _Link(calibration, config)
    parameters = transformer_parameters(model_of(config.run), config.run.precision, config.run.ops)
    timeline = _Timeline(exchange, parameters, link, layers=model_of(config.run).layers)
    added = {}
    for end, factor in _FACTORS.items():
        slowed = _SLOWED[end]
        timeline.crowded = _CROWDED
        if config.sync.transport == "copies":
            factor, slowed, timeline.crowded = _COPIES[end], slowed * _COPIES_SLOW, 1.0
        link.counts = end == "time_s"
        timeline.factor, timeline.slowed = factor, slowed
        busy_s = {phase: getattr(busy, end) for phase, busy in device.items()}
        added[end] = timeline.added(busy_s, getattr(update or NOTHING, end))
    phases = {phase: Interval(**{end: added[end][phase] for end in ENDS}) for phase in device}
    guess = "messages by copies from NCCL's" if config.sync.transport == "copies" else link.guess
    return Exposed(
        phases=phases, sent_s=link.sent_s, messages=link.messages, payload_bytes=link.payload_bytes, guess=guess
    )


class _Link:
    """Seconds of messages, and a count of those of the middle prediction by phase."""

    def __init__(self, calibration: Calibration, config: RanksConfig) -> None:
        self._curves = calibration.collectives
        self._ranks = config.ranks
        self._fixed = _IN_A_GRAPH if config.run.capture != "none" else 1.0
        self._factors = {"all_reduce": _COPIED_ALL_REDUCE} if config.sync.transport == "copies" else {}
        self._known: dict[tuple[str, float], float] = {}
        """Operation and bytes -> seconds; most messages are alike."""
        self._best: dict[str, float] = {}
        """Operation -> seconds a byte at its best rate."""
        self.guess = ""
        self.counts, self.phase = False, ""
        self.sent_s, self.messages, self.payload_bytes = 0.0, dict[str, int](), 0

    def seconds(self, operation: str, nbytes: float) -> float:
        time_s = self._known.get((operation, nbytes))
        if time_s is None:
            time_s = self._factors.get(operation, 1.0) * self._seconds(operation, nbytes)
            self._known[operation, nbytes] = time_s
        if self.counts:
            self.sent_s += time_s
            self.messages[self.phase] = self.messages.get(self.phase, 0) + 1
            self.payload_bytes += round(nbytes)
        return time_s

    def moving_s(self, operation: str, nbytes: float) -> float:
        """The seconds that a message's bytes take at the best rate of its operation; the rest of the message's time is latency."""
        best = self._best.get(operation)
        if best is None:
            key = (operation, self._ranks) if (operation, self._ranks) in self._curves else self._known_key(operation)
            best = min(time_s / size for size, time_s in self._curves[key][0].points if size)
            best *= float(bus_factor(operation, self._ranks) / bus_factor(*key))
            self._best[operation] = best
        return best * nbytes

    def _seconds(self, operation: str, nbytes: float) -> float:
        if (operation, self._ranks) in self._curves:
            curve = self._curves[operation, self._ranks][0]
            return curve.seconds(nbytes) - (1 - self._fixed) * min(time_s for _, time_s in curve.points)
        known = self._known_key(operation)
        self.guess = f"{operation} of {self._ranks} ranks as {known[0]} of {known[1]}"
        curve = self._curves[known][0]
        fixed_s = min(time_s for _, time_s in curve.points)
        passes = _PASSES.get(operation, 1) / _PASSES.get(known[0], 1)
        sent = float(bus_factor(operation, self._ranks) / bus_factor(*known))
        return self._fixed * fixed_s * passes + max(0.0, curve.seconds(nbytes) - fixed_s) * sent

    def _known_key(self, operation: str) -> tuple[str, int]:
        """The operation and ranks of the calibration that are nearest."""
        return min(
            self._curves, key=lambda key: (abs(key[1] - self._ranks), key[0] != operation, key[0] != "all_reduce")
        )


class _Timeline:
    """The messages of a step at one end of the interval. `factor`: of their times; `slowed`: of the time in which a hidden
    message's bytes move; `crowded`: of a hidden message's time."""

    def __init__(self, exchange: Exchange, parameters: Sequence[ParameterSize], link: _Link, *, layers: int) -> None:
        self._exchange, self._parameters = exchange, parameters
        self._kinds = exchange.strategy.sends
        self._layers, self.factor, self.slowed, self.crowded = layers, 1.0, 0.0, 1.0
        self._link = link
        self._sent_s = self._moving_s = 0.0

    def _seconds(self, operation: str, nbytes: float) -> float:
        time_s = self.factor * self._link.seconds(operation, nbytes)
        self._sent_s += time_s
        self._moving_s += min(time_s, self.factor * self._link.moving_s(operation, nbytes))
        return time_s

    @cached_property
    def _units(self) -> Sequence[Unit]:
        return units_sent(self._exchange, self._parameters)

    @cached_property
    def _buckets(self) -> Sequence[tuple[int, int]]:
        return gradients_sent(self._exchange, self._parameters)

    @cached_property
    def _broadcasts(self) -> Sequence[int]:
        """Bytes of each message of updated parameters."""
        owners = owners_of(self._exchange, self._parameters)
        return [pack_bytes(pack) for owned in owners for pack in packs_of(self._exchange, owned)]

    def added(self, device: Mapping[str, float], update_s: float) -> dict[str, float]:
        """Seconds that messages add to each phase."""
        added = dict.fromkeys(device, 0.0)
        batches = self._exchange.micro_batches
        forward_s = device[Phase.FORWARD] / batches
        gathers = MessageKind.NEEDED_UNITS in self._kinds
        repeats = batches if gathers and self._exchange.reshard_after_forward else 1
        self._link.phase = Phase.FORWARD
        if gathers or (MessageKind.UPDATED_UNITS in self._kinds and Phase.OPTIMIZER in device):
            added[Phase.FORWARD] = sum(self._beside(self._gathered, forward_s) for _ in range(repeats))
        self._link.phase = Phase.BACKWARD
        if Phase.BACKWARD in device:
            backward_s = (device[Phase.BACKWARD] - update_s) / batches
            # Gradients are sent in the last micro-batch; those before it only gather.
            added[Phase.BACKWARD] = self._reduced(backward_s, update_s)
            added[Phase.BACKWARD] += sum(self._beside(self._gathered, backward_s) for _ in range(repeats - 1))
        self._link.phase = Phase.OPTIMIZER
        if MessageKind.PARAMETERS_OF_OWNERS in self._kinds and Phase.OPTIMIZER in device:
            added[Phase.OPTIMIZER] = sum(self._seconds("broadcast", nbytes) for nbytes in self._broadcasts)
        return added

    def _beside(self, end_of: Callable[[float], float], compute_s: float) -> float:
        """What messages add to kernels of `compute_s` beside them. `end_of`: when both are done, by the kernels' time."""
        self._sent_s = self._moving_s = 0.0
        exposed_s = max(0.0, end_of(compute_s) - compute_s)
        if not self._sent_s:
            return exposed_s
        hidden = max(0.0, 1 - exposed_s / self._sent_s)
        slowed_s = compute_s + self.slowed * hidden * self._moving_s
        counts, factor = self._link.counts, self.factor
        self._link.counts = False  # the same messages once more
        self.factor = factor * (1 + (self.crowded - 1) * hidden)
        added_s = max(0.0, end_of(slowed_s) - compute_s)
        self._link.counts, self.factor = counts, factor
        return added_s

    def _gathered(self, compute_s: float) -> float:
        """The end of a forward that waits for units: each is gathered while the one before computes."""
        units = self._units
        blocks = [
            max(1, len({parameter.unit for parameter in unit.parameters})) if unit.name != ROOT else 0 for unit in units
        ]
        link_s = device_s = 0.0
        for unit, count in zip(units, blocks, strict=True):
            element_bytes = self._exchange.compute_bytes(unit.parameters[0])
            link_s += self._seconds("all_gather", unit.layout.numel * element_bytes)
            device_s = max(device_s, link_s) + compute_s * count / self._layers
        return device_s + (_UNIT_S * len(units) if MessageKind.NEEDED_UNITS in self._kinds else 0.0)

    def _reduced(self, compute_s: float, update_s: float) -> float:
        """What messages of gradients add to backward. With an update by bucket each update waits for its message alone."""
        if MessageKind.GRADIENTS_OF_UNITS in self._kinds:
            return self._beside(self._reduced_units, compute_s)
        if not self._exchange.strategy.overlaps:
            return sum(self._seconds("all_reduce", nbytes) for _, nbytes in self._buckets)
        return self._beside(lambda seconds: self._reduced_buckets(seconds, update_s) - update_s, compute_s)

    def _reduced_buckets(self, compute_s: float, update_s: float) -> float:
        whole = sum(parameter.numel for parameter in self._parameters)
        link_s = done = 0.0
        updated_s = compute_s
        for numel, nbytes in self._buckets:
            done += numel / whole
            link_s = max(link_s, compute_s * done) + self._seconds("all_reduce", nbytes)
            updated_s = max(updated_s, link_s) + update_s * numel / whole
        return updated_s

    def _reduced_units(self, compute_s: float) -> float:
        units = self._units
        whole = sum(parameter.numel for parameter in self._parameters)
        gathers = MessageKind.NEEDED_UNITS in self._kinds and self._exchange.reshard_after_forward
        link_s = device_s = 0.0
        for number, unit in enumerate(reversed(units)):
            parameters = unit.parameters
            if gathers and 0 < number < len(units) - 1:  # the last block and what is around the blocks stay
                link_s += self._seconds("all_gather", unit.layout.numel * self._exchange.compute_bytes(parameters[0]))
                device_s = max(device_s, link_s) + _UNIT_S
            device_s += compute_s * sum(parameter.numel for parameter in parameters) / whole
            if unit.trained:
                message_s = self._seconds(
                    "reduce_scatter", unit.layout.numel * self._exchange.gradient_bytes(parameters[0])
                )
                link_s = max(link_s, device_s) + message_s if not gathers else link_s + message_s
        return max(device_s, link_s)
