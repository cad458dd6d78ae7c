"""Some of the kills and damaged checkpoints; `python tests/attacks/full.py` runs all of them."""

import sys

import pytest

from attacks.attack import check
from attacks.checkpoints import Checkpoints
from attacks.rank_kills import RankKills
from attacks.torch_process import TorchProcess
from attacks.verb_kills import VerbKills

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("verb", ["sweep", "parallel", "profile", "tune"])
def test_a_killed_verb_loses_and_leaves_nothing(verb: str):
    """`bench` runs its cells as `sweep` does and writes its page as `profile` does."""
    check(VerbKills(verb), 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_checkpoints_are_refused(torch_process: TorchProcess):
    check(Checkpoints(torch_process), 3, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_are_named_by_the_others(torch_process: TorchProcess):
    check(RankKills(torch_process), 6, seed=2)
