"""A few of the kills and of the damaged checkpoints; all of them: python tests/attacks/full.py."""

import sys

import pytest

from attacks.attack import check
from attacks.checkpoints import Checkpoints
from attacks.rank_kills import RankKills
from attacks.torch_process import TorchProcess
from attacks.verb_kills import COMMANDS, VerbKills

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")


def test_damaged_checkpoints(torch_process: TorchProcess):
    check(Checkpoints(torch_process), 3)


def test_killed_ranks(torch_process: TorchProcess):
    check(RankKills(torch_process), 2, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("verb", COMMANDS)
def test_killed_verbs(verb: str):
    check(VerbKills(verb), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_damaged_checkpoints(torch_process: TorchProcess):
    check(Checkpoints(torch_process), 24, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_killed_ranks(torch_process: TorchProcess):
    check(RankKills(torch_process), 12, seed=2)
