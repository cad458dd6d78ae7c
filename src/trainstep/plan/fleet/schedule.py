"""The tasks of a rank's step: what it computes, which message waits for what, and on which stream, strategy by strategy.

    schedule = Schedule(exchange, parameters, seconds, layers=32)
    added = schedule.added(forward_s=..., backward_s=..., optimizer_s=..., update_s=0.0, slowed=0.2)

`seconds(operation, level, nbytes)` is a message's time, and `link(level)` what it travels on. The order is that of parallel/:

    fsdp                     a block is gathered when the block `ahead` before it begins, so that ahead + 1 are whole at a time; its
                             gradients are reduced after its backward, and no more than `most_in_flight` units at a time
    sharded_flat             units are reduced in backward; the next forward gathers all of them and waits for each
    bucketed, overlapped     a bucket, or a gradient, is sent when it is complete
    naive, flat              all is sent after backward
    sharded                  each owner broadcasts what it updated, after the update

With groups of ranks a message is a chain (costs/rank_groups.py): reduced in groups, averaged across groups, of bucketed gathered in
groups. Each stage has a stream of its own, as on a GPU. Computation is divided among blocks evenly; the head has its share by
parameters, between the last block's forward and backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from trainstep.config.run import Phase
from trainstep.costs.exchange import (
    ROOT,
    Exchange,
    ParameterSize,
    Unit,
    freed_between,
    gradients_sent,
    owners_of,
    pack_bytes,
    packs_of,
    units_sent,
)
from trainstep.costs.rank_groups import Level, at_level
from trainstep.costs.strategies import MessageKind
from trainstep.plan.fleet.streams import Ran, Task, simulate

COMPUTE, GATHER, REDUCE, ACROSS = "compute", "gather", "reduce", "across"


@dataclass(kw_only=True)
class Sent:
    """The messages of a step: number, payload and seconds of each operation at its level, and number by the phase that sends."""

    counts: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    by_phase: dict[str, int] = field(default_factory=dict)

    def add(self, operation: str, phase: str, nbytes: float, time_s: float) -> None:
        self.counts[operation] = self.counts.get(operation, 0) + 1
        self.payload_bytes[operation] = self.payload_bytes.get(operation, 0.0) + nbytes
        self.seconds[operation] = self.seconds.get(operation, 0.0) + time_s
        self.by_phase[phase] = self.by_phase.get(phase, 0) + 1


class Schedule:
    """A strategy's step as tasks. `reduces_each`: whether gradients are sent in each micro-batch, not only in the last."""

    def __init__(
        self,
        exchange: Exchange,
        parameters: Sequence[ParameterSize],
        seconds: Callable[[str, Level, float], float],
        link: Callable[[Level], str],
        *,
        layers: int,
        reduces_each: bool = False,
    ) -> None:
        self._exchange, self._parameters = exchange, parameters
        self._kinds = exchange.strategy.sends
        self._seconds, self._link = seconds, link
        self._layers, self._reduces_each = layers, reduces_each
        self._tasks: list[Task] = []
        self._phases: list[str] = []
        self._phase = ""
        self.sent = Sent()

    def added(self, device: Mapping[str, float], *, update_s: float = 0.0, slowed: float = 0.0) -> dict[str, float]:
        """Seconds that messages add to each phase of `device`, which has what each computes. `update_s`: the part of backward
        that updates parameters."""
        self._tasks, self._phases, self.sent = [], [], Sent()
        batches = self._exchange.micro_batches
        backward_s = max(0.0, device.get(Phase.BACKWARD, 0.0) - update_s) / batches
        gathered: dict[str, int] = {}
        sends_units = MessageKind.NEEDED_UNITS in self._kinds or (
            MessageKind.UPDATED_UNITS in self._kinds and Phase.OPTIMIZER in device
        )
        for batch in range(batches):
            self._phase = Phase.FORWARD
            gathers = sends_units and (batch == 0 or self._frees)
            last = self._forward(device[Phase.FORWARD] / batches, gathered, gathers=gathers)
            if Phase.BACKWARD in device:
                self._phase = Phase.BACKWARD
                self._backward(backward_s, last, update_s, reduces=self._reduces_each or batch == batches - 1)
        if Phase.OPTIMIZER in device:
            self._phase = Phase.OPTIMIZER
            self._update(device[Phase.OPTIMIZER])
        return self._exposed(device, simulate(self._tasks, slowed=slowed))

    def _exposed(self, device: Mapping[str, float], ran: Sequence[Ran]) -> dict[str, float]:
        """How much longer each phase takes than it computes; a phase of several micro-batches has the sum of its parts."""
        added = {phase: -time_s for phase, time_s in device.items()}
        before_s = 0.0
        for phase, tasks in groupby(zip(self._phases, ran, strict=True), key=lambda pair: pair[0]):
            end_s = max(before_s, *(task.end_s for _, task in tasks))
            added[phase] += end_s - before_s
            before_s = end_s
        if Phase.BACKWARD in added and added[Phase.FORWARD] < 0:  # reductions went on while the next forward computed
            added[Phase.BACKWARD] += added[Phase.FORWARD]
            added[Phase.FORWARD] = 0.0
        return {phase: max(0.0, time_s) for phase, time_s in added.items()}

    # Tasks

    def _compute(self, work_s: float, after: Sequence[int] = ()) -> int:
        return self._task(Task(stream=COMPUTE, work_s=work_s, after=tuple(after)))

    def _message(self, stream: str, operation: str, level: Level, nbytes: float, after: Sequence[int] = ()) -> int:
        time_s = self._seconds(operation, level, nbytes)
        self.sent.add(at_level(operation, level), self._phase, nbytes, time_s)
        return self._task(Task(stream=stream, work_s=time_s, link=self._link(level), after=tuple(after)))

    def _task(self, task: Task) -> int:
        self._tasks.append(task)
        self._phases.append(self._phase)
        return len(self._tasks) - 1

    def _in_group(self) -> Level:
        return Level.IN_GROUPS if self._exchange.has_groups else Level.ALL

    def _gather(self, unit: Unit, after: Sequence[int]) -> int:
        nbytes = unit.layout.numel * self._exchange.compute_bytes(unit.parameters[0])
        return self._message(GATHER, "all_gather", self._in_group(), nbytes, after)

    def _averaged(self, nbytes: float, after: Sequence[int], *, whole: bool) -> int:
        """Gradients' messages until the rank has its average: its shard, or the whole."""
        if not self._exchange.has_groups:
            return self._message(REDUCE, "all_reduce" if whole else "reduce_scatter", Level.ALL, nbytes, after)
        part = nbytes / self._exchange.shards
        done = self._message(REDUCE, "reduce_scatter", Level.IN_GROUPS, nbytes, after)
        done = self._message(ACROSS, "all_reduce", Level.ACROSS_GROUPS, part, [done])
        return self._message(GATHER, "all_gather", Level.IN_GROUPS, nbytes, [done]) if whole else done

    # Phases

    @property
    def _frees(self) -> bool:
        return MessageKind.NEEDED_UNITS in self._kinds and self._exchange.reshard_after_forward

    def _units(self) -> list[Unit]:
        in_units = {MessageKind.NEEDED_UNITS, MessageKind.UPDATED_UNITS, MessageKind.GRADIENTS_OF_UNITS}
        return units_sent(self._exchange, self._parameters) if in_units & set(self._kinds) else []

    def _head_share(self) -> float:
        """The head's share of a pass, by parameters: half of those outside the blocks, over all but the other half."""
        outside = sum(parameter.numel for parameter in self._parameters if parameter.unit == ROOT) / 2
        return outside / (sum(parameter.numel for parameter in self._parameters) - outside)

    def _forward(self, compute_s: float, gathered: dict[str, int], *, gathers: bool) -> int:
        """The last task of forward. `gathered`: units that stay whole, which only the first micro-batch gathers."""
        if not gathers:
            return self._compute(compute_s)
        units = self._units()
        needed = MessageKind.NEEDED_UNITS in self._kinds
        blocks_s = compute_s * (1 - self._head_share())
        done: list[int] = []
        waits: list[int] = []
        for unit in units:
            if unit.name not in gathered:
                behind = len(done) - 1 - self._exchange.ahead
                message = self._gather(unit, [done[behind]] if needed and behind >= 0 else ())
                waits.append(message)
                if not (needed and freed_between(unit, units, self._exchange)):
                    gathered[unit.name] = message
            if unit.name != ROOT:
                done.append(self._compute(blocks_s * _blocks(unit) / self._layers, waits[-1:]))
            elif waits:
                self._compute(0.0, waits[-1:])
        return self._compute(compute_s - blocks_s)

    def _backward(self, compute_s: float, before: int, update_s: float, *, reduces: bool) -> None:
        if MessageKind.GRADIENTS_OF_UNITS in self._kinds:
            self._backward_in_units(compute_s, before, reduces=reduces)
            return
        if not reduces or not self._exchange.strategy.communicates:
            self._compute(compute_s + (update_s if reduces else 0.0))
            return
        whole = sum(parameter.numel for parameter in self._parameters)
        overlaps = self._exchange.strategy.overlaps
        complete = -1 if overlaps else self._compute(compute_s)
        sent: list[tuple[int, int]] = []
        for numel, nbytes in gradients_sent(self._exchange, self._parameters):
            complete = self._compute(compute_s * numel / whole) if overlaps else complete
            sent.append((self._averaged(nbytes, [complete], whole=True), numel))
        if update_s:  # each bucket's, as soon as it is averaged
            for message, numel in sent:
                self._compute(update_s * numel / whole, [message])

    def _backward_in_units(self, compute_s: float, before: int, *, reduces: bool) -> None:
        units = self._units()
        blocks_s = compute_s * (1 - self._head_share())
        done = [self._compute(compute_s - blocks_s)]
        reductions: list[int] = []
        most = self._exchange.strategy.most_in_flight
        for unit in reversed(units):
            waits: list[int] = []
            if self._frees and freed_between(unit, units, self._exchange):
                behind = len(done) - 1 - self._exchange.ahead
                waits.append(self._gather(unit, [done[behind] if behind >= 0 else before]))
            if len(reductions) > most:
                waits.append(reductions[-1 - most])
            share = 0.0 if unit.name == ROOT else _blocks(unit) / self._layers
            done.append(self._compute(blocks_s * share, waits))
            if reduces and unit.trained:
                nbytes = unit.layout.numel * self._exchange.gradient_bytes(unit.parameters[0])
                reductions.append(self._averaged(nbytes, [done[-1]], whole=False))

    def _update(self, update_s: float) -> None:
        self._compute(update_s, _ends(self._tasks))
        if MessageKind.PARAMETERS_OF_OWNERS in self._kinds:
            updated = len(self._tasks) - 1
            for owned in owners_of(self._exchange, self._parameters):
                for pack in packs_of(self._exchange, owned):
                    self._message(GATHER, "broadcast", Level.ALL, pack_bytes(pack), [updated])


def _blocks(unit: Unit) -> int:
    return max(1, len({parameter.unit for parameter in unit.parameters}))


def _ends(tasks: Sequence[Task]) -> list[int]:
    """The last task of each stream."""
    return list({task.stream: number for number, task in enumerate(tasks)}.values())
