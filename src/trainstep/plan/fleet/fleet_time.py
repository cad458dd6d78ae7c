"""The time of a step on many nodes: one rank's kernels, messages simulated on its streams, and the wait for the slowest rank.

    fleet = fleet_time(config, topology, calibration)
    fleet.time.step.time_s, fleet.time.tokens_per_s, fleet.efficiency      # against one node of the same GPUs

All ranks do the same, so one rank's streams stand for all (schedule.py, streams.py); a message takes what its level's links allow
(collective_time.py), and everyone waits for the slowest of all ranks (stragglers.py). The compute, the host and the interval are
those of plan/time. Messages between nodes were never measured here, so their interval is wider.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trainstep.config.machine import MachineSpec
from trainstep.config.parallel import RanksConfig
from trainstep.config.plan import GPUS_PER_NODE, PlanConfig
from trainstep.config.run import Phase
from trainstep.costs.rank_groups import Level
from trainstep.plan.fleet.collective_time import collective_s
from trainstep.plan.fleet.schedule import Schedule, Sent
from trainstep.plan.fleet.stragglers import waiting_share
from trainstep.plan.fleet.topology import Topology, topology_of
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.model_ops import model_of
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.interval import ENDS, NOTHING, Interval
from trainstep.plan.time.message_time import Exposed, known_exchange
from trainstep.plan.time.step_kernels import step_kernels
from trainstep.plan.time.step_time import KernelsOf, StepTime, step_time

NODE, NETWORK = "NVLink", "network"
_FACTORS = {
    "low_s": {NODE: 0.88, NETWORK: 0.8},
    "time_s": {NODE: 1.0, NETWORK: 1.0},
    "high_s": {NODE: 1.2, NETWORK: 1.6},
}
"""For each end of the interval, a message's time relative to the formula's. NVLink: as in plan/time/message_time.py."""
_SLOWED = {"low_s": 0.05, "time_s": 0.2, "high_s": 0.4}
"""The share of its speed that computation loses beside a message. Two GPUs of one node lose more (message_time.py's _SLOWED). With
0.45 here too the published tables are predicted worse. Rows of 8 and of more GPUs need the same constant to be in order."""
_WAITS = {"low_s": 0.5, "time_s": 1.0, "high_s": 2.0}
"""The wait for the slowest rank, relative to the formula's: a spread is known only to within a factor of two."""


@dataclass(frozen=True, kw_only=True)
class FleetTime:
    """A step of all ranks. `one_node`: the same step, with as many sequences for each rank, on one node; None if this is it."""

    topology: Topology
    time: StepTime
    sent: Sent
    one_node: StepTime | None = None
    in_groups: StepTime | None = None
    """The same step with `shard_ranks` set to a node's ranks; None where it has groups already, cannot have them or needs none."""

    @property
    def efficiency(self) -> float:
        """Tokens per second of a GPU, divided by those of a GPU on one node."""
        return 1.0 if self.one_node is None else self.one_node.step.time_s / self.time.step.time_s


def fleet_time(
    config: RanksConfig,
    topology: Topology,
    calibration: Calibration,
    *,
    reduces_each: bool = False,
    kernels_of: KernelsOf = step_kernels,
) -> FleetTime:
    """The time of this step on this topology, which has as many ranks as the step.

    `reduces_each`: gradients are sent in each micro-batch, as FSDP without no_sync does. `kernels_of`: as of step_time. ValueError
    for what has no formulas.
    """
    messages = _Messages(topology, reduces_each=reduces_each)
    time = step_time(config, calibration, messages_of=messages, kernels_of=kernels_of)
    one_node = None
    if topology.nodes > 1:
        alone = replace(topology, nodes=1)
        one_node = step_time(
            _on_one_node(config, topology),
            calibration,
            messages_of=_Messages(alone, reduces_each=reduces_each),
            kernels_of=kernels_of,
        )
    return FleetTime(topology=topology, time=time, sent=messages.sent, one_node=one_node)


def planned_fleet(
    config: PlanConfig, calibration: Calibration, spec: MachineSpec | None, *, has_nodes: bool
) -> tuple[StepTime, FleetTime | None]:
    """The time of a planned step, as a fleet's where it has nodes (`has_nodes`) or groups of ranks. ValueError as step_time's.

    `spec`: the GPU's data sheet, where that is not the calibration's.
    """
    sync = config.sync
    has_groups = sync.strategy.communicates and sync.shard_ranks is not None and sync.shard_ranks < config.ranks
    if not has_nodes and (not has_groups or config.ranks > GPUS_PER_NODE):
        return step_time(config, calibration), None
    topology = topology_of(config.fleet, ranks=config.ranks, calibration=calibration, spec=spec)
    fleet = fleet_time(config, topology, calibration)
    grouped = _in_groups(config, topology)
    if grouped is not None:
        messages = _Messages(topology, reduces_each=False)
        fleet = replace(fleet, in_groups=step_time(grouped, calibration, messages_of=messages))
    return fleet.time, fleet


def _in_groups(config: PlanConfig, topology: Topology) -> RanksConfig | None:
    """The step with a group on each node; None if it has groups, cannot have any, or needs none: one node, or one GPU a node."""
    sync, of_node = config.sync, topology.gpus_per_node
    able = sync.strategy.communicates and "shard_ranks" in sync.strategy.options and not sync.in_place
    if topology.nodes == 1 or of_node == 1 or sync.shard_ranks is not None or not able:
        return None
    return RanksConfig(ranks=config.ranks, sync=replace(sync, shard_ranks=of_node), run=config.run)


def _on_one_node(config: RanksConfig, topology: Topology) -> RanksConfig:
    """The same step of one node's ranks; groups that are larger than a node become the node."""
    ranks, sync = topology.gpus_per_node, config.sync
    if sync.shard_ranks is not None and sync.shard_ranks > ranks:
        sync = replace(sync, shard_ranks=None)
    return RanksConfig(ranks=ranks, sync=sync, run=config.run)


class _Messages:
    """What messages add to a step's phases, for step_time. `sent`: those of the middle prediction."""

    def __init__(self, topology: Topology, *, reduces_each: bool) -> None:
        self._topology, self._reduces_each = topology, reduces_each
        self.sent = Sent()

    def __call__(
        self,
        config: RanksConfig,
        calibration: Calibration,
        device: Mapping[str, Interval],
        update: Interval | None = None,
    ) -> Exposed:
        if config.ranks == 1 or not config.sync.strategy.communicates:
            return Exposed()
        if config.sync.transport == "copies" and self._topology.nodes > 1:
            raise ValueError("transport: copies work only between ranks of one node; take library")
        exchange = known_exchange(config)
        parameters = transformer_parameters(model_of(config.run), config.run.precision, config.run.ops)
        added = {}
        for end in ENDS:
            schedule = Schedule(
                exchange,
                parameters,
                self._seconds(config, end),
                self._link(config),
                layers=model_of(config.run).layers,
                reduces_each=self._reduces_each,
            )
            busy_s = {phase: getattr(busy, end) for phase, busy in device.items()}
            update_s = getattr(update or NOTHING, end)
            added[end] = schedule.added(busy_s, update_s=update_s, slowed=_SLOWED[end])
            if end == "time_s":
                self.sent = schedule.sent
        return self._with_waiting(config, device, added)

    def _seconds(self, config: RanksConfig, end: str) -> Callable[[str, Level, float], float]:
        def seconds(operation: str, level: Level, nbytes: float) -> float:
            group = self._topology.group(level, config.sync.shard_ranks)
            factor = _FACTORS[end][NETWORK if group.nodes > 1 else NODE]
            return factor * collective_s(self._topology, operation, nbytes, group)

        return seconds

    def _link(self, config: RanksConfig) -> Callable[[Level], str]:
        def link(level: Level) -> str:
            return NETWORK if self._topology.group(level, config.sync.shard_ranks).nodes > 1 else NODE

        return link

    def _with_waiting(
        self, config: RanksConfig, device: Mapping[str, Interval], added: Mapping[str, Mapping[str, float]]
    ) -> Exposed:
        """What messages and the wait for the slowest rank add; ranks meet in backward, where gradients are averaged."""
        share = waiting_share(config.ranks, self._topology.spread)
        waiting = {end: _WAITS[end] * share * sum(busy.time_s for busy in device.values()) for end in ENDS}
        meeting = Phase.BACKWARD if Phase.BACKWARD in device else Phase.FORWARD
        phases = {
            phase: Interval(**{end: added[end][phase] + (waiting[end] if phase == meeting else 0.0) for end in ENDS})
            for phase in device
        }
        return Exposed(
            phases=phases,
            sent_s=sum(self.sent.seconds.values()),
            messages=self.sent.by_phase,
            payload_bytes=round(sum(self.sent.payload_bytes.values())),
            guess="messages between nodes" if self._topology.nodes > 1 else "",
            waiting_s=waiting["time_s"],
        )
