"""What a rank holds at four points of a step, by category, beside what it should hold by formula.

    parameters       storages that parameters had when the step was built: a rank's shards, where it has shards
    gradients        of parameters, or of this rank's pieces of them; buckets that these are views of, also while they are empty
    optimizer state  tensors of the optimizer's state
    communication    every other tensor that the parallel strategy keeps: buffers, gathered parameters
    activations      what forward saved for backward and is in none of these, as autograd saves it
    unnamed          on a GPU: what the allocator gave out beyond all this. Batches, the loss, libraries' workspaces, temporaries;
                     of torch's own ways their buffers, which cannot be seen from here; of recomputed blocks their inputs

A storage counts once, in the first of these that has it. A CPU's allocator keeps no count, so nothing is unnamed there. The table
has a row for each rank, point and line, with `expected_bytes` by plan/peak_memory.py (none for torch's ways). The lines `allocated`
and `reserved` are the allocator's own figures, `driver` is what the driver sees of the process.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainstep.config.parallel import RanksConfig
from trainstep.config.phases import Phase
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.held_storages import Storages, held_storages, storages_of
from trainstep.measure.memory import MemoryWatch
from trainstep.parallel.collectives import Collectives
from trainstep.plan.peak_memory import expected_memory
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly

CATEGORIES = ("parameters", "gradients", "optimizer state", "communication", "activations")
_AFTER = {
    Phase.FORWARD: "after forward",
    Phase.BACKWARD: "after backward",
    Phase.GRAD_SYNC: "after backward",
}
"""Of several micro-batches, and of backward and grad_sync, the last one's figures stay."""
_EXPECTED = ("after init", "after forward", "after backward", "after step")
_COLUMNS = ("rank", "point", "line", "bytes", "expected_bytes")


@dataclass(frozen=True, kw_only=True)
class _Point:
    """What was there at a point; on a GPU with the allocator's and the driver's own figures."""

    storages: Mapping[str, Storages]
    allocated: int | None = None
    reserved: int | None = None
    driver: int | None = None

    def lines(self, made_for_gradients: Collection[int]) -> dict[str, int]:
        """Line -> bytes. `made_for_gradients`: buffers from the start, which hold gradients when backward is over."""
        kept = self.storages["communication"]
        always = {address: size for address, size in kept.items() if address in made_for_gradients}
        found = {**self.storages, "gradients": {**self.storages["gradients"], **always}}
        lines, counted = dict[str, int](), set[int]()
        for name in CATEGORIES:
            lines[name] = sum(size for address, size in found[name].items() if address not in counted)
            counted |= found[name].keys()
        if self.allocated is not None and self.reserved is not None:
            lines |= {
                "unnamed": self.allocated - sum(lines.values()),
                "allocated": self.allocated,
                "reserved": self.reserved,
            }
        return lines if self.driver is None else {**lines, "driver": self.driver}


class StepMemory:
    """Made when the step is built and nothing has run; `table` runs one step and looks at it."""

    def __init__(
        self, config: RanksConfig, assembly: Assembly, watch: MemoryWatch, sizes: Sequence[ParameterSize]
    ) -> None:
        self._config = config
        self._assembly = assembly
        self._watch = watch
        self._sizes = sizes
        self._parameters = storages_of(assembly.module.parameters(), assembly.device)
        self._saved: list[Tensor] = []
        self._points = {"after init": self._held()}

    def table(self, batches: list[Batch]) -> dict[str, list[Any]]:
        """Run a step on these batches and put the points of every rank into one table. Every rank must ask."""
        with saved_tensors_hooks(self._note, lambda tensor: tensor):
            self._assembly.complete()
            self._assembly.step(batches, self._mark)
        if self._assembly.device.type == "cuda":
            torch.cuda.synchronize()
        self._points["after step"] = self._held()
        made_for_gradients = (
            self._points["after backward"].storages["gradients"].keys()
            & self._points["after init"].storages["communication"].keys()
        )
        lines = {name: point.lines(made_for_gradients) for name, point in self._points.items()}
        self._activations_bytes = lines["after forward"]["activations"]
        texts = Collectives(self._assembly.ranks).gather_texts(json.dumps(lines))
        rows = [row for rank, text in enumerate(texts) for row in self._rows(rank, json.loads(text))]
        return {name: [row[place] for row in rows] for place, name in enumerate(_COLUMNS)}

    def expected_peak(self) -> tuple[int, str] | None:
        """Bytes and moment by formula, with the activations of the table, which must be there; None for torch's ways."""
        expected = expected_memory(
            self._config, self._sizes, rank=self._assembly.ranks.rank, activations_bytes=self._activations_bytes
        )
        return None if expected is None else (expected.peak.total_bytes, expected.peak_point.replace("_", " "))

    def _note(self, tensor: Tensor) -> Tensor:
        """Forward saves this for backward. Detached: a saved output would else hold itself."""
        kept = tensor.detach()
        if self._assembly.step.running is Phase.FORWARD:
            self._saved.append(kept)
        return kept

    def _mark(self, phase: Phase) -> None:
        if phase in _AFTER:
            self._points[_AFTER[phase]] = self._held()
        self._saved.clear()

    def _rows(self, rank: int, points: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[Any, ...]]:
        """A rank's part of the table."""
        activations_bytes = points["after forward"]["activations"]
        expected = expected_memory(self._config, self._sizes, rank=rank, activations_bytes=activations_bytes)
        for point in _EXPECTED:
            held = expected and getattr(expected, point.replace(" ", "_"))
            formula = {name: getattr(held, f"{name.replace(' ', '_')}_bytes") for name in CATEGORIES} if held else {}
            for line, byte_count in points[point].items():
                yield rank, point, line, byte_count, formula.get(line)

    def _held(self) -> "_Point":
        """Who holds what, now."""
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
