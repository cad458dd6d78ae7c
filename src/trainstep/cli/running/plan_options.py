"""The options of `trainstep plan` that search the best options or the largest value that fits, and the strategies that it plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from trainstep.cli.options import check_sync_options
from trainstep.config.parallel import SyncConfig
from trainstep.config.plan import planned_ranks
from trainstep.costs.strategies import BASELINE

_SEARCH = Group("To search", sort_key=3)
_MINIMIZE_HELP = (
    "time: search the fastest options that fit; memory: those that need least; ranks: the fewest ranks (1, 2, 4... up to --ranks) "
    "on which it fits, and the fastest options there. One value fixes an option, a list is a choice, and free are, if not named: "
    "sync, bucket_mib, reshard_after_forward, recompute, recompute_every, compile, capture, attention, ops, adamw and update; with "
    "--global-batch also batch_size and accumulation. Precision changes the mathematics, so it is chosen only from a list. Ranks "
    "are on one node; plan the result on several with --nodes."
)
_BATCH_HELP = (
    "With --minimize: sequences in a step of all ranks, which ranks, batch_size and accumulation divide; by default those of the "
    "named values."
)
_PAGE_HELP = "With --minimize: also write a page with the chart of memory against time to this file."
_CONFIG_HELP = (
    "With --minimize: also write the options to this TOML file, which bench (one rank) or parallel read with --config."
)
_FIT_HELP = (
    "Find the largest batch_size, context or layers that fits, by formula; it ends at a batch of 4,096, a context of 131,072 or "
    "1,024 layers and says 'at least'."
)
_VERIFY_HELP = "With --fit: also run one trial of the value on the GPUs here, as trainstep memory does."


@Parameter(name="*", group=_SEARCH)
@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What is searched, and where the result goes."""

    minimize: Annotated[str | None, Parameter(help=_MINIMIZE_HELP)] = None
    global_batch: Annotated[int | None, Parameter(help=_BATCH_HELP)] = None
    page: Annotated[Path | None, Parameter(help=_PAGE_HELP)] = None
    out_config: Annotated[Path | None, Parameter(help=_CONFIG_HELP)] = None

    fit: Annotated[str | None, Parameter(help=_FIT_HELP)] = None
    verify: Annotated[bool, Parameter(help=_VERIFY_HELP, negative=(), show_default=False)] = False

    def given(self) -> Mapping[str, Any]:
        """The options with a value, by name."""
        return {name: value for name, value in vars(self).items() if value not in (None, False)}


def planned_strategies(options: Mapping[str, Sequence[Any]], unnamed: Sequence[str] = (SyncConfig.name,)) -> list[Any]:
    """The parallel strategies of a grid's options, or `unnamed` where they name none; one rank has none.

    ValueError for a strategy on one rank, and for an option that none of the strategies has.
    """
    alone = all(ranks == 1 for ranks in planned_ranks(options))
    # The command line reads the name `none` as None.
    named = [BASELINE if name is None else name for name in options.get("sync", [BASELINE] if alone else unnamed)]
    if alone and named != [BASELINE]:
        raise ValueError("sync: has no effect on one rank; add --ranks 2 or more")
    check_sync_options(options, named)
    return named
