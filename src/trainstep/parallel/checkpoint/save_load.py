"""Sharded checkpoints of FSDP: each rank writes its pieces, and any number of ranks reads them.

Every parameter, and every tensor of optimizer state like it, is stored flat under its own name; a rank's piece is a range of its
elements. torch.distributed.checkpoint writes the pieces and assembles at loading what a rank needs. One rank writes buffers, single
numbers of the state, and the hyperparameters as JSON. A manifest with checksums comes last (checkpoint/files.py).

[Note: all ranks or none]
What a rank does by itself (inspect the folder, read, verify) it does inside `agreed`: all ranks raise the error of one rank, so no
rank waits in a collective for a rank that has left. Everything that can be wrong with a checkpoint is detected before the first
tensor of module or optimizer changes.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainstep.parallel.agreement import agreed
from trainstep.parallel.checkpoint import files
from trainstep.parallel.checkpoint.metadata import (
    HAS_MANIFEST,
    check_stored,
    read_hyperparameters,
    read_metadata,
    set_hyperparameters,
    write_hyperparameters,
)
from trainstep.parallel.flat_buffer import in_memory_order
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.fsdp_unit import Placed

_State = dict[Tensor, dict[str, Any]]
"""An optimizer's state, by parameter."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """This rank's elements of a flat tensor of `numel` elements, from `first` on. `written`: this rank writes them."""

    tensor: Tensor
    first: int
    numel: int
    written: bool = True

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.first]), sizes=torch.Size([self.tensor.numel()]))


def save_checkpoint(folder: str | Path, sync: FSDP, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write module and optimizer. Every rank calls it; when it returns, a complete checkpoint is on the disk.

    A save that is interrupted at any moment leaves a folder that load_checkpoint refuses and the next save reuses.
    FileExistsError for a folder that holds a checkpoint or a file with a name of its files; OSError where a rank cannot write.
    Either is raised on every rank.
    """
    folder = Path(folder)
    agreed(lambda: _begin(folder, optimizer) if sync.ranks.is_first else None, sync.collectives)
    for unit in sync.units:
        unit.reshard()
    pieces = {**_module_pieces(sync), **(_optimizer_pieces(sync, optimizer.state) if optimizer else {})}
    writer = _Writer(folder)
    try:
        save(
            dict(pieces),
            storage_writer=writer,
            planner=_SavePieces(pieces),
            process_group=sync.ranks.group,
            no_dist=sync.ranks.group is None,
        )
    except CheckpointException as failed:
        rank, error = _first_failure(failed)
        raise OSError(f"{folder}: rank {rank} could not write: {error}; the folder holds no checkpoint now") from error
    checksums: dict[str, str] = {}
    for text in sync.collectives.gather_texts(json.dumps(writer.checksums)):
        checksums |= json.loads(text)
    agreed(lambda: files.finish(folder, checksums) if sync.ranks.is_first else None, sync.collectives)


