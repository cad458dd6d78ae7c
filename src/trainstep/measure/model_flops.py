"""The FLOPs of a step for its record: from shapes for the built-in model, by torch's counter for anyone's own."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.config.machine import matmul_dtype
from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.costs.transformer import CONVENTION, step_flops
from trainstep.records.facts import Fact, facts_of

_COUNTER = "torch.utils.flop_counter"
_COUNTER_CONVENTION = "every matmul and attention that torch's FLOP counter saw in one eager step, attention not halved"


def flops_facts(run: RunConfig, run_step: Callable[[], object]) -> dict[str, Fact]:
    """`model_flops` a step, with source, convention and the dtype of the matmuls. `run_step` runs one, to be counted."""
    if isinstance(run.model, ModelConfig):
        flops, source, convention = _from_shape(run, run.model), "shapes", CONVENTION
    else:
        flops, source, convention = _counted(run_step), _COUNTER, _COUNTER_CONVENTION
    return facts_of(
        model_flops=flops,
        flops_source=source,
        flops_convention=convention,
        flops_dtype=matmul_dtype(run.precision),
    )


def _from_shape(run: RunConfig, model: ModelConfig) -> int:
    return step_flops(
        run.mode,
        run.accumulation,
        layers=model.layers,
        d_model=model.d_model,
        d_ff=model.d_ff,
        vocab_size=model.vocab_size,
        batch_size=run.batch_size,
        context=run.context,
    )


def _counted(run_step: Callable[[], object]) -> int:
    """Compiled regions hide their ops from the counter: the counted step runs eagerly."""
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        run_step()
    return int(counter.get_total_flops())
