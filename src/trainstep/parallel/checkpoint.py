"""Sharded checkpoints of FSDP through torch.distributed.checkpoint: each rank writes its pieces, any number of ranks reads them.

Every parameter, and every tensor of optimizer state like it, is stored flat under its own name, a rank's piece as the range of
elements that it is; torch.distributed.checkpoint puts together at loading what a rank needs. Buffers and single numbers of the
state are written by one rank, hyperparameters as JSON beside. Nothing is pickled by us; the metadata, which torch pickles, is
read by an unpickler that knows its classes and no others, and tensors with weights_only.
"""

import io
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainstep.parallel.fsdp import FSDP

_HYPERPARAMETERS = "optimizer.json"
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "pathlib": ("PosixPath", "Path", "PurePosixPath"),
    "collections": ("OrderedDict",),
}


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A flat tensor's elements from `first` on. `written`: by this rank; others may have the same."""

    tensor: Tensor
    first: int
    numel: int
    written: bool = True

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.first]), sizes=torch.Size([self.tensor.numel()]))


def save_checkpoint(folder: str | Path, sync: FSDP, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write module and optimizer. Every rank calls it. FileExistsError for a folder with a checkpoint in it."""
    folder = Path(folder)
    if (folder / ".metadata").exists():
        raise FileExistsError(f"{folder} holds a checkpoint; name another folder, or remove that one first")
    sync.collectives.barrier()  # before any rank writes, all have looked
    for unit in sync.units:
        unit.reshard()
    pieces = {**_module_pieces(sync), **(_optimizer_pieces(sync, optimizer) if optimizer else {})}
    if sync.ranks.is_first and optimizer is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _HYPERPARAMETERS).write_text(json.dumps(_hyperparameters(optimizer)))
    save(
        dict(pieces),
        storage_writer=FileSystemWriter(folder),
        planner=_SavePieces(pieces),
        process_group=sync.ranks.group,
        no_dist=sync.ranks.group is None,
    )


def load_checkpoint(folder: str | Path, sync: FSDP, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read module and optimizer, written by any number of ranks. Every rank calls it.

    ValueError, naming it, for a parameter that the checkpoint lacks or has in another size, and for a file that is none.
    """
    folder = Path(folder)
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    for unit in sync.units:
        unit.reshard()
    if optimizer is not None:
        _make_state(folder, metadata, sync, optimizer)
    pieces = {**_module_pieces(sync), **(_optimizer_pieces(sync, optimizer) if optimizer else {})}
    for name, piece in pieces.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{folder}: has no {name}")
        if stored.size.numel() != piece.numel:
            raise ValueError(f"{folder}: {name} has {stored.size.numel()} elements, and the module's {piece.numel}")
    load(
        dict(pieces),
        storage_reader=reader,
        planner=_LoadPieces(pieces),
        process_group=sync.ranks.group,
        no_dist=sync.ranks.group is None,
    )


def _module_pieces(sync: FSDP) -> dict[str, _Piece]:
    pieces = {
        f"module.{name}": _Piece(tensor=unit.pieces[index], first=unit.ends(index)[0], numel=unit.shape(index).numel())
        for name, _, unit, index in sync.placed()
    }
    for name, buffer in sync.module.named_buffers():
        flat = buffer.detach().reshape(-1)
        pieces[f"module.{name}"] = _Piece(tensor=flat, first=0, numel=flat.numel(), written=sync.ranks.is_first)
    return pieces


def _optimizer_pieces(sync: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, _Piece]:
    """State like a parameter in pieces; single numbers whole."""
    pieces = {}
    for name, parameter, unit, index in sync.placed():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            first = unit.ends(index)[0]
            piece = _Piece(tensor=value.reshape(-1), first=first, numel=unit.shape(index).numel())
            if not value.dim():  # all holders have the same number
                piece = _Piece(tensor=value.reshape(-1), first=0, numel=1, written=first == 0)
            pieces[f"optimizer.{name}.{key}"] = piece
    return pieces


def _make_state(folder: Path, metadata: Metadata, sync: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Empty state for what the checkpoint has of each piece, and its hyperparameters."""
    try:
        saved = json.loads((folder / _HYPERPARAMETERS).read_text())
    except (OSError, ValueError):
        raise ValueError(f"{folder}: holds no optimizer; load the module alone") from None
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder}: has {len(saved)} parameter groups, and the optimizer {len(optimizer.param_groups)}"
        )
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})
    for name, parameter, _, _ in sync.placed():
        prefix = f"optimizer.{name}."
        keys = [key.removeprefix(prefix) for key in metadata.state_dict_metadata if key.startswith(prefix)]
        if not keys or not parameter.numel():
            continue
        for key in keys:
            stored = metadata.state_dict_metadata[prefix + key]
            assert isinstance(stored, TensorStorageMetadata)
            like = stored.size.numel() != 1 or key != "step"
            dtype, shape = stored.properties.dtype, parameter.shape if like else ()
            device = parameter.device if like else "cpu"
            optimizer.state[parameter][key] = torch.zeros(shape, dtype=dtype, device=device)


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, type(None), list, tuple)
    return [
        {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]


class _SavePieces(DefaultSavePlanner):
    """Writes each rank's pieces; what several have alike, once."""

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

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._pieces[index.fqn].tensor


class _LoadPieces(DefaultLoadPlanner):
    """Reads what each rank's pieces cover."""

    def __init__(self, pieces: dict[str, _Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self._pieces.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if piece.tensor.numel():
                items += create_read_items_for_chunk_list(name, stored, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].tensor


class _Reader(FileSystemReader):
    """A checkpoint may come from anywhere: its metadata may name the classes it is made of and nothing else."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except FileNotFoundError:
            raise ValueError(f"{self.path}: is no checkpoint: it has no .metadata") from None
        except Exception as error:  # noqa: BLE001  (bytes of a stranger may fail in any way)
            raise ValueError(f"{path}: is no metadata of a checkpoint: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path}: is no metadata of a checkpoint")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()) or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


_DTYPES = frozenset(str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype))
