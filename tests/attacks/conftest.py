"""One process that forks the readers of all attacks here, and one that forks what needs torch: they take seconds to start."""

from collections.abc import Iterator

import pytest

from attacks.reader import Readers
from attacks.torch_process import TorchProcess


@pytest.fixture(scope="session")
def readers() -> Iterator[Readers]:
    started = Readers()
    yield started
    started.close()


@pytest.fixture(scope="session")
def torch_process() -> Iterator[TorchProcess]:
    started = TorchProcess()
    yield started
    started.close()
