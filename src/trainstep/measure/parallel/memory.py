"""Counts what a rank holds at four points of a step, by category, beside what it should hold by formula.

    parameters       storages that parameters had when the step was built: a rank's shards, where it has shards
    gradients        of parameters, or of this rank's pieces of them; whole gradients that fsdp keeps of micro-batches; buckets that
                     these are views of, also while they are empty
    optimizer state  tensors of the optimizer's state
    communication    every other tensor that the parallel strategy keeps: buffers, gathered parameters
    activations      what forward saved for backward and is in none of these, as autograd saves it
    unnamed          on a GPU: what the allocator gave out beyond all this. Batches, the loss, libraries' workspaces, temporaries;
                     with torch's own strategies their buffers, which cannot be seen from here; what recomputed blocks keep

A storage may be in several categories and counts once, in the first. A CPU's allocator keeps no count, so nothing is unnamed there.
The table has a row for each rank, point and line, with `expected_bytes` by plan/peak_memory.py (none for torch's strategies). The
lines `allocated` and `reserved` are the allocator's own figures; `driver` is what the driver sees of the process.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch import device as Device
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import Phase
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.step.memory_watch import MemoryWatch
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.sharded_optimizer import ShardedOptimizer
from trainstep.plan.peak_memory import expected_memory
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly

Storages = Mapping[int, int]
"""Address -> bytes."""

CATEGORIES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_POINT_AFTER = {Phase.FORWARD: "after forward", Phase.BACKWARD: "after backward", Phase.GRAD_SYNC: "after backward"}
"""Later figures replace earlier ones: those of the last micro-batch stay, and those of grad_sync if there is such a phase."""
_EXPECTED_POINTS = ("after init", "after forward", "after backward", "after step")
_COLUMNS = ("rank", "point", "line", "bytes", "expected_bytes")


class StepMemory:
    """Notes what a rank holds at each point. Make it when the step is built and nothing has run; `table` runs one step."""

    def __init__(
        self, config: RanksConfig, assembly: Assembly, watch: MemoryWatch, sizes: Sequence[ParameterSize]
    ) -> None:
        self._config = config
        self._assembly = assembly
        self._watch = watch
        self._sizes = sizes
        self._parameters = storages_of(assembly.module.parameters(), assembly.device)
        self._saved: list[Tensor] = []
        self._points = {"after init": self._read_point()}

    def table(self, batches: list[Batch]) -> dict[str, list[Any]]:
        """Run a step on these batches and put the points of every rank into one table. Every rank must call this."""
        with saved_tensors_hooks(self._note_saved, lambda tensor: tensor):
            self._assembly.complete()
            self._assembly.step(batches, self._note_phase)
        if self._assembly.device.type == "cuda":
            torch.cuda.synchronize()
        self._points["after step"] = self._read_point()
        # Buffers that exist from the start and hold gradients after backward count as gradients at every point.
        gradient_buffers = (
            self._points["after backward"].storages["gradients"].keys()
            & self._points["after init"].storages["communication"].keys()
        )
        lines = {name: point.lines(gradient_buffers) for name, point in self._points.items()}
        self._activations_bytes = lines["after forward"]["activations"]
        texts = Collectives(self._assembly.ranks).gather_texts(json.dumps(lines))
        rows = [row for rank, text in enumerate(texts) for row in self._rows(rank, json.loads(text))]
        return {name: [row[place] for row in rows] for place, name in enumerate(_COLUMNS)}

    def expected_peak(self) -> tuple[int, str] | None:
        """Bytes and moment of the peak by formula; None for torch's strategies. Needs the activations that `table` measures."""
        expected = expected_memory(
            self._config, self._sizes, rank=self._assembly.ranks.rank, activations_bytes=self._activations_bytes
        )
        return None if expected is None else (expected.peak.total_bytes, expected.peak_point.replace("_", " "))

    def _note_saved(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves, if forward runs."""
        detached = tensor.detach()  # a saved output would otherwise hold itself
        if self._assembly.step.running is Phase.FORWARD:
            self._saved.append(detached)
        return detached

    def _note_phase(self, phase: Phase) -> None:
        if phase in _POINT_AFTER:
            self._points[_POINT_AFTER[phase]] = self._read_point()
        self._saved.clear()

    def _read_point(self) -> "_Point":
        """What is held now."""
        storages = {
            **held_storages(self._assembly, self._parameters),
            "activations": storages_of(self._saved, self._assembly.device),
        }
        if self._assembly.device.type != "cuda":
            return _Point(storages=storages)
        return _Point(
            storages=storages,
            allocated=torch.cuda.memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            driver=self._watch.driver_bytes(),
        )

    def _rows(self, rank: int, points: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[Any, ...]]:
        """A rank's part of the table."""
        activations_bytes = points["after forward"]["activations"]
        expected = expected_memory(self._config, self._sizes, rank=rank, activations_bytes=activations_bytes)
        for point in _EXPECTED_POINTS:
            terms = expected and getattr(expected, point.replace(" ", "_"))
            formula = {name: getattr(terms, f"{name.replace(' ', '_')}_bytes") for name in CATEGORIES} if terms else {}
            for line, byte_count in points[point].items():
                yield rank, point, line, byte_count, formula.get(line)


@dataclass(frozen=True, kw_only=True)
class _Point:
    """The storages of each category at a point of the step; on a GPU also the allocator's and the driver's own figures."""

    storages: Mapping[str, Storages]
    allocated: int | None = None
    reserved: int | None = None
    driver: int | None = None

    def lines(self, gradient_buffers: Collection[int]) -> dict[str, int]:
        """Line of the table -> bytes."""
        buffers = {
            address: size for address, size in self.storages["communication"].items() if address in gradient_buffers
        }
        storages = {**self.storages, "gradients": {**self.storages["gradients"], **buffers}}
        lines, counted = dict[str, int](), set[int]()
        for name in CATEGORIES:
            lines[name] = sum(size for address, size in storages[name].items() if address not in counted)
            counted |= storages[name].keys()
        if self.allocated is not None and self.reserved is not None:
            lines |= {
                "unnamed": self.allocated - sum(lines.values()),
                "allocated": self.allocated,
                "reserved": self.reserved,
            }
        return lines if self.driver is None else {**lines, "driver": self.driver}


def held_storages(assembly: Assembly, parameters: Storages) -> dict[str, Storages]:
    """Category -> storages held now, without activations. `parameters`: the storages that they had when the step was built."""
    step, module, device = assembly.step, assembly.module, assembly.device
    optimizer = step.optimizer
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    kept = [] if step.gradient_sync is None else [step.gradient_sync.held_tensors()]
    if isinstance(optimizer, ShardedOptimizer):
        kept.append(optimizer.held_tensors())
    gradients = [parameter.grad for parameter in (*module.parameters(), *trained) if parameter.grad is not None]
    gradients += chain.from_iterable(tensors.gradients for tensors in kept)
    return {
        "parameters": parameters,
        "gradients": storages_of(gradients, device),
        "optimizer state": storages_of(state_tensors(optimizer), device),
        "communication": storages_of(chain(module.parameters(), *kept), device),
    }


def state_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    inner = getattr(optimizer, "optim", optimizer)  # torch's ZeRO keeps the state in an optimizer inside it
    states = inner.state.values() if inner is not None else ()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def storages_of(tensors: Iterable[Tensor], device: Device) -> Storages:
    """The storages of the tensors that are on this kind of device; of a DTensor, its local part."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = [tensor.untyped_storage() for tensor in local if tensor.device.type == device.type]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
