"""Cause -> the change of a config that removes it: the first of an ordered list that the config has not taken yet.

change_of(config, "optimizer")     # ({"adamw": "fused"}, False) of a loop, ({"adamw": "trainstep"}, False) of a fused one
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
_AS_GOOD: Mapping[tuple[str, str], Sequence[str]] = {
    ("compile", "block"): ("model",),
    ("precision", "bf16_master"): ("fp32", "tf32", "bf16"),  # only autocast converts weights in each forward pass
    ("adamw", "fused"): ("trainstep",),
}
"""A change -> other values of its field with which it is not to be advised."""
MANY_MESSAGES = ("naive", "overlapped")
"""Strategies with a message for each gradient, which buckets send in less time."""
_WITHOUT_BUCKETS = (*MANY_MESSAGES, "flat")


def change_of(config: RanksConfig | None, cause: str) -> tuple[dict[str, str], bool]:
    """The fields that remove the cause, and whether the config has all such changes already, of which it is then the last.

    No fields where there are only words, or the config refuses every change.
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
        fields = dict(change)
        if cause == "host_launches" and config.run.adamw in ("loop", "foreach"):
            fields |= {"adamw": "fused"}
        if _is_valid(config.run, fields):
            return fields, False
    return taken, bool(taken)


def _is_taken(run: RunConfig, change: Mapping[str, str]) -> bool:
    return all(getattr(run, name) in (value, *_AS_GOOD.get((name, value), ())) for name, value in change.items())


def _is_valid(run: RunConfig, fields: Mapping[str, Any]) -> bool:
    of_run = {name: value for name, value in fields.items() if name != "sync"}  # a run's own sync is when it is timed
    try:
        replace(run, **of_run)
    except ValueError:
        return False
    return True
