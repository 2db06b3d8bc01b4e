"""One real `vllm serve` on 127.0.0.1 with DFLASH_VERIFY_TOKENS=3, for all tests that leave it as it was."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_verify.cpu.models import Models, generate
from dflash_verify.cpu.server import Server, open_server

for name in [name for name in os.environ if name.startswith("DFLASH_")]:
    del os.environ[name]

WIDTH = 3


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return generate(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("server")
    with open_server(models, folder, environ={"DFLASH_VERIFY_TOKENS": str(WIDTH)}) as server:
        yield server
        server.stop()
