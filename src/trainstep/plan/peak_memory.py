"""How many bytes a rank holds at the moments of a step on several ranks, and when most: by formula, each term named.

P: bytes of parameters, T: of those that are trained, N: ranks, with AdamW and gradients averaged in their own dtype.

    way                  parameters    gradients    state      for communication
    none, naive,
      overlapped         P             T            2 T        (copies to average in another dtype: naive two, overlapped all)
    flat, bucketed       P             T, always    2 T        -               gradients are views of the buckets, which stay
    sharded              P             T, always    about 2 T/N  what small parameters are packed in
    sharded_flat         P             T/N          2 T/N      up to two units' gradients on their way
    fsdp                 P/N           T/N          2 T/N      up to three units', and units that are whole at the time

Filling and flags are counted, and four bytes of AdamW's step counter a tensor. Not counted: what the allocator rounds up, the
batch, buffers of the module, workspaces of libraries. Activations are given, not guessed. While backward runs, activations go and
gradients come; ways in units hold most in between, where what a unit needs to be sent comes before what its blocks saved has paid
for it. Of the others both ends are among the moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from trainstep.config.parallel import RanksConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.plan.communication import exchange_of
from trainstep.plan.memory_terms import Terms, terms_of


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes at one moment. Inside the optimizer's step its state counts the update's temporary tensors too."""

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
    """The moments of a step, in order; all but the first of a step that is not the first one."""

    after_init: Held
    """Built and wrapped, before any step: no optimizer state."""
    after_forward: Held
    """Of the last micro-batch."""
    entering_backward: Held
    """With fsdp the next units are being gathered; otherwise as after forward."""
    in_backward: Held
    """Where a unit is sent and most is held, of ways in units; of others as entering backward."""
    before_sync: Held
    """The last gradient is there, and what synchronising it takes; no activations are left."""
    after_backward: Held
    """Gradients are synchronised."""
    in_step: Held
    """The optimizer is updating."""
    after_step: Held
    """And gradients are dropped."""

    @property
    def peak_point(self) -> str:
        """Name of the moment that holds most; the first of equals."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name).total_bytes)

    @property
    def peak(self) -> Held:
        """What is held then."""
        held: Held = getattr(self, self.peak_point)
        return held


def expected_memory(
    config: RanksConfig, parameters: Sequence[ParameterSize], *, rank: int = 0, activations_bytes: int = 0
) -> ExpectedMemory | None:
    """What this rank will hold; None for torch's own ways. `parameters`: of the module before it is wrapped, in its order.

    `activations_bytes`: what forward keeps for backward, measured or estimated; copies of weights that autocast makes are part of
    it. Blocks are taken to be alike in dtype, and run once.
    """
    exchange = exchange_of(config)
    if exchange is None:
        return None
    terms = terms_of(exchange, parameters, rank=rank, adamw=config.run.adamw)
    earlier = terms.whole_gradients_bytes if config.run.accumulation > 1 else 0
    entering = _held(
        terms, gradients=earlier, activations=activations_bytes, communication=terms.whole_entering_backward_bytes
    )
    sending = [
        _held(
            terms,
            gradients=one.gradients_bytes,
            activations=round(one.activations_share * activations_bytes),
            communication=one.communication_bytes,
        )
        for one in terms.sendings
    ]
    return ExpectedMemory(
        after_init=_held(terms, state=0, communication=terms.buffers_from_start_bytes),
        after_forward=_held(
            terms, gradients=earlier, activations=activations_bytes, communication=terms.whole_after_forward_bytes
        ),
        entering_backward=entering,
        in_backward=max(sending, key=lambda held: held.total_bytes, default=entering),
        before_sync=_held(terms, gradients=terms.gradients_before_sync_bytes, communication=terms.in_sync_bytes),
        after_backward=_held(terms, gradients=terms.gradients_bytes),
        in_step=_held(terms, gradients=terms.gradients_bytes, state=terms.state_bytes + terms.update_bytes),
        after_step=_held(terms),
    )


def _held(
    terms: Terms,
    *,
    gradients: int = 0,
    state: int | None = None,
    activations: int = 0,
    communication: int = 0,
) -> Held:
    """`gradients`, `communication`: beside what is held all the time."""
    first_step = state == 0
    return Held(
        parameters_bytes=terms.parameters_bytes,
        gradients_bytes=terms.kept_gradients_bytes + gradients,
        optimizer_state_bytes=terms.state_bytes if state is None else state,
        activations_bytes=activations,
        communication_bytes=communication + (0 if first_step else terms.buffers_bytes),
    )
