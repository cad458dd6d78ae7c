"""The workload `parallel`: a training step on several ranks, kept together by a parallel strategy. `trainstep parallel` runs it.

Each rank's process times its own steps as `train_step` does, every step after a barrier; between them come windows, steps timed
as one, where what a strategy leaves for the next step (a gather behind the next forward) counts. A turn has as many windows as
fill as many steps as it takes singly, at least one.

A record of it holds what one of `train_step` holds, rank 0's but for `step`, and besides

samples  window_step [s]: of each window, seconds a step. It and `step` are the slowest rank's; all ranks' are in the table `ranks`
facts    those under "Several ranks" in records/facts.py; `tokens` are all ranks', `model_flops` one rank's
tables   what is sent, held and traced (records/tables.py), counted and by formula
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.config.parallel import ParallelConfig
from trainstep.config.parsing import config_hash, from_plain, to_plain
from trainstep.costs.collectives import ring_bytes
from trainstep.costs.exchange import ParameterSize
from trainstep.costs.gradient_sync import Message, totals, wire_bytes
from trainstep.measure.failures import CellFailed
from trainstep.measure.kept_files import kept_folder
from trainstep.measure.meeting import open_ranks, own_device, wait_for_parameters
from trainstep.measure.parallel_memory import StepMemory
from trainstep.measure.parallel_trace import communication_of
from trainstep.measure.step_trace import keep_trace, record_steps
from trainstep.measure.temporary_folder import TemporaryFolder
from trainstep.measure.train_step import TrainStepMeasurement, warm_up
from trainstep.measure.workload import Findings, Stage, Stages
from trainstep.parallel.agreement import ReplicasDisagree, check_agreement
from trainstep.parallel.collectives import Collectives, Traffic
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.units import parameter_sizes
from trainstep.plan.communication import expected_messages
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Samples
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel

_TRACED_STEPS = 2
"""The first is read: what it leaves for the second's forward ends there."""


class ParallelWorkload:
    """Each cell in fresh processes: a strategy's hooks and buffers would stay for the next."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "ParallelMeasurement":
        """Meet the others, build and warm up. CellFailed where GPUs are missing."""
        return prepare_parallel(from_plain(ParallelConfig, config), stage)


WORKLOAD = ParallelWorkload()


def prepare_parallel(config: ParallelConfig, stage: Stage) -> "ParallelMeasurement":
    """Everything before the first timed step. The ranks' first message makes their connections."""
    device = own_device(config.ranks, config.run.device)
    if config.keep_trace is not None:
        kept_folder("keep_trace", config.keep_trace)
    opened, ranks, met = open_ranks(config.ranks, device, Stages(stage))
    built = opened.build(lambda: build_step(config.run, parallel(ranks, config.sync), look=parameter_sizes))
    sizes: Sequence[ParameterSize] = built.assembly.seen
    memory = StepMemory(config, built.assembly, opened.memory, sizes)
    return ParallelMeasurement(
        config=config,
        timed=warm_up(built),
        memory=memory,
        expected=expected_messages(config, sizes) or (),
        met=met,
    )


