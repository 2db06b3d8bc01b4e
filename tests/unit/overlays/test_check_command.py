"""`dflash-verify check`: what it says beyond the fingerprints."""

import json

import pytest
from click.testing import CliRunner

from dflash_verify.cli import main


@pytest.mark.parametrize(
    ("plugins", "width", "code", "said"),
    [
        (None, "3", 0, False),
        ("dflash_verify,other", "3", 0, False),
        ("other", "3", 1, True),
        ("", "auto", 1, True),
        ("other", "0", 0, True),  # stock vLLM was asked for, and will run
    ],
)
def test_an_allow_list_that_leaves_the_plugin_out_is_said(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, width: str, code: int, said: bool
) -> None:
    monkeypatch.setenv("DFLASH_VERIFY_TOKENS", width)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    result = CliRunner().invoke(main, ["check", "--json"], catch_exceptions=False)
    found = json.loads(result.output)
    assert result.exit_code == code
    assert found["ok"] == (code == 0)
    assert ("plugin" in found) == said
    assert all(overlay["status"] in ("needed", "not needed") for overlay in found["overlays"])
