"""The options of `trainstep explain` that prove what it predicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

_PROOF = Group("To prove", sort_key=3)

_PROVE_HELP = (
    "Then apply the changes, one at a time and together: each is interleaved with the original step in fresh processes, and its "
    "losses are checked. Predicted and measured gain stand side by side. Records are in runs/explain-prove.jsonl or --out, and the "
    "same command goes on where it stopped. If the records have several steps, it takes the one furthest above its floor. If they "
    "are of a run of your own script, the script is started again, for some steps each time, and changed from outside as by run "
    "--apply; under --budget-minutes its changes may have two rounds each, so that there is time for all together."
)
_CONFIG_HELP = "With --prove: write the winning options to this TOML file, which bench or parallel read with --config."
_PRECISION_HELP = "With --prove: precisions that may be tried, as bf16_autocast,bf16_master; they change the losses."
_BATCH_HELP = "With --prove: batch sizes that may be tried, as 8,16, by their time per token; they change the losses."
_PROCESSES_HELP = (
    "With --prove: fresh processes for each side of a comparison; by default as bench, and with --budget-minutes 6, the fewest "
    "that give a verdict."
)
_STEPS_HELP = (
    "With --prove of your own script: steps up to the end of a process's first window, by default 40, of which 10 are warm-ups; "
    "it may have further windows."
)


@Parameter(name="*", group=_PROOF)
@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """What may be tried, and where the result goes."""

    prove: Annotated[bool, Parameter(help=_PROVE_HELP, negative=(), show_default=False)] = False
    out_config: Annotated[Path | None, Parameter(help=_CONFIG_HELP)] = None
    allow_precision: Annotated[str | None, Parameter(help=_PRECISION_HELP)] = None
    allow_batch_size: Annotated[str | None, Parameter(help=_BATCH_HELP)] = None
    processes: Annotated[int | None, Parameter(help=_PROCESSES_HELP)] = None
    script_steps: Annotated[int | None, Parameter(help=_STEPS_HELP)] = None

    def given(self) -> Mapping[str, Any]:
        """The options with a value, by name."""
        return {name: value for name, value in vars(self).items() if value not in (None, False)}