@dataclass(frozen=True, kw_only=True)
class ParallelMeasurement:
    """One rank's side. `expected`: a step's messages by formula; `met`: what ranks found when they met."""

    config: ParallelConfig
    timed: TrainStepMeasurement
    memory: StepMemory
    expected: tuple[Message, ...]
    met: Mapping[str, Fact]
    window_steps_s: list[float] = field(default_factory=list)

    def take(self, steps: int) -> None:
        """So many steps, each from a barrier, and about as many in windows of `window_steps`, each behind its share of them."""
        windows = max(steps // self.config.window_steps, 1)
        for window in range(windows):
            self.timed.take(steps * (window + 1) // windows - steps * window // windows)
            self.window_steps_s.append(self.timed.time_window(self.config.window_steps))

    def settle(self) -> None:
        self.timed.settle()

    def finish(self) -> Findings:
        """What is looked at once. Every rank does the same in the same order: each of these steps is everybody's."""
        found = self.timed.finish()
        facts, tables = {**found.facts, **self.met}, dict(found.tables)
        looks = {"agreement": self._agreement, "traffic": self._traffic, "memory": self._points, "trace": self._trace}
        for stage, look in looks.items():
            with self.timed.built.names_out_of_memory():
                self.timed.built.opened.stages.enter(stage)
                more, its_tables = look()
            facts, tables = facts | more, tables | its_tables
        return Findings(samples={**found.samples, **self._windows()}, facts=facts, tables=tables)

    def finish_unseen(self) -> Findings:
        """Steps and windows alone."""
        return Findings(samples={**self.timed.samples(), **self._windows()}, facts=self.met)

    @property
    def _ranks(self) -> Ranks:
        return self.timed.assembly.ranks

    def _windows(self) -> dict[str, Samples]:
        return {"window_step": Samples(unit="s", values=tuple(self.window_steps_s))}

    def _agreement(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """CellFailed, naming parameter and ranks, where replicas have drifted apart; the yardstick's differ by design."""
        config, strategy = self.config, self.config.sync.strategy
        if not config.check_agreement or not strategy.communicates or config.ranks == 1:
            return {}, {}
        self._wait_for_parameters()
        what = ["buffers"] if strategy.shards_parameters else ["parameters", "buffers"]
        try:
            check_agreement(self.timed.assembly.module, self._ranks, what=what)
        except ReplicasDisagree as error:
            raise CellFailed(Failure(kind="divergence", phase="agreement", message=str(error))) from None
        return facts_of(agreement=" and ".join(what)), {}

    def _traffic(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """Messages and bytes of one step by operation, as counted, beside the formula's. None where torch sends: nobody counts."""
        counters = _counters(self.timed.assembly)
        if counters is None:
            return {}, {}
        self.timed.assembly.complete()
        for counter in counters:
            counter.clear()
        self.timed.eager_settle()
        messages: dict[str, list[int]] = {}
        for counter in counters:
            for operation, count in counter.messages.items():
                total = messages.setdefault(operation, [0, 0])
                total[0] += count
                total[1] += counter.payload_bytes[operation]
        formula = totals(self.expected)
        operations = list(dict.fromkeys([*messages, *formula]))
        sent = sum(ring_bytes(one, payload_bytes, self.config.ranks) for one, (_, payload_bytes) in messages.items())
        sizes = {"wire_bytes": sent, "expected_wire_bytes": wire_bytes(self.expected, self.config.ranks)}
        columns = {
            "operation": operations,
            "messages": [messages.get(one, [0, 0])[0] for one in operations],
            "bytes": [messages.get(one, [0, 0])[1] for one in operations],
            "expected_messages": [formula[one].messages if one in formula else 0 for one in operations],
            "expected_bytes": [formula[one].payload_bytes if one in formula else 0 for one in operations],
        }
        return facts_of(**sizes), {"traffic": columns}

    def _points(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """What this rank holds at four points, and its peak by formula."""
        tables = {"memory_points": self.memory.table(self.timed.batches)}
        peak = self.memory.expected_peak()
        if peak is None:
            return {}, tables
        peak_bytes, point = peak
        return facts_of(expected_peak_bytes=peak_bytes, expected_peak_point=point), tables

    def _trace(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """Two steps under the profiler: what was sent in the first, when, and how much of it was hidden."""
        if self.config.ranks == 1 or self.config.run.capture != "none":  # a graph's messages have no names in a trace
            return {}, {}
        with TemporaryFolder() as folder:
            path = folder / "trace.json"
            self._record(1, path)  # the profiler's first start is slow
            self._record(_TRACED_STEPS, path)
            facts, tables = communication_of(path, self.expected, Collectives(self._ranks))
            if self.config.keep_trace is not None:
                self._record(1, path)
                facts |= facts_of(trace_file=str(keep_trace(path, self.config.keep_trace, self._trace_name())))
        return facts, tables

    def _record(self, steps: int, path: Path) -> None:
        self.timed.settle()
        Collectives(self._ranks).barrier()
        record_steps(
            self.timed.settle, steps, path, on_gpu=self.config.run.device == "cuda", drain=self._wait_for_parameters
        )

    def _wait_for_parameters(self) -> None:
        wait_for_parameters(self.timed.assembly)

    def _trace_name(self) -> str:
        run, sync = self.config.run, self.config.sync
        cell = config_hash("parallel", to_plain(self.config))[:6]
        return f"{run.model.name.replace(':', '.')}-{run.context}-{sync.name}-{cell}-rank{self._ranks.rank}"


def _counters(assembly: Assembly) -> list[Traffic] | None:
    """Whoever counts this step's messages; nobody for sync none, None where torch sends them."""
    sync, optimizer = assembly.step.gradient_sync, assembly.step.optimizer
    if sync is None:
        return []
    traffic = sync.traffic
    if traffic is None:
        return None
    own = getattr(optimizer, "traffic", None)
    return [traffic, own] if isinstance(own, Traffic) and own is not traffic else [traffic]
