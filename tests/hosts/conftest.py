import pathlib
import tempfile

import pytest

import programs
from hosts import Hosts


@pytest.fixture(scope="module")
def folder():
    """Below the build: each host has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir=programs.BIN.parent, prefix="hosts-") as name:
        yield pathlib.Path(name)


@pytest.fixture
def two():
    with Hosts(2) as made:
        yield made
