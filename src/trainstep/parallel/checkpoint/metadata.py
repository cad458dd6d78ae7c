"""Reads a checkpoint's metadata and hyperparameters, and checks every field before anything is loaded.

torch.distributed.checkpoint does not define what happens where metadata does not fit its files (a KeyError, a tensor filled in
part), and a path in it may lead anywhere. So the unpickler admits only the classes of metadata, and every field is compared with
what save_checkpoint can write. Hyperparameters of an optimizer are JSON: a list with an object for each parameter group.
"""

import io
import json
import pickle
import reprlib
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.optim import Optimizer

from trainstep.parallel.checkpoint.files import MANIFEST, METADATA, is_part, read_checked

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
"""The metadata's `planner_data` in a checkpoint that must have a manifest."""
_NOT_OPTIONS = ("params", "param_names")
_SCHEDULER_OPTIONS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""Options that torch's schedulers write into groups: a scheduler may be made before or after the checkpoint is loaded."""


def read_metadata(folder: Path, checksums: Mapping[str, str] | None) -> Metadata:
    """Read the metadata and check that it fits the files in the folder. `checksums`: those of the manifest.

    ValueError for a file that is damaged or is not metadata, and for a checkpoint whose manifest is lost.
    """
    path = folder / METADATA
    content = read_checked(folder, METADATA, checksums)
    assert content is not None  # read_manifest has checked that the file exists
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        places = _places(metadata, checksums)
    except Exception as error:  # noqa: BLE001  (foreign bytes may fail in any way)
        raise ValueError(f"{path}: is not the metadata of a checkpoint: {error}") from None
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

    ValueError naming the file of a damaged piece. Needs twice the memory of a piece.
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
            damaged = zipfile.ZipFile(content).testzip()  # torch.load does not check the CRC-32
            if damaged is not None:
                raise ValueError(f"{damaged} in it has another CRC-32")
            content.seek(0)
            if torch.load(content, map_location="cpu", weights_only=True).shape != sizes:
                raise ValueError(f"{name} has another size in it")
        except Exception as error:  # noqa: BLE001  (zipfile and torch raise much)
            raise ValueError(f"{path}: is damaged: {error}; load another checkpoint") from None


def _places(metadata: Any, checksums: Collection[str] | None) -> list[_StorageInfo]:
    """Where the stored pieces are. Raises any exception where the metadata is not what save_checkpoint writes."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    unnamed = dict(metadata.storage_data)
    places = []
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(stored, TensorStorageMetadata):
            raise TypeError(f"{name!r} is not a tensor")
        if not isinstance(stored.properties.dtype, torch.dtype):
            raise TypeError(f"{name} has no dtype")
        (numel,) = stored.size
        end = 0
        for chunk in sorted(stored.chunks, key=_first_element):
            if _first_element(chunk) != end or chunk.sizes[0] <= 0:
                raise ValueError(f"{name} lacks elements, or has some twice")
            end += chunk.sizes[0]
            place = unnamed.pop(MetadataIndex(name, chunk.offsets))
            _check_place(name, place, checksums)
            places.append(place)
        if end != numel:
            raise ValueError(f"{name} has {end} of {numel} elements")
    if unnamed:
        raise ValueError("it has places of tensors that it does not name")
    return places


def _first_element(chunk: ChunkStorageMetadata) -> int:
    ((first,), (_,)) = chunk.offsets, chunk.sizes
    return first


def _check_place(name: str, place: _StorageInfo, checksums: Collection[str] | None) -> None:
    is_known = is_part(place.relative_path) and (checksums is None or place.relative_path in checksums)
    if not is_known:
        raise ValueError(f"{name} is in {place.relative_path!r}, which is not a part of this checkpoint")
    if not (isinstance(place, _StorageInfo) and isinstance(place.offset, int) and isinstance(place.length, int)):
        raise TypeError(f"{name} has no place")
    if place.offset < 0 or place.length <= 0 or place.transform_descriptors:
        raise ValueError(f"{name} has no place that can be read")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


# Hyperparameters.


def write_hyperparameters(optimizer: Optimizer) -> str:
    """JSON of each group's options. A tensor with one element is written as a number."""
    return json.dumps(
        [
            {
                name: _plain(value)
                for name, value in group.items()
                if name not in _NOT_OPTIONS and _is_plain(_plain(value))
            }
            for group in optimizer.param_groups
        ]
    )


def read_hyperparameters(path: Path, content: bytes, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Read what `write_hyperparameters` wrote, for set_hyperparameters; ValueError naming what does not fit the optimizer."""
    try:
        saved = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: is not JSON; load another checkpoint, or the module alone") from None
    if not isinstance(saved, list) or not all(isinstance(options, dict) for options in saved):
        raise ValueError(f"{path}: must be a list with an object for each parameter group; load another checkpoint")
    groups = optimizer.param_groups
    if len(saved) != len(groups):
        raise ValueError(f"{path}: has {len(saved)} parameter groups, but the optimizer has {len(groups)}")
    for number, (group, options) in enumerate(zip(groups, saved, strict=True)):
        problem = _problem(group, options)
        if problem:
            raise ValueError(
                f"{path}: group {number} {problem} ({type(optimizer).__name__}); make the optimizer with the saved options"
            )
    return [{name: value for name, value in options.items() if name not in _NOT_OPTIONS} for options in saved]


def set_hyperparameters(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Set the options of each group."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for name, value in options.items():
            current = group.get(name)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(current, tuple) else value


def _problem(group: dict[str, Any], options: dict[str, Any]) -> str | None:
    for name, value in options.items():
        if name == "param_names":  # earlier versions wrote it
            continue
        if name == "params" or (name not in group and name not in _SCHEDULER_OPTIONS):
            return f"has {name!r}, which is not an option of the optimizer"
        if not _fits(value, group.get(name, 0.0)):
            return f"has {reprlib.repr(value)} for {name}, where the optimizer has {reprlib.repr(group.get(name, 0.0))}"
    for name, value in group.items():
        needed = _is_number(value) or isinstance(value, (list, tuple))
        if needed and name not in options and name not in (*_NOT_OPTIONS, *_SCHEDULER_OPTIONS):
            return f"lacks {name}, which the optimizer has"
    return None


def _fits(saved: Any, current: Any) -> bool:
    """Whether a saved value has the type of the optimizer's current value."""
    if isinstance(current, Tensor) or _is_number(current):
        return _is_number(saved)
    if isinstance(current, (list, tuple)):
        same = isinstance(saved, list) and len(saved) == len(current)
        return same and all(_fits(*members) for members in zip(saved, current, strict=True))
    if isinstance(current, str):
        return isinstance(saved, str)
    return saved is None or isinstance(saved, (bool, int, float, str))  # the option is off, or a switch


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(member) for member in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))
