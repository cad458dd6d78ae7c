"""Maps a cause to the config change that removes it: the first of an ordered list that the config does not have yet.

change_of(config, "optimizer")     # ({"adamw": "fused"}, False) if adamw is loop, ({"adamw": "trainstep"}, False) if it is fused
changes_of(config)                 # every change that a proof can try, with its cause
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import RunConfig

_CHANGES: Mapping[str, Sequence[Mapping[str, str]]] = {
    "host_launches": ({"capture": "step"},),
    "recomputation": ({"recompute": "none"},),
    "casts": ({"compile": "block"}, {"precision": "bf16_master"}),
    "unfused": ({"compile": "block"}, {"ops": "fused"}),
    "small_kernels": ({"compile": "block"}, {"ops": "fused"}),
    "attention_kernel": ({"attention": "trainstep"},),
    "precision": ({"precision": "bf16_autocast"},),
    "optimizer": ({"adamw": "fused"}, {"adamw": "trainstep"}),
    "exposed_messages": ({"sync": "bucketed"},),
}
"""Cause -> changes in the order in which they are advised, as the pages of docs/guide/slow/ name them."""
_ALSO: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "host_launches": ({"compile": "block"}, {"compile": "model"}),
    "attention_kernel": ({"attention": "sdpa"},),
    "exposed_messages": (
        {"sync": "bucketed", "bucket_mib": 25.0},
        {"sync": "bucketed", "bucket_mib": 100.0},
        {"sync": "sharded_flat"},
    ),
}
"""Cause -> further changes that a proof tries: they help only some steps, and only a measurement can tell which."""
_AS_GOOD: Mapping[tuple[str, str], Sequence[str]] = {
    ("compile", "block"): ("model",),
    ("precision", "bf16_master"): ("fp32", "tf32", "bf16"),  # only autocast converts weights in each forward pass
    ("adamw", "fused"): ("trainstep",),
    ("attention", "sdpa"): ("sdpa_flash", "sdpa_cudnn"),
}
"""A change (field, value) -> other values of the field that make the change superfluous."""
ALL_BLOCKS: Mapping[str, Any] = {"recompute_every": 1, "narrow_blocks": 0}
"""Fields that `recompute none` requires: with other values a config refuses it."""
MANY_MESSAGES = ("naive", "overlapped")
"""Strategies that send a message for each gradient; buckets take less time."""
_WITHOUT_BUCKETS = (*MANY_MESSAGES, "flat")


def change_of(config: RanksConfig | None, cause: str) -> tuple[dict[str, Any], bool]:
    """The fields that remove the cause, and whether the config already has all such changes; the fields are then the last of them.

    The fields are empty where the advice is only words, or where the config refuses every change.
    """
    if config is None:
        return {}, False
    if cause == "exposed_messages" and config.sync.name not in _WITHOUT_BUCKETS:
        return {}, False
    taken = dict[str, str]()
    for change in _CHANGES.get(cause, ()):
        if cause != "exposed_messages" and _is_taken(config.run, change):
            taken = dict(change)
            continue
        fields = _with_required(config.run, change)
        if _is_valid(config.run, fields):
            return fields, False
    return taken, bool(taken)


def changes_of(config: RanksConfig) -> list[tuple[str, dict[str, Any]]]:
    """Every change that the config has not taken, with the first cause that it removes; each set of fields once.

    Changes that the config refuses are included, so that a reader sees why they are not tried. Strategies need several ranks.
    """
    by_fields: dict[str, tuple[str, dict[str, Any]]] = {}
    for cause in (*_CHANGES, *_ALSO):
        for change in (*_CHANGES.get(cause, ()), *_ALSO.get(cause, ())):
            if cause == "exposed_messages":
                fields = _of_strategy(config, change)
            else:
                fields = {} if _is_taken(config.run, change) else dict(change)
            fields = _with_required(config.run, fields)
            if fields:
                by_fields.setdefault(str(sorted(fields.items())), (cause, fields))
    return list(by_fields.values())


def _with_required(run: RunConfig, change: Mapping[str, Any]) -> dict[str, Any]:
    """The change with the fields that must change with it: a captured step needs a fused AdamW, `recompute none` all blocks."""
    fields = dict(change)
    if "capture" in fields and run.adamw in ("loop", "foreach"):
        fields |= {"adamw": "fused"}
    if fields.get("recompute") == "none":
        fields |= {name: value for name, value in ALL_BLOCKS.items() if getattr(run, name) != value}
    return fields


def _of_strategy(config: RanksConfig, change: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the change that differ from the config's strategy; none on one rank."""
    if config.ranks == 1:
        return {}
    now = {"sync": config.sync.name, "bucket_mib": config.sync.bucket_mib}
    return {name: value for name, value in change.items() if now[name] != value}


def _is_taken(run: RunConfig, change: Mapping[str, str]) -> bool:
    return all(getattr(run, name) in (value, *_AS_GOOD.get((name, value), ())) for name, value in change.items())


def _is_valid(run: RunConfig, fields: Mapping[str, Any]) -> bool:
    of_run = {name: value for name, value in fields.items() if name != "sync"}  # a run's `sync` says when it is timed
    try:
        replace(run, **of_run)
    except ValueError:
        return False
    return True
