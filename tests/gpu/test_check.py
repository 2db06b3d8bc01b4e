"""On a machine with a GPU: the self-check runs the kernel-facing overlays on the device."""

import json

import pytest
from click.testing import CliRunner

from dflash_verify.cli import main

pytestmark = pytest.mark.gpu


def test_every_kernel_facing_overlay_gives_stocks_results_on_the_device() -> None:
    result = CliRunner().invoke(main, ["check", "--gpu", "--json"], catch_exceptions=False)
    found = json.loads(result.output)
    assert found["ok"], [probe for probe in found["gpu"] if not probe["ok"]]
    assert len(found["gpu"]) >= 3
