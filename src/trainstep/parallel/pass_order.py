"""Which units a pass needs next, and which a backward is done with, at each module on its way: as the last whole forward went.

Worked out when a forward goes another way, which is seldom, and looked up at every module, which is what the host must be quick at.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from trainstep.parallel.fsdp_unit import FSDPUnit

UnitsAt = Mapping[nn.Module, Sequence[FSDPUnit]]


class PassOrder:
    """`needs`: the units that each trigger's forward needs, first the outermost module's, which backward needs to its end.
    `ahead`: how many triggers' units come next."""

    def __init__(self, needs: UnitsAt, *, ahead: int) -> None:
        self._needs = needs
        self._ahead = ahead
        self._triggers: Sequence[nn.Module] = ()
        self.learn(list(needs))

    def learn(self, triggers: Sequence[nn.Module]) -> None:
        """A forward of the outermost module came by these, in this order."""
        if triggers == self._triggers:
            return
        self._triggers = triggers
        self.last = triggers[-1]
        """The trigger whose backward begins where forward ends."""
        self.next_in_forward: UnitsAt = self._next(triggers)
        self.next_in_backward: UnitsAt = self._next(triggers[::-1])
        self.behind_in_backward: UnitsAt = self._behind(triggers[::-1])
        """Units of triggers that backward has passed, without those that this trigger or the outermost module needs."""

    def _next(self, triggers: Sequence[nn.Module]) -> UnitsAt:
        found: dict[nn.Module, list[FSDPUnit]] = {}
        for place, trigger in enumerate(triggers, start=1):  # one that comes twice counts where it comes first
            following = triggers[place : place + self._ahead]
            found.setdefault(trigger, [unit for each in following for unit in self._needs[each]])
        return found

    def _behind(self, triggers: Sequence[nn.Module]) -> UnitsAt:
        found: dict[nn.Module, list[FSDPUnit]] = {}
        behind: dict[FSDPUnit, None] = {}
        outermost = triggers[-1]
        for trigger in triggers[:-1]:
            found.setdefault(trigger, [unit for unit in behind if unit not in self._needs[trigger]])
            behind.update((unit, None) for unit in self._needs[trigger] if unit not in self._needs[outermost])
        return found