def load_checkpoint(folder: str | Path, sync: FSDP, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read module and optimizer, written by any number of ranks. Every rank calls it.

    Everything is verified first: each rank reads its share of the files once for their checksums. ValueError on every rank, before
    anything has changed: for a file that is missing or damaged, by name; for an interrupted save; for a parameter that the
    checkpoint lacks or has in another size, and for hyperparameters that are not the optimizer's.

    A checkpoint without a manifest, of an earlier version, is read with a warning: its tensors are compared with the CRC-32 that
    torch wrote with them, but nothing says whether its files belong together.
    """
    folder = Path(folder)
    for unit in sync.units:
        unit.reshard()
    verified = agreed(lambda: _verify(folder, sync, optimizer), sync.collectives)
    if not verified.has_manifest and sync.ranks.is_first:
        warnings.warn(
            f"{folder}: has no manifest, as earlier versions wrote it, so damage to its metadata or {files.HYPERPARAMETERS} may "
            "go unnoticed; save it again",
            stacklevel=2,
        )
    try:
        load(
            dict(verified.pieces),
            storage_reader=_Reader(folder, verified.metadata),
            planner=_LoadPieces(verified.pieces),
            process_group=sync.ranks.group,
            no_dist=sync.ranks.group is None,
        )
    except CheckpointException as failed:
        rank, error = _first_failure(failed)
        raise ValueError(
            f"{folder}: rank {rank} could not read what it had verified: {error}; the module is loaded in part"
        ) from error
    if optimizer is not None:
        for placed in sync.placed():
            optimizer.state.pop(placed.parameter, None)
        optimizer.state.update(verified.state)
        set_hyperparameters(optimizer, verified.hyperparameters)


@dataclass(frozen=True, kw_only=True)
class _Verified:
    """A checkpoint that fits, and the tensors that it is loaded into."""

    metadata: Metadata
    pieces: dict[str, "_Piece"]
    state: _State
    """The optimizer's state, whose tensors are still to be filled."""
    hyperparameters: list[dict[str, Any]]
    has_manifest: bool


def _begin(folder: Path, optimizer: torch.optim.Optimizer | None) -> None:
    files.begin(folder)
    if optimizer is not None:
        files.write_to_disk(folder / files.HYPERPARAMETERS, write_hyperparameters(optimizer))


def _verify(folder: Path, sync: FSDP, optimizer: torch.optim.Optimizer | None) -> _Verified:
    """Check everything that can be wrong, this rank's share of it; changes nothing."""
    checksums = files.read_manifest(folder)
    metadata = read_metadata(folder, checksums)
    if checksums is not None:
        files.check_parts(folder, checksums, sync.ranks.rank, sync.ranks.world_size)
    else:
        check_stored(folder, metadata, sync.ranks.rank, sync.ranks.world_size)
    content = files.read_checked(folder, files.HYPERPARAMETERS, checksums)
    pieces = _module_pieces(sync)
    state: _State = {}
    hyperparameters: list[dict[str, Any]] = []
    if optimizer is not None:
        if content is None:
            raise ValueError(f"{folder}: holds no optimizer; load the module alone")
        hyperparameters = read_hyperparameters(folder / files.HYPERPARAMETERS, content, optimizer)
        state = _empty_state(metadata, sync)
        pieces |= _optimizer_pieces(sync, state)
    for name, piece in pieces.items():
        if not piece.numel:  # empty tensors are not stored
            continue
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{folder}: has no {name}")
        if stored.size.numel() != piece.numel:
            raise ValueError(f"{folder}: {name} has {stored.size.numel()} elements, but in the module {piece.numel}")
    return _Verified(
        metadata=metadata,
        pieces=pieces,
        state=state,
        hyperparameters=hyperparameters,
        has_manifest=checksums is not None,
    )


def _first_failure(failed: CheckpointException) -> tuple[int, BaseException]:
    """The first rank that failed and why. Ctrl-C, which torch keeps as a failure, is raised again."""
    for error, _ in failed.failures.values():
        if isinstance(error, KeyboardInterrupt):
            raise error
    rank = min(failed.failures)
    return rank, failed.failures[rank][0]


def _module_pieces(sync: FSDP) -> dict[str, _Piece]:
    pieces = {
        f"module.{placed.name}": _Piece(
            tensor=placed.flat,
            first=placed.first,
            numel=placed.shape.numel(),
            written=_is_written(sync, placed),
        )
        for placed in sync.placed()
    }
    for name, buffer in sync.module.named_buffers():
        flat = buffer.detach().reshape(-1)
        pieces[f"module.{name}"] = _Piece(tensor=flat, first=0, numel=flat.numel(), written=sync.ranks.is_first)
    return pieces


def _is_written(sync: FSDP, placed: Placed) -> bool:
    """Whether this rank writes its elements of a parameter: groups of ranks hold the same shards, and the first group writes."""
    return sync.ranks.is_first if placed.everywhere else sync.groups.is_first_group


def _optimizer_pieces(sync: FSDP, state: Mapping[Tensor, dict[str, Any]]) -> dict[str, _Piece]:
    """The pieces of the optimizer's state: tensors like a parameter in pieces, single numbers whole."""
    pieces = {}
    for placed in sync.placed():
        written = _is_written(sync, placed)
        for key, value in state.get(placed.parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            flat = in_memory_order(value)
            piece = _Piece(tensor=flat, first=placed.first, numel=placed.shape.numel(), written=written)
            if not value.dim():  # all ranks with a piece have the same number
                piece = _Piece(tensor=flat, first=0, numel=1, written=written and placed.first == 0)
            pieces[f"optimizer.{placed.name}.{key}"] = piece
    return pieces


def _empty_state(metadata: Metadata, sync: FSDP) -> _State:
    """Empty tensors for the optimizer's state of this rank's pieces, as far as the checkpoint has it."""
    stored_state: dict[str, dict[str, TensorStorageMetadata]] = {}
    for stored_name, stored in metadata.state_dict_metadata.items():
        name, _, key = stored_name.removeprefix("optimizer.").rpartition(".")
        if stored_name.startswith("optimizer.") and isinstance(stored, TensorStorageMetadata):
            stored_state.setdefault(name, {})[key] = stored
    state: _State = {}
    for placed in sync.placed():
        if not placed.parameter.numel():
            continue
        for key, stored in stored_state.get(placed.name, {}).items():
            is_number = stored.size.numel() == 1 and key == "step"
            like = torch.zeros(()) if is_number else placed.parameter.detach()
            state.setdefault(placed.parameter, {})[key] = torch.zeros_like(like, dtype=stored.properties.dtype)
    return state


class _Writer(FileSystemWriter):
    """Notes the checksums of the parts that this rank wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.checksums: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        self.checksums = {name: files.checksum(Path(self.path) / name) for name in sorted(names)}
        return written


class _SavePieces(DefaultSavePlanner):
    """Writes each rank's pieces; pieces that all ranks have alike only once."""

    def __init__(self, pieces: dict[str, _Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, torch.Size([piece.first])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=torch.Size([piece.numel]),
                ),
            )
            for name, piece in self._pieces.items()
            if piece.tensor.numel() and piece.written
        ]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=HAS_MANIFEST)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._pieces[index.fqn].tensor


class _LoadPieces(DefaultLoadPlanner):
    """Reads the elements that this rank's pieces cover."""

    def __init__(self, pieces: dict[str, _Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self._pieces.items():
            if piece.tensor.numel():
                stored = self.metadata.state_dict_metadata[name]
                assert isinstance(stored, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, stored, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].tensor


class _Reader(FileSystemReader):
    """Uses the metadata that has been verified instead of reading it again from the disk."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata
