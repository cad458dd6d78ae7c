"""One process that forks the readers of all attacks here: it takes seconds to start."""

from collections.abc import Iterator

import pytest

from attacks.reader import Readers


@pytest.fixture(scope="session")
def readers() -> Iterator[Readers]:
    started = Readers()
    yield started
    started.close()
