"""The process that forks all readers, and the one that forks functions with torch; each takes seconds to start."""

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
