"""The CPU engine for every test below: prepared before anything imports vLLM, generated once."""

import os

import pytest

from dflash_verify.cpu import environment

# What the machine's owner has set for a server is not what these tests are about.
for name in [name for name in os.environ if name.startswith("DFLASH_")]:
    del os.environ[name]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
environment.activate()

from dflash_verify.cpu.models import Models, generate


def pytest_configure(config: pytest.Config) -> None:
    # pytest undoes the filter of cpu/interpreter.py.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return generate(tmp_path_factory.mktemp("models"))
