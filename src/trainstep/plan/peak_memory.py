"""Computes by formula the bytes that a rank holds at the moments of a step, and the messages that it sends.

    expected_memory(config, parameters, rank=0, activations_bytes=...).peak
    expected_messages(config, parameters)            # parameters: transformer_parameters(model, precision)

P: bytes of parameters, T: bytes of trained parameters, N: ranks, or those of a group (shard_ranks). The optimizer is AdamW, and
gradients are averaged in their own dtype. With bf16_master the state is 12 bytes for each element that a rank updates: 6 T, or
6 T/N. With update in_backward gradients are those of one block, or of two buckets.

    strategy             parameters    gradients    state         for communication
    none, naive,
      overlapped         P             T            2 T           (copies to average in another dtype: naive two, overlapped all)
    flat, bucketed       P             T, always    2 T           -   gradients are views of the buckets, which stay
      in_place           P             T            2 T           -   gradients are averaged where they are
    sharded              P             T, always    about 2 T/N   the buffers in which small parameters are packed
    sharded_flat         P             T/N          2 T/N         up to two units' gradients under way
    fsdp                 P/N           T/N          2 T/N         up to three units', and the units gathered at the time

Padding and flags are counted, and four bytes per tensor for AdamW's step counter. Not counted are what the allocator rounds up, the
batch, the module's buffers, and workspaces of libraries. Activations are given, not estimated.

While backward runs, activations go and gradients come. Strategies with units hold most in between: a unit takes its buffers
for sending before its blocks have freed what they saved. For the other strategies, both ends of backward are among the moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from trainstep.config.parallel import RanksConfig
from trainstep.config.run import RunConfig
from trainstep.costs.buckets import bytes_of_mib
from trainstep.costs.exchange import Exchange, ParameterSize
from trainstep.costs.gradient_sync import Message, step_messages
from trainstep.plan.memory_terms import Terms, terms_of
from trainstep.plan.optimizer_state import Optimizer


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes held at one moment. In the optimizer's step, its state includes the update's temporary tensors."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    communication_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class ExpectedMemory:
    """The moments of a step, in order. All but `after_init` are of a step after the first."""

    after_init: Held
    """Built and wrapped, before any step: no optimizer state but masters."""
    after_forward: Held
    """After the last micro-batch's forward."""
    entering_backward: Held
    """As after forward; with fsdp the next units are being gathered."""
    in_backward: Held
    """When a unit is sent, or updated, and most is held; for strategies without units as entering backward."""
    before_sync: Held
    """The last gradient is complete, with the buffers to synchronise it; no activations are left."""
    after_backward: Held
    """Gradients are synchronised."""
    in_step: Held
    """The optimizer is updating."""
    after_step: Held
    """Gradients are freed."""

    @property
    def peak_point(self) -> str:
        """Name of the moment at which most is held; of equal moments the first."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name).total_bytes)

    @property
    def peak(self) -> Held:
        """The bytes at the peak."""
        peak: Held = getattr(self, self.peak_point)
        return peak


def expected_memory(
    config: RanksConfig, parameters: Sequence[ParameterSize], *, rank: int = 0, activations_bytes: int = 0
) -> ExpectedMemory | None:
    """What this rank will hold; None for torch's own strategies. Blocks are assumed to share a dtype and to run once.

    `parameters`: of the module before it is wrapped, in its order. `activations_bytes`: what forward keeps for backward, measured
    or estimated, with the copies of weights that autocast makes.
    """
    exchange = exchange_of(config)
    if exchange is None:
        return None
    run = config.run
    optimizer = Optimizer(
        adamw=run.adamw,
        masters=run.precision == "bf16_master",
        in_backward=run.updates_in_backward,
        by_bucket=run.update == "by_bucket" and config.sync.strategy.communicates,
    )
    terms = terms_of(exchange, parameters, rank=rank, optimizer=optimizer)
    earlier = terms.whole_gradients_bytes if config.run.accumulation > 1 else 0
    entering = _held(
        terms, gradients=earlier, activations=activations_bytes, communication=terms.whole_entering_backward_bytes
    )
    sendings = [
        _held(
            terms,
            gradients=sending.gradients_bytes,
            activations=round(sending.activations_share * activations_bytes),
            communication=sending.communication_bytes,
        )
        for sending in terms.sendings
    ]
    return ExpectedMemory(
        after_init=Held(
            parameters_bytes=terms.parameters_bytes,
            gradients_bytes=terms.kept_gradients_bytes,
            optimizer_state_bytes=terms.state.from_start,
            activations_bytes=0,
            communication_bytes=terms.buffers_from_start_bytes,
        ),
        after_forward=_held(
            terms, gradients=earlier, activations=activations_bytes, communication=terms.whole_after_forward_bytes
        ),
        entering_backward=entering,
        in_backward=max(sendings, key=lambda moment: moment.total_bytes, default=entering),
        before_sync=_held(terms, gradients=terms.gradients_before_sync_bytes, communication=terms.in_sync_bytes),
        after_backward=_held(terms, gradients=terms.gradients_bytes, communication=terms.after_sync_bytes),
        in_step=_held(
            terms,
            gradients=terms.gradients_bytes,
            temporary=terms.state.in_update,
            communication=terms.after_sync_bytes,
        ),
        after_step=_held(terms),
    )


def expected_messages(config: RanksConfig, parameters: Sequence[ParameterSize]) -> tuple[Message, ...] | None:
    """Every message of a step; None if torch sends them. `parameters`: in the module's order."""
    exchange = exchange_of(config)
    return None if exchange is None else step_messages(exchange, parameters)


def exchange_of(config: RanksConfig) -> Exchange | None:
    """The config in the form that the formulas of costs/ take; None for torch's own strategies."""
    run, sync, strategy = config.run, config.sync, config.sync.strategy
    if strategy.counterpart is not None:
        return None
    return Exchange(
        strategy=strategy,
        ranks=config.ranks,
        reduce_element_bytes={"own": None, "bf16": 2, "fp32": 4}[sync.reduce_dtype],
        compute_element_bytes=2 if sync.compute_dtype == "bf16" else None,
        bucket_bytes=bytes_of_mib("bucket_mib", sync.bucket_mib),
        first_bucket_bytes=bytes_of_mib("first_bucket_mib", sync.first_bucket_mib),
        last_bucket_bytes=bytes_of_mib("last_bucket_mib", sync.last_bucket_mib),
        in_place=sync.in_place,
        shard_ranks=sync.shard_ranks if strategy.communicates else None,
        reshard_after_forward=sync.reshard_after_forward,
        ahead=sync.ahead,
        micro_batches=run.accumulation,
        clips=run.clip_grad_norm is not None,
        scales_loss=run.precision == "fp16_autocast",
    )


def computed_run(config: RanksConfig) -> RunConfig:
    """The run in the dtype that the model computes in, which fsdp may choose: autocast then has nothing to cast either."""
    return replace(config.run, precision="bf16") if config.sync.compute_dtype == "bf16" else config.run


def _held(
    terms: Terms, *, gradients: int = 0, temporary: int = 0, activations: int = 0, communication: int = 0
) -> Held:
    """The bytes at a moment. `gradients`, `temporary` (of the update) and `communication` are added to what is always held."""
    return Held(
        parameters_bytes=terms.parameters_bytes,
        gradients_bytes=terms.kept_gradients_bytes + gradients,
        optimizer_state_bytes=terms.state.whole + temporary,
        activations_bytes=activations,
        communication_bytes=terms.buffers_bytes + communication,
    )
