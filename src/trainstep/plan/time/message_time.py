"""Messages."""
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from trainstep.config.parallel import RanksConfig

@dataclass(frozen=True, kw_only=True)
class Added:
    time_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

@dataclass(frozen=True, kw_only=True)
class Exposed:
    phases: Mapping[str, Added] = field(default_factory=dict)
    def of(self, phase):
        return self.phases.get(phase, Added())
    @property
    def total(self):
        return Added(time_s=sum(a.time_s for a in self.phases.values()))

def exposed_messages(config, calibration, device):
    return Exposed()

def updated_share(config):
    from trainstep.costs.strategies import Part
    s=config.sync.strategy
    return 1/config.ranks if s.shards else 1.0
