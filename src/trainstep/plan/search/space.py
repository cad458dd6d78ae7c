"""What a search of options may choose: the fields that are free, their values, and the combinations that configs allow.

    space = space_of({"model": ["8B"], "ranks": [8], "precision": ["bf16_autocast"]}, global_batch=32)
    for ranks in space.ranks:
        space.runs(ranks), space.strategies(ranks)        # both validated; space.refused counts what was not allowed

A field that is named with one value is fixed; named with several, it takes any of them; unnamed, it takes the values of `FREE`.
`FREE` has only options that leave the mathematics of a step as they are, and only values whose time a calibration measures: torch's
strategies have no time yet, and copies between GPUs and flex have no measured one. The time of groups of ranks is simulated, which
takes too long for thousands of combinations. Precision and the dtypes of messages change the mathematics, so they are chosen
only among named values.

A step reads `global_batch` sequences on all ranks: ranks x batch_size x accumulation. If it is named, the division is free.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from trainstep.config.model import ModelConfig
from trainstep.config.parallel import OURS, RanksConfig, SyncConfig, needless
from trainstep.config.parsing import build, fields_of, typed_values
from trainstep.config.plan import PlanConfig, PlannedRunConfig
from trainstep.config.run import RECOMPUTES, RunConfig
from trainstep.costs.strategies import BASELINE, STRATEGIES

Values = Mapping[str, Sequence[Any]]

FREE: Mapping[str, tuple[Any, ...]] = {
    "sync": tuple(name for name in OURS if name != BASELINE),
    "bucket_mib": (None, 25.0, 100.0),
    "reshard_after_forward": (True, False),
    "recompute": RECOMPUTES,
    "recompute_every": (1, 2),
    "compile": ("none", "block"),
    "capture": ("none", "step"),
    "attention": ("sdpa", "trainstep"),
    "ops": ("plain", "fused"),
    "adamw": ("fused", "trainstep"),
    "update": ("after_backward", "in_backward"),
}
"""The values of a field that is not named; the defaults first, which win a tie."""
DIVISION = ("batch_size", "accumulation")
"""Free too, if the global batch is named."""
LISTED = ("precision", "compute_dtype", "reduce_dtype")
"""Options that change the mathematics: chosen only among named values."""
_MOST_SIZES = 16
"""Micro-batches that are tried: each is multiplied by every other choice."""
MOST_SEQUENCES = 2**24
"""The largest global batch: nobody trains with a larger one, and it would take too long to divide."""
_SAME_WORK = ("model", "context", "mode", "clip_grad_norm", "d_model", "d_ff", "layers", "heads", "vocab_size")
_OF_RECOMPUTE = ("recompute_every", "narrow_blocks")
"""Options that have no effect without recomputation."""
_SYNC_FIELDS = frozenset(("sync", *(option for strategy in STRATEGIES for option in strategy.options)))
_BAD_VALUE = (": must be ", " is not known")
"""Words in the error about a value that no combination can have."""


@dataclass(kw_only=True)
class Space:
    """Fixed values, and the choices of every other field. `free`: the choices that were not named."""

    fixed: Mapping[str, Any]
    choices: Mapping[str, tuple[Any, ...]]
    free: tuple[str, ...]
    ranks: tuple[int, ...]
    global_batch: int
    refused: Counter[str] = field(default_factory=Counter)
    """The error with which configs refuse combinations -> number of combinations."""

    def runs(self, ranks: int) -> list[RunConfig]:
        """Every allowed step of one rank. ValueError for a value that no step can have."""
        runs: list[RunConfig] = []
        for division in self._divisions(ranks):
            names = [name for name in self.choices if name not in _SYNC_FIELDS and name not in DIVISION]
            for values in product(*(self.choices[name] for name in names)):
                point = {**self._fixed(of_sync=False), **division, **dict(zip(names, values, strict=True))}
                if any(_is_idle(point, name, self.choices) for name in _OF_RECOMPUTE):
                    continue
                if (run := self._made(partial(build, PlannedRunConfig, point, where="plan"))) is not None:
                    runs.append(run)
        return runs

    def strategies(self, ranks: int) -> list[SyncConfig]:
        """Every allowed strategy with its options. ValueError for a value that none can have."""
        if ranks == 1:
            return [SyncConfig(name=BASELINE)]
        syncs: dict[SyncConfig, None] = {}
        fixed = self._fixed(of_sync=True)
        for name in self.choices.get("sync", (fixed.get("sync"),)):
            options = [option for option in self.choices if option in _SYNC_FIELDS and option != "sync"]
            idle = needless({"sync": name})
            used = [option for option in options if option not in idle]
            own = {option: value for option, value in fixed.items() if option != "sync" and option not in idle}
            for values in product(*(self.choices[option] for option in used)):
                point = {**own, **dict(zip(used, values, strict=True))}
                if (sync := self._made(partial(SyncConfig, name=name, **point))) is not None:
                    syncs[sync] = None
        return list(syncs)

    def allowed(self, ranks: int, sync: SyncConfig, run: RunConfig) -> RanksConfig | None:
        """The step of several ranks, if its parts go together."""
        try:
            return RanksConfig(ranks=ranks, sync=sync, run=run)
        except ValueError as error:
            self.refused[str(error)] += 1
            return None

    def options(self, config: RanksConfig) -> dict[str, Any]:
        """The values of the fields that were chosen, by their names on a command line."""
        values = {**vars(config.run), **vars(config.sync), "sync": config.sync.name, "ranks": config.ranks}
        idle = needless({"sync": config.sync.name}) if config.ranks > 1 else _SYNC_FIELDS
        names = [name for name in self.choices if name not in idle or name == "sync"]
        if config.ranks == 1:
            names = [name for name in names if name != "sync"]
        if config.run.recompute == "none":
            names = [name for name in names if name not in _OF_RECOMPUTE]
        return {**({"ranks": config.ranks} if len(self.ranks) > 1 else {}), **{name: values[name] for name in names}}

    def command_options(self, config: RanksConfig) -> dict[str, Any]:
        """Every option that was named or chosen, as `bench` takes them, or `parallel` for several ranks."""
        idle = _SYNC_FIELDS if config.ranks == 1 else needless({"sync": config.sync.name})
        several = {"ranks": config.ranks, "sync": config.sync.name} if config.ranks > 1 else {}
        division = {name: getattr(config.run, name) for name in DIVISION}
        values = {**self.fixed, **division, **self.options(config), **several, "device": config.run.device}
        without = {"mode", "ranks", *idle} - several.keys()  # one rank is what bench runs, and it has no option for it
        return {name: value for name, value in values.items() if value is not None and name not in without}

    def neighbours(self, config: RanksConfig) -> Iterator[tuple[str, Any, RanksConfig]]:
        """Field, value and config of each step that differs from this one in one chosen field, and in what that needs."""
        chosen = self.options(config)
        for name, current in chosen.items():
            for value in self.choices.get(name, ()):
                if value == current or name == "accumulation":
                    continue
                if (changed := self._changed(config, name, value)) is not None:
                    yield name, value, changed

    def _changed(self, config: RanksConfig, name: str, value: Any) -> RanksConfig | None:
        try:
            if name == "sync":
                named = {option: each for option, each in self._fixed(of_sync=True).items() if option != "sync"}
                kept = named | {option: getattr(config.sync, option) for option in LISTED[1:]}
                kept = {option: kept[option] for option in kept if option not in needless({"sync": value})}
                return replace(config, sync=SyncConfig(name=value, **kept))
            if name in _SYNC_FIELDS:
                return replace(config, sync=replace(config.sync, **{name: value}))
            changes = {name: value}
            if name == "batch_size":
                each = self.global_batch // config.ranks
                if each % value or not self._may("accumulation", each // value):
                    return None
                changes["accumulation"] = each // value
            if name == "recompute" and value == "none":
                changes["recompute_every"] = 1
            if name == "recompute" and value != "selective":
                changes["narrow_blocks"] = 0
            if name == "update" and value == "in_backward" and self._may("adamw", "trainstep"):
                changes["adamw"] = "trainstep"
            return replace(config, run=replace(config.run, **changes))
        except ValueError:
            return None

    def _may(self, name: str, value: Any) -> bool:
        return value in self.choices[name] if name in self.choices else self.fixed.get(name, value) == value

    def _fixed(self, *, of_sync: bool) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.fixed.items()
            if (name in _SYNC_FIELDS) == of_sync and name not in DIVISION
        }

    def _divisions(self, ranks: int) -> list[dict[str, int]]:
        """Sizes and numbers of micro-batches that make up the global batch on these ranks."""
        each, left = divmod(self.global_batch, ranks)
        if left:
            return []
        return [
            {"batch_size": size, "accumulation": each // size}
            for size in spread(divisors(each))
            if self._may("batch_size", size) and self._may("accumulation", each // size)
        ]

    def _made(self, make: Callable[[], Any]) -> Any:
        """A config, or None if it refuses its values; ValueError for a value that no combination can have."""
        try:
            return make()
        except ValueError as error:
            if any(words in str(error) for words in _BAD_VALUE):
                raise
            self.refused[str(error)] += 1
            return None


def space_of(named: Values, *, global_batch: int | None, ranks: Sequence[int]) -> Space:
    """The space of a search. `named`: the options with their values, without `ranks`; `ranks`: those that may be taken.

    ValueError for values that are different work, for a global batch that does not divide, and if nothing is left to choose.
    """
    for name in _SAME_WORK:
        if len(named.get(name, ())) > 1:
            raise ValueError(f"{name}: its values are different work, not a choice; search each by itself")
    several, fixed = dict[str, tuple[Any, ...]](), dict[str, Any]()
    shape = set(fields_of(ModelConfig))
    for name, listed in named.items():
        kind = ModelConfig if name in shape else PlanConfig
        values = (
            list(dict.fromkeys(typed_values(kind, {name: value})[name] for value in listed))
            if name != "model"
            else listed
        )
        if len(values) > 1:
            several[name] = tuple(values)
        else:
            fixed[name] = values[0]
    if any(mode != "step" for mode in named.get("mode", ())):
        raise ValueError("mode: a search is of whole steps; leave it out")
    batch = global_batch if global_batch is not None else _global_batch(named, ranks)
    searched = [name for name in FREE if max(ranks) > 1 or name not in _SYNC_FIELDS]
    free = [name for name in searched if name not in named and _is_possible(name, named)]
    choices = {**{name: FREE[name] for name in free}, **several}
    if global_batch is not None or len(ranks) > 1:
        sizes = sorted({size for count in ranks if batch % count == 0 for size in divisors(batch // count)})
        divided = [name for name in DIVISION if name not in named and len(sizes) > 1]
        free += divided
        choices |= {name: tuple(sizes) for name in divided}
    choices = {name: choices[name] for name in (*FREE, *DIVISION, *several) if name in choices}
    if not choices and len(ranks) == 1:
        raise ValueError(
            "minimize: every option has one value, so nothing is left to choose; leave an option out, or give it several values"
        )
    space = Space(fixed=fixed, choices=choices, free=tuple(free), ranks=tuple(ranks), global_batch=batch)
    if not any(space._divisions(count) for count in ranks):
        raise ValueError(
            f"global_batch: {batch} sequences are not ranks x batch_size x accumulation of the named values; name others"
        )
    return space


def divisors(number: int) -> list[int]:
    """The divisors in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def spread(sizes: Sequence[int]) -> list[int]:
    """At most 16 of these divisors: where there are more, those up to 32,768 that are next to a power of two."""
    if len(sizes) <= _MOST_SIZES:
        return list(sizes)
    return sorted({min(sizes, key=lambda size: abs(math.log2(size) - power)) for power in range(_MOST_SIZES)})


def _global_batch(named: Values, ranks: Sequence[int]) -> int:
    """Sequences in a step where no global batch is named: those of the most ranks with the named values."""
    each = 1
    for name in DIVISION:
        values = named.get(name, (1,))
        if len(values) > 1:
            raise ValueError(f"{name}: its values make steps of different sizes; name the size: --global-batch 64")
        if not isinstance(values[0], int) or isinstance(values[0], bool) or values[0] < 1:
            raise ValueError(f"{name}: must be a whole number from 1 on, not {values[0]!r}")
        each *= values[0]
    return max(ranks) * each


def _is_possible(name: str, named: Values) -> bool:
    """Whether a free field has an effect beside what is named."""
    if name == "recompute_every":
        return any(value not in (None, "none") for value in named.get("recompute", RECOMPUTES))
    if name in _SYNC_FIELDS and name != "sync":
        return any(name not in needless({"sync": sync}) for sync in named.get("sync", OURS))
    return True


def _is_idle(point: Mapping[str, Any], name: str, choices: Mapping[str, Sequence[Any]]) -> bool:
    """Whether the point repeats another: without recomputation `name` has no effect, so only its first value counts."""
    return name in choices and point.get("recompute") in (None, "none") and point[name] != choices[name][0]
