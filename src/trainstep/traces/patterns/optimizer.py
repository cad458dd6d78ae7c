"""Finds an Adam that updates one tensor after the other (`addcdiv_`), or on a GPU by foreach, with a kernel for each op.

On a CPU foreach updates one tensor after the other, too. Least time: one pass over parameter, gradient and two moments, 28 bytes
per element, at the step's own rate of memory. torch writes no shapes for lists of more than 30 tensors; since foreach moves 84
bytes per element, the least is then a third of the measured time.
"""

import math
from collections.abc import Iterator

from trainstep.config.run import Phase
from trainstep.traces.patterns.pattern import FUSED_ADAMW, OPTIMIZER, Instead, Pattern
from trainstep.traces.patterns.step_ops import NOTHING, UPDATE, Shape, StepOps, first, first_list

_ADAM_BYTES, _FOREACH_BYTES = 28, 84
_UPDATE_OF_ONE = "aten::addcdiv_"
_FOREACH_UPDATE = "aten::_foreach_addcdiv_"
_LEAST_TENSORS = 8
_MOST_WITH_SHAPES = 30
"""The most tensors in a list for which torch writes shapes."""


def by_tensor(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of such updates, all steps together."""
    cost, least_ns, tensors, is_foreach, is_without = NOTHING, 0.0, 0, False, False
    shapes: list[Shape] = []
    dtypes: set[str] = set()
    for nesting in ops.nestings:
        for update in nesting.ranges:
            if not (update.annotation and update.name.startswith(UPDATE)):
                continue
            inside = [opened for opened in nesting.ranges if ops.is_of_update(opened, update)]
            own = [first(opened) for opened in inside if opened.name == _UPDATE_OF_ONE]
            lists = not own and ops.on_device and "Adam" in update.name
            if lists:
                own = [shape for opened in inside if opened.name == _FOREACH_UPDATE for shape in first_list(opened)]
            without = lists and any(opened.name == _FOREACH_UPDATE and not first_list(opened) for opened in inside)
            if without or len(own) >= _LEAST_TENSORS:
                is_without |= without
                is_foreach |= lists
                whole = sum((ops.own.get(id(opened), NOTHING) for opened in inside), NOTHING)
                cost += whole
                bytes_ns = _ADAM_BYTES * sum(map(math.prod, own)) / ops.bytes_per_ns
                least_ns += whole.time_ns * _ADAM_BYTES / _FOREACH_BYTES if without else bytes_ns
                tensors += len(own) or 1
                shapes += own
                dtypes |= {opened.dtypes[0] for opened in inside if opened.name == _UPDATE_OF_ONE and opened.dtypes}
    if not tensors:
        return
    way = "by foreach, a pass over memory for each op" if is_foreach else "one after the other"
    many = f"more than {_MOST_WITH_SHAPES}" if is_without else f"{tensors / ops.steps:,.0f}"
    is_fp32 = bool(dtypes) and dtypes == {"float"}
    instead = (Instead(FUSED_ADAMW, tuple(shapes), "float", 1),) if is_fp32 and not is_without else ()
    yield Pattern(
        name=OPTIMIZER,
        calls=tensors,
        costs={str(Phase.OPTIMIZER): cost},
        least_ns=least_ns,
        what=f"{many} tensors are updated {way}",
        instead=instead,
    )
