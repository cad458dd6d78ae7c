"""The metadata of a checkpoint: loaded by an unpickler that admits only its own classes, and checked field by field.

torch.distributed.checkpoint does not define what happens where metadata does not fit its files (a KeyError, a tensor filled in
part), and a path in it may lead anywhere. So every field is compared here with what a checkpoint of ours can hold.
"""

import io
import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from trainstep.parallel.checkpoint_files import MANIFEST, METADATA, is_part, read_checked

_CLASSES = {
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
_DTYPES = frozenset(str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype))
HAS_MANIFEST = {"manifest": MANIFEST}
"""What the metadata's `planner_data` says of a checkpoint that must have a manifest."""


def read_metadata(folder: Path, checksums: Mapping[str, str] | None) -> Metadata:
    """The metadata, which fits the files in the folder. `checksums`: the manifest's.

    ValueError for a file that is damaged or no metadata, and for a checkpoint whose manifest is lost.
    """
    path = folder / METADATA
    content = read_checked(folder, METADATA, checksums)
    assert content is not None  # read_manifest has looked
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        places = _places(metadata, checksums)
    except Exception as error:  # noqa: BLE001  (bytes of a stranger may fail in any way)
        raise ValueError(f"{path}: is no metadata of a checkpoint: {error}") from None
    if checksums is None and metadata.planner_data == HAS_MANIFEST:
        raise ValueError(f"{folder / MANIFEST}: is missing; load another checkpoint")
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end_bytes in sorted(ends.items()):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: is missing; load another checkpoint")
        if (folder / name).stat().st_size < end_bytes:
            raise ValueError(f"{folder / name}: is torn: it ends before byte {end_bytes}; load another checkpoint")
    return cast(Metadata, metadata)


def check_stored(folder: Path, metadata: Metadata, rank: int, world_size: int) -> None:
    """For a checkpoint without a manifest: read this rank's share of the stored pieces and compare each with its CRC-32.

    ValueError naming the file of one that is damaged. Needs the memory of one piece, twice.
    """
    pieces = [
        (metadata.storage_data[MetadataIndex(name, chunk.offsets)], name, chunk.sizes)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
        for chunk in stored.chunks
    ]
    for place, name, sizes in pieces[rank::world_size]:
        path = folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
            damaged = zipfile.ZipFile(content).testzip()  # which torch.load would not look at
            if damaged is not None:
                raise ValueError(f"{damaged} in it has another CRC-32")
            content.seek(0)
            if torch.load(content, map_location="cpu", weights_only=True).shape != sizes:
                raise ValueError(f"{name} has another size in it")
        except Exception as error:  # noqa: BLE001  (zipfile and torch raise much)
            raise ValueError(f"{path}: is damaged: {error}; load another checkpoint") from None


def _places(metadata: Any, checksums: Collection[str] | None) -> list[_StorageInfo]:
    """Where the stored pieces are. Any exception where the metadata is not what we write."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    unnamed = dict(metadata.storage_data)
    places = []
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(stored, TensorStorageMetadata):
            raise TypeError(f"{name!r} is no tensor")
        if not isinstance(stored.properties.dtype, torch.dtype):
            raise TypeError(f"{name} has no dtype")
        (numel,) = stored.size
        end = 0
        for chunk in sorted(stored.chunks, key=_first):
            if _first(chunk) != end or chunk.sizes[0] <= 0:
                raise ValueError(f"{name} has gaps, or elements twice")
            end += chunk.sizes[0]
            place = unnamed.pop(MetadataIndex(name, chunk.offsets))
            _check_place(name, place, checksums)
            places.append(place)
        if end != numel:
            raise ValueError(f"{name} has {end} of {numel} elements")
    if unnamed:
        raise ValueError("it has places of tensors that it does not name")
    return places


def _first(chunk: ChunkStorageMetadata) -> int:
    """The number of its first element."""
    ((first,), (_,)) = chunk.offsets, chunk.sizes
    return first


def _check_place(name: str, place: _StorageInfo, checksums: Collection[str] | None) -> None:
    is_known = is_part(place.relative_path) and (checksums is None or place.relative_path in checksums)
    if not is_known:
        raise ValueError(f"{name} is in {place.relative_path!r}, which is no part of this checkpoint")
    if not (isinstance(place, _StorageInfo) and isinstance(place.offset, int) and isinstance(place.length, int)):
        raise TypeError(f"{name} has no place")
    if place.offset < 0 or place.length <= 0 or place.transform_descriptors:
        raise ValueError(f"{name} has no place that can be read")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
