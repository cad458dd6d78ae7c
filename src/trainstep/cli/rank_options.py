"""What verbs with `--ranks` and `--sync` check before anything starts."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.config.sync import USED_BY
from trainstep.costs.strategies import YARDSTICK
from trainstep.records.record import Environment


def check_sync_options(asked: Mapping[str, Sequence[Any]], ways: Sequence[Any]) -> None:
    """ValueError for an option that none of the ways has: it would be passed over in silence."""
    names = [str(way) if way is not None else YARDSTICK for way in ways]
    for option, its in USED_BY.items():
        if option in asked and not set(its) & set(names):
            raise ValueError(f"{option}: has no effect with sync {', '.join(names)}; it is for {', '.join(its)}")


def check_gpus(ranks: Sequence[Any], device: str, here: Environment, *, verb: str) -> None:
    """ValueError for more ranks than GPUs: bad input, not cells that failed."""
    most = max((one for one in ranks if isinstance(one, int)), default=0)
    if device == "cuda" and most > here.gpu_count:
        raise ValueError(
            f"ranks: {most} ranks need a GPU each, and {here.gpu_count} {'is' if here.gpu_count == 1 else 'are'} visible; "
            f"take fewer, or the CPU with gloo: trainstep {verb} --device cpu --ranks {most}"
        )
