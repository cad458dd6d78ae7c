"""Loss scaling (Micikevicius 2018) whose ranks agree on whether a step is skipped.

With averaged gradients every rank sees the same overflow. With sharded ones only the rank that holds the part does: without a word
to the others it alone would skip the step and halve its scale.
"""

from typing import Any

import torch
from torch import Tensor

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks, ranks_of_default_group


class RankedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler; a gradient that is infinite or NaN on any rank makes all skip.

    `step` and `unscale_` send one fp32 number an optimizer and step (the maximum over ranks), so every rank must call them alike.
    The host does not wait for the device more often than torch's does: never with an optimizer that skips by itself.
    """

    def __init__(self, ranks: Ranks | None = None, **kwargs: Any) -> None:
        self.ranks = ranks or ranks_of_default_group()
        self.collectives = Collectives(self.ranks)
        super().__init__(self.ranks.device.type, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Called once a step whether `unscale_` is or not; a rank without a single gradient takes part too."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        worst = found_inf.clone()
        for mine in found.values():
            worst = torch.maximum(worst, mine.to(worst.device))
        self.collectives.all_reduce(worst, reduction="maximum", label="found_inf").wait()
        return {worst.device: worst}
