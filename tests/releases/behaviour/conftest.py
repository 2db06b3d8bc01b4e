"""Fixtures for checks that run on whichever vLLM is importable; test_releases.py starts them once per release."""

import os

import pytest

# Set by test_releases.py. The overlays must find the release by its fingerprints, so nothing else is told to them.
RELEASE = os.environ.get("VLLM_RELEASE_UNDER_TEST", "0.33.0")


def pytest_report_header(config):
    import vllm

    return f"vllm of {RELEASE}: {vllm.__file__}"


@pytest.fixture(autouse=True)
def no_pinned_memory(monkeypatch):
    """Pinning host memory takes a driver; the copies are the same without."""
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(torch_utils, "is_pin_memory_available", lambda: False)  # asked each time in 0.32.0


@pytest.fixture(scope="session")
def release() -> tuple[int, ...]:
    return tuple(int(part) for part in RELEASE.split("."))


@pytest.fixture
def applied():
    """Every overlay for a width, on the real modules; all off again afterwards."""
    from dflash_verify import overlays
    from dflash_verify.settings import load

    status = overlays.apply(load({"DFLASH_VERIFY_TOKENS": "3"}))
    assert status.release == RELEASE
    yield status
    overlays.revert()


@pytest.fixture
def make_config():
    """A real VllmConfig whose speculative config is a real SpeculativeConfig without the models it would load."""
    from dflash_verify.overlays.probes import probe_config

    return probe_config
