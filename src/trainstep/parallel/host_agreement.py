"""Ranks that do the same: the largest of all ranks' numbers, found by the hosts alone while the GPUs work.

    agree = HostAgreement(ranks)
    if agree(0 if ready else 1) == 0: ...      # every rank is ready

CapturedStep asks so at every step, since ranks must capture together, and a rank must not launch a graph while another runs its
step as it is and finds that fewer parameters were used. A dead rank ends the question, and with it the step of all.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks


class HostAgreement:
    """A message of one number on gloo. On NCCL it has a group of its own, so every rank must make it, in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        group = ranks.group
        if group is not None and dist.get_backend(group) != "gloo":
            group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._collectives = Collectives(replace(ranks, group=group, device=torch.device("cpu")))
        self._watch = ranks.watch if group is not ranks.group else None

    def __call__(self, number: int) -> int:
        """The largest number of all ranks. Waits for all of them."""
        agreed = torch.tensor(number)
        if self._watch is not None:  # which would hear of no message while graphs send them
            self._watch.progress.called("all_reduce agreement")
        self._collectives.all_reduce(agreed, reduction="maximum", label="agreement").wait()
        return int(agreed)
