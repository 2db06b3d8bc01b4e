"""Every DFLASH_ variable: what is accepted, and one sentence for everything else."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_verify.plugin import SWITCHES, register
from dflash_verify.settings import Settings, SettingsError, VerifyTokens, load, names


def sentence(**environ: str) -> str:
    with pytest.raises(SettingsError) as error:
        load(environ)
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("value", ["", " ", "0", "00", "\t"])
def test_unset_blank_and_zero_are_stock(value: str) -> None:
    settings = load({"DFLASH_VERIFY_TOKENS": value})
    assert not settings.active
    assert settings == load({})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", VerifyTokens("static", (3,))),
        (" 7 ", VerifyTokens("static", (7,))),
        ("auto", VerifyTokens("auto")),
        ("AUTO", VerifyTokens("auto")),
        ("auto:7,1, 3,3", VerifyTokens("auto", (1, 3, 7))),
        ("auto:0,3", VerifyTokens("auto", (0, 3))),
    ],
)
def test_modes(value: str, expected: VerifyTokens) -> None:
    settings = load({"DFLASH_VERIFY_TOKENS": value})
    assert settings.verify_tokens == expected
    assert settings.width_active
    assert VerifyTokens.parse(str(settings.verify_tokens)) == expected


@pytest.mark.parametrize(
    "value",
    ["-1", "3.0", "3; touch pwned", "auto:", "auto:,", "auto 3", "1_0", "٣", "256", "999999999999", "true", "3,7"],
)
def test_a_bad_width_is_one_sentence_with_name_value_and_remedy(value: str) -> None:
    text = sentence(DFLASH_VERIFY_TOKENS=value)
    assert text.startswith(f"DFLASH_VERIFY_TOKENS={value!r} is not accepted: set it to 0")
    assert "auto" in text


def test_block_verification_alone_makes_the_plugin_active_but_no_width() -> None:
    settings = load({"DFLASH_BLOCK_VERIFY": "1"})
    assert settings.active
    assert not settings.width_active


@pytest.mark.parametrize("value", ["yes", "2", "true", "on", "01"])
def test_a_switch_is_exactly_0_or_1(value: str) -> None:
    assert repr(value) in sentence(DFLASH_BLOCK_VERIFY=value)


def test_an_unknown_name_is_refused_with_the_nearest_known_one_when_a_width_is_active() -> None:
    text = sentence(DFLASH_VERIFY_TOKENS="3", DFLASH_VERFY_STRICT="0")
    assert "DFLASH_VERFY_STRICT" in text
    assert "did you mean DFLASH_VERIFY_STRICT?" in text


def test_an_unknown_name_never_stops_stock_vllm() -> None:
    assert not load({"DFLASH_VERFY_TOKENS": "3", "DFLASH_VERIFY_TOKENS": "0"}).active


def test_blank_is_unset_for_every_variable() -> None:
    # docker run -e NAME and compose pass blanks; float('') once killed an engine of another kit.
    assert load(dict.fromkeys(names(), "  ")) == Settings()


def test_other_prefixes_are_not_read() -> None:
    assert load({"VERIFY_TOKENS": "3", "dflash_verify_tokens": "3", "XDFLASH_VERIFY_TOKENS": "3"}) == Settings()


@given(st.dictionaries(st.sampled_from(names()), st.text() | st.text(string.printable) | st.text("0123456789auto:, -")))
def test_any_text_in_any_variable_gives_settings_or_one_sentence(environ: dict[str, str]) -> None:
    try:
        load(environ)
    except SettingsError as error:
        assert str(error).count("DFLASH_") >= 1
        assert str(error).endswith(".")
        assert "\n" not in str(error)


def test_a_command_refuses_an_unknown_name_also_in_stock_mode() -> None:
    with pytest.raises(SettingsError, match=r"did you mean DFLASH_VERIFY_TOKENS\?"):
        load({"DFLASH_VERFY_TOKENS": "3"}, check_names=True)


def test_a_name_that_is_near_none_gets_no_absurd_guess() -> None:
    assert "did you mean" not in sentence(DFLASH_VERIFY_TOKENS="3", DFLASH_QQQ="1")


def test_a_long_value_is_not_echoed_in_full() -> None:
    assert len(sentence(DFLASH_VERIFY_TOKENS="9" * 5000)) < 300


@pytest.mark.parametrize(
    ("name", "said"), [("DFLASH_VERFY_TOKENS", True), ("DFLASH_FOO", False), ("DFLASH_TOKENS", False)]
)
def test_a_misspelt_switch_alone_is_a_warning_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, said: bool
) -> None:
    for known in [*names(), name]:
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, "3")
    register()
    assert ("did you mean DFLASH_VERIFY_TOKENS?" in caplog.text) == said


def test_no_known_variable_is_taken_for_a_misspelt_switch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for known in names():
        monkeypatch.delenv(known, raising=False)
        if known not in SWITCHES:
            monkeypatch.setenv(known, "1")
    register()
    assert not caplog.text
