"""What a training step on several ranks will send: `expected_messages(config, transformer_parameters(model, precision))`."""

from collections.abc import Sequence

from trainstep.config.parallel import RanksConfig
from trainstep.costs.buckets import bytes_of_mib
from trainstep.costs.exchange import Exchange, ParameterSize
from trainstep.costs.gradient_sync import Message, step_messages


def expected_messages(config: RanksConfig, parameters: Sequence[ParameterSize]) -> tuple[Message, ...] | None:
    """Every message of a step; None where torch sends them. `parameters`: in the module's order."""
    exchange = exchange_of(config)
    return None if exchange is None else step_messages(exchange, parameters)


def exchange_of(config: RanksConfig) -> Exchange | None:
    """The config as the formulas of costs/ take it; None for strategies that are torch's."""
    run, sync, strategy = config.run, config.sync, config.sync.strategy
    if strategy.counterpart is not None:
        return None
    return Exchange(
        strategy=strategy,
        ranks=config.ranks,
        reduce_element_bytes=2 if sync.reduce_dtype == "bf16" else None,
        compute_element_bytes=2 if sync.compute_dtype == "bf16" else None,
        bucket_bytes=bytes_of_mib("bucket_mib", sync.bucket_mib),
        first_bucket_bytes=bytes_of_mib("first_bucket_mib", sync.first_bucket_mib),
        last_bucket_bytes=bytes_of_mib("last_bucket_mib", sync.last_bucket_mib),
        reshard_after_forward=sync.reshard_after_forward,
        ahead=sync.ahead,
        micro_batches=run.accumulation,
        clips=run.clip_grad_norm is not None,
        scales_loss=run.precision == "fp16_autocast",
    )
