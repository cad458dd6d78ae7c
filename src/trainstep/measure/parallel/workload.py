"""The workload `parallel` times a training step on several ranks with a parallel strategy; `trainstep parallel` runs it.

Each rank's process times single steps as `train_step` does, each after a barrier. Between them it times windows: several steps as
one, so that work which a strategy leaves for the next step (a gather behind the next forward) counts. Each call of `take`
times as many steps in windows as singly, rounded down to whole windows, but at least one window.

A record holds what a record of `train_step` holds, from rank 0 except `step`, and in addition:

samples  window_step [s]: for each window, seconds a step. It and `step` are the slowest rank's; all ranks' are in the table `ranks`
facts    those under "Several ranks" in records/facts.py; `tokens` are all ranks', `model_flops` one rank's
tables   what is sent, held and traced (records/tables.py), counted and by formula

The recomputation for a budget is the same on all ranks (measure/step/budget_ranks.py), and so are its facts and tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.config.parallel import ParallelConfig
from trainstep.config.parsing import config_hash, from_plain, to_plain
from trainstep.costs.exchange import ParameterSize
from trainstep.costs.gradient_sync import Message, sent_bytes, totals, wire_bytes
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.files import TemporaryFolder, kept_folder
from trainstep.measure.harness.workload import Findings, Stage, Stages
from trainstep.measure.parallel.meeting import open_ranks, own_device, wait_for_parameters
from trainstep.measure.parallel.memory import StepMemory
from trainstep.measure.parallel.trace import communication_of
from trainstep.measure.step.device_trace import keep_trace, record_steps
from trainstep.measure.step.workload import TrainStepMeasurement, warm_up
from trainstep.parallel.agreement import ReplicasDisagree, check_agreement
from trainstep.parallel.collectives import Collectives, Traffic
from trainstep.parallel.gradient_sync import HookedGradients
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.units import parameter_sizes
from trainstep.plan.peak_memory import expected_messages
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Samples
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel

_TRACED_STEPS = 2
"""Only the first step is read; the second is there because gathers that the first leaves behind end in its forward."""


class ParallelWorkload:
    shares_worker = False  # a strategy's hooks and buffers would stay for the next cell

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "ParallelMeasurement":
        """Connect the ranks, build and warm up. CellFailed if there are too few GPUs."""
        cell = from_plain(ParallelConfig, config)
        device = own_device(cell.ranks, cell.run.device, cell.nodes)
        if cell.keep_trace is not None:
            kept_folder("keep_trace", cell.keep_trace)
        opened, ranks, meeting_facts = open_ranks(cell.ranks, device, Stages(stage))
        built = opened.build(lambda: build_step(cell.run, parallel(ranks, cell.sync), look=parameter_sizes))
        sizes: Sequence[ParameterSize] = built.assembly.seen
        memory = StepMemory(cell, built.assembly, opened.memory, sizes)
        return ParallelMeasurement(
            config=cell,
            timed=warm_up(built),
            memory=memory,
            expected=expected_messages(cell, sizes) or (),
            meeting_facts=meeting_facts,
        )


WORKLOAD = ParallelWorkload()


@dataclass(frozen=True, kw_only=True)
class ParallelMeasurement:
    """One rank's steps. `expected`: a step's messages by formula; `meeting_facts`: the facts of `meet`."""

    config: ParallelConfig
    timed: TrainStepMeasurement
    memory: StepMemory
    expected: tuple[Message, ...]
    meeting_facts: Mapping[str, Fact]
    window_steps_s: list[float] = field(default_factory=list)

    def take(self, steps: int) -> None:
        """Time this many single steps, and about as many in windows of `window_steps`, spread evenly between them."""
        windows = max(steps // self.config.window_steps, 1)
        for window in range(windows):
            self.timed.take(steps * (window + 1) // windows - steps * window // windows)
            self.window_steps_s.append(self.timed.time_window(self.config.window_steps))

    def settle(self) -> None:
        self.timed.settle()

    def finish(self) -> Findings:
        """Return the times and inspect the step: agreement of replicas, messages, memory, a trace.

        Each inspection runs steps on all ranks, so every rank makes them in this order.
        """
        timed = self.timed.finish(inspects=self.config.inspect)
        facts, tables = {**timed.facts, **self.meeting_facts}, dict(timed.tables)
        inspections = {"agreement": self._agreement}
        if self.config.inspect:
            inspections |= {"traffic": self._traffic, "memory": self._memory, "trace": self._trace}
        for stage, inspect in inspections.items():
            with self.timed.built.names_out_of_memory():
                self.timed.built.opened.stages.enter(stage)
                more_facts, more_tables = inspect()
            facts, tables = facts | more_facts, tables | more_tables
        return Findings(samples={**timed.samples, **self._windows()}, facts=facts, tables=tables)

    def finish_uninspected(self) -> Findings:
        """Return the times of steps and windows alone."""
        return Findings(samples={**self.timed.samples(), **self._windows()}, facts=self.meeting_facts)

    @property
    def _ranks(self) -> Ranks:
        return self.timed.assembly.ranks

    def _windows(self) -> dict[str, Samples]:
        return {"window_step": Samples(unit="s", values=tuple(self.window_steps_s))}

    def _agreement(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """Check that the replicas agree. CellFailed, naming parameter and ranks, if they have drifted apart."""
        config, strategy = self.config, self.config.sync.strategy
        if not config.check_agreement or not strategy.communicates or config.ranks == 1:
            return {}, {}  # replicas that never communicate differ by design
        self._wait_for_parameters()
        kinds = ["buffers"] if strategy.shards_parameters else ["parameters", "buffers"]
        try:
            check_agreement(self.timed.assembly.module, self._ranks, what=kinds)
        except ReplicasDisagree as error:
            raise CellFailed(Failure(kind="divergence", phase="agreement", message=str(error))) from None
        if strategy.shards_parameters and (replicas := _same_shards(self.timed.assembly)) is not None:
            self._check_shards(replicas)
            kinds = ["shards", *kinds]
        return facts_of(agreement=" and ".join(kinds)), {}

    def _check_shards(self, replicas: Ranks) -> None:
        """Check that the ranks with the same shard agree. CellFailed on all ranks if some have drifted apart."""
        disagreement = ""
        try:
            check_agreement(self.timed.assembly.module, replicas, what="parameters")
        except ReplicasDisagree as error:
            disagreement = f"of rank {self._ranks.rank}'s shard, where a rank stands for its group: {error}"
        if any(of_ranks := Collectives(self._ranks).gather_texts(disagreement)):
            message = next(filter(None, of_ranks))
            raise CellFailed(Failure(kind="divergence", phase="agreement", message=message))

    def _traffic(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """Messages and bytes of one step by operation, counted and by formula. Empty if torch sends them, uncounted."""
        counters = _counters(self.timed.assembly)
        if counters is None:
            return {}, {}
        self.timed.assembly.complete()
        for counter in counters:
            counter.clear()
        self.timed.eager_settle()
        counted: dict[str, list[int]] = {}
        for counter in counters:
            for operation, count in counter.messages.items():
                total = counted.setdefault(operation, [0, 0])
                total[0] += count
                total[1] += counter.payload_bytes[operation]
        formula = totals(self.expected)
        operations = list(dict.fromkeys([*counted, *formula]))
        counts = [counted.get(operation, [0, 0]) for operation in operations]
        expected = [formula.get(operation) for operation in operations]
        columns = {
            "operation": operations,
            "messages": [messages for messages, _ in counts],
            "bytes": [payload_bytes for _, payload_bytes in counts],
            "expected_messages": [total.messages if total else 0 for total in expected],
            "expected_bytes": [total.payload_bytes if total else 0 for total in expected],
        }
        groups = self.config.ranks, self.config.sync.shard_ranks
        sizes = {
            "wire_bytes": sum(sent_bytes(operation, size, *groups) for operation, (_, size) in counted.items()),
            "expected_wire_bytes": wire_bytes(self.expected, *groups),
        }
        return facts_of(**sizes), {"traffic": columns}

    def _memory(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """What every rank holds at four points, and this rank's peak by formula."""
        tables = {"memory_points": self.memory.table(self.timed.batches)}
        peak = self.memory.expected_peak()
        if peak is None:
            return {}, tables
        peak_bytes, point = peak
        return facts_of(expected_peak_bytes=peak_bytes, expected_peak_point=point), tables

    def _trace(self) -> tuple[dict[str, Fact], dict[str, Any]]:
        """Profile two steps: what was sent in the first, when, and how much of it was hidden."""
        if self.config.ranks == 1 or self.config.run.capture != "none":  # a graph's messages have no names in a trace
            return {}, {}
        with TemporaryFolder() as folder:
            path = folder / "trace.json"
            self._record(1, path)  # the profiler's first start is slow
            self._record(_TRACED_STEPS, path)
            facts, tables = communication_of(
                path,
                self.expected,
                Collectives(self._ranks),
                self.config.sync.shard_ranks,
                one_clock=self.config.nodes == 1,
            )
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


def _same_shards(assembly: Assembly) -> Ranks | None:
    """The ranks that hold the same shards as this rank, one in each group; None where all ranks are one group."""
    sync = assembly.step.gradient_sync
    replicas = sync.groups.replicas if isinstance(sync, HookedGradients) else None
    return None if replicas is None else replicas.ranks


def _counters(assembly: Assembly) -> list[Traffic] | None:
    """The counters of this step's messages: none without gradient sync, None if torch sends them."""
    sync, optimizer = assembly.step.gradient_sync, assembly.step.optimizer
    if sync is None:
        return []
    traffic = sync.traffic
    if traffic is None:
        return None
    # A sharded optimizer counts its messages itself, in the same counter or in its own.
    optimizer_traffic = getattr(optimizer, "traffic", None)
    if isinstance(optimizer_traffic, Traffic) and optimizer_traffic is not traffic:
        return [traffic, optimizer_traffic]
    return [traffic]
