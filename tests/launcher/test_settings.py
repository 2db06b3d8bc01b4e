"""The launcher's settings: what an operator may write, and the one sentence that answers a mistake."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launcher.errors import LaunchError  # noqa: E402
from launcher.hosts import Host, Result  # noqa: E402
from launcher.settings import DEFAULTS, PLUGIN_VARIABLES, Settings, gather, validate  # noqa: E402

from dflash_verify import settings as plugin  # noqa: E402
from launcher import dotenv, ranks, serve, state  # noqa: E402


def load(**changes: str) -> Settings:
    return validate(DEFAULTS | changes)


def refusal(**changes: str) -> str:
    with pytest.raises(LaunchError) as caught:
        load(**changes)
    return str(caught.value)


def test_the_example_file_says_what_the_defaults_are() -> None:
    assert dotenv.read(ROOT / ".env.example") == DEFAULTS


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=x", "x"),
        ("A = x y  ", "x y"),
        ("export A=x", "x"),
        ("A=", ""),
        ("A=x # a comment", "x"),
        ("A=x#y", "x#y"),
        ("A=# only a comment", ""),
        ("A=$HOME `id` $(id); id", "$HOME `id` $(id); id"),
        ("A='a \"b\" $c \\n'", 'a "b" $c \\n'),
        (r'A="a \"b\" $c \n \\ \x"', 'a "b" $c \n \\ \\x'),
        ("A='one\ntwo'  # after", "one\ntwo"),
        ('A="one\ntwo=3\n"', "one\ntwo=3\n"),
        ('A={"a": "b"}', '{"a": "b"}'),
        ("A=1\nA=2", "2"),
        ("\ufeffA=x\r\n", "x"),
        ("  # A=1\n  A=2", "2"),
    ],
)
def test_a_value_in_the_settings_file_arrives_unchanged(text: str, value: str) -> None:
    assert dotenv.parse(text) == {"A": value}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1\nnonsense", "line 2"),
        ("1A=x", "line 1"),
        ("A='x", "not closed"),
        ('A="x\\"', "not closed"),
        ("A='x' y", "closing '"),
        ("A=x\0", "NUL"),
    ],
)
def test_a_line_that_is_not_understood_is_named(text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)):
        dotenv.parse(text)


@given(st.text(st.characters(blacklist_characters="'\0\r", blacklist_categories=["Cs"])))
def test_any_text_survives_single_quotes(value: str) -> None:
    assert dotenv.parse(f"A='{value}'\nB=2") == {"A": value, "B": "2"}


def test_a_value_given_inline_wins_also_when_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DFLASH_VERIFY_TOKENS=3\nMODEL=from-file\nHF_HUB_OFFLINE=1\n")
    inline = {
        "DFLASH_VERIFY_TOKENS": "",
        "MODEL": "",
        "DFLASH_ESTIMATOR": "hazard",
        "HF_HUB_OFFLINE": "0",
        "SHELL": "x",
    }
    values = gather(tmp_path, inline)
    assert {name: values[name] for name in inline if name != "SHELL"} == {
        n: v for n, v in inline.items() if n != "SHELL"
    }
    assert "SHELL" not in values
    with pytest.raises(LaunchError, match=r"^MODEL is empty"):
        validate(values)


def test_an_unknown_name_in_the_file_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MAX_NUM_SEQ=3\n")
    with pytest.raises(LaunchError, match="did you mean MAX_NUM_SEQS"):
        gather(tmp_path, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NODES": "3"}, "NODES='3' is not accepted: use 1 or 2."),
        ({"NODES": ""}, "NODES is empty"),
        ({"EXECUTOR": "ray"}, "EXECUTOR=ray"),
        ({"RUNTIME": "host"}, "RUNTIME=host"),
        ({"RUNTIME": "podman"}, "docker or host"),
        ({"PORT": ""}, "PORT is empty"),
        ({"PORT": "0"}, "from 1 to 65535"),
        ({"PORT": "٣٣"}, "PORT='٣٣'"),
        ({"PORT": "1e3"}, "PORT='1e3'"),
        ({"PORT": "29501"}, "both 29501"),
        ({"MAX_NUM_SEQS": "a[$(touch pwned)]"}, "MAX_NUM_SEQS="),
        ({"MAX_NUM_SEQS": "-1"}, "MAX_NUM_SEQS="),
        ({"GPU_MEMORY_UTILIZATION": "1.1"}, "0.85"),
        ({"GPU_MEMORY_UTILIZATION": "0"}, "GPU_MEMORY_UTILIZATION="),
        ({"GPU_MEMORY_UTILIZATION": "nan"}, "GPU_MEMORY_UTILIZATION="),
        ({"TP_SIZE": "3"}, "cannot be split over 2 hosts"),
        ({"DRAFT_TP": "4"}, "use 1, or TP_SIZE"),
        ({"WORKER_HOST": "-oProxyCommand=touch pwned"}, "WORKER_HOST="),
        ({"WORKER_HOST": "a b"}, "WORKER_HOST="),
        ({"WORKER_HOST": ""}, "WORKER_HOST is empty"),
        ({"WORKER_HOST": "x@192.168.100.10"}, "give each host its own"),
        ({"HEAD_ADDR": "$(id)"}, "HEAD_ADDR="),
        ({"HEAD_IFACE": "eth0;id"}, "HEAD_IFACE="),
        ({"HEAD_RDMA": "a:1,b:2"}, "GID indices 1 and 2"),
        ({"HEAD_RDMA": "a b"}, "HEAD_RDMA="),
        ({"SSH_KEY": "/nowhere"}, "SSH_KEY=/nowhere is not a file"),
        ({"MODEL": " "}, "MODEL is empty"),
        ({"MODEL": "--trust-remote-code"}, "begins with a dash"),
        ({"EXTRA_ARGS": "--a 'b"}, "EXTRA_ARGS: no closing quotation"),
        ({"RESTARTS": "3"}, "cannot rejoin"),
        ({"HF_CACHE": "models"}, "HF_CACHE='models' is not accepted: use an absolute path"),
        ({"HF_CACHE": "/a:/etc"}, "HF_CACHE="),
        ({"SERVER_NAME": "a/b"}, "SERVER_NAME="),
        ({"DFLASH_TOKENS": ""}, "DFLASH_TOKENS is empty"),
        ({"DFLASH_TOKENS": "7.0"}, "DFLASH_TOKENS='7.0'"),
        ({"DFLASH_VERIFY_TOKENS": "3; touch pwned"}, "'3; touch pwned' is not a width: use 0 to 7"),
        ({"DFLASH_VERIFY_TOKENS": "9"}, "DFLASH_VERIFY_TOKENS=9 is wider than DFLASH_TOKENS=7"),
        ({"DFLASH_VERIFY_TOKENS": "auto:1,9"}, "wider"),
        ({"DFLASH_VERIFY_TOKENS": "auto:"}, "not a width"),
        ({"DFLASH_VERIFY_TOKENS": "3", "DRAFT_MODEL": ""}, "needs a drafter"),
        ({"DFLASH_BLOCK_VERIFY": "yes"}, "DFLASH_BLOCK_VERIFY='yes'"),
        ({"DFLASH_BLOCK_VERIFY": "1", "DRAFT_MODEL": ""}, "needs a drafter"),
        ({"DFLASH_MAX_GRAPHS": "-1"}, "DFLASH_MAX_GRAPHS='-1' is not accepted: use a whole number from 1"),
        ({"DFLASH_ESTIMATOR": "x"}, "DFLASH_ESTIMATOR='x' is not accepted: use class or hazard."),
        ({"DFLASH_COST_TABLE": "nope"}, "DFLASH_COST_TABLE='nope' is not accepted: use an absolute path"),
        (
            {"NODES": "1", "RUNTIME": "host", "DFLASH_COST_TABLE": "/nowhere/costs.json"},
            "DFLASH_COST_TABLE=/nowhere/costs.json is not a file",
        ),
        ({"BASE_IMAGE": "a b"}, "BASE_IMAGE='a b' is not accepted: use an image"),
        ({"BASE_IMAGE": "--privileged"}, "BASE_IMAGE="),
        ({"BASE_IMAGE": ""}, "BASE_IMAGE is empty"),
    ],
)
def test_a_value_that_cannot_be_used_is_answered_in_one_sentence(changes: dict[str, str], said: str) -> None:
    sentence = refusal(**changes)
    assert said in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize("inline", [True, False])
def test_a_misspelt_variable_of_the_plugin_is_named_with_the_nearest_also_without_a_width(
    tmp_path: Path, inline: bool
) -> None:
    name = "DFLASH_VERFY_TOKENS"
    (tmp_path / ".env").write_text("" if inline else f"{name}=3\n")
    with pytest.raises(LaunchError, match=rf"^{name}.*did you mean DFLASH_VERIFY_TOKENS\?"):
        gather(tmp_path, {name: "3"} if inline else {})


def test_the_launcher_knows_every_variable_of_the_plugin() -> None:
    assert set(PLUGIN_VARIABLES) == set(plugin.names())


PLAIN = ["0", "1", "2", "00", "7", "255", "256", "3600", "3601", "100000", "100001", "1000000000"]
PLAIN += [
    "-1",
    "+1",
    "1.0",
    "1_0",
    "٣",
    "x",
    "yes",
    "true",
    "class",
    "hazard",
    "Hazard",
    "auto",
    "auto:1,3",
    "auto:",
    "/a b/c",
]


@pytest.mark.parametrize("name", sorted(set(plugin.names())))
def test_the_launcher_and_the_plugin_accept_the_same_values(name: str) -> None:
    ours, theirs = set(), set()
    for value in PLAIN:
        try:
            load(**{"DFLASH_TOKENS": "255", name: value})
            ours.add(value)
        except LaunchError:
            pass
        try:
            plugin.load({name: value})
            theirs.add(value)
        except plugin.SettingsError:
            pass
    # Of paths the plugin takes any text; in a container a relative one leads nowhere. DFLASH_VENV is for this host only.
    if "/a b/c" in theirs and name != "DFLASH_VENV":
        theirs = {value for value in theirs if value.startswith("/")}
    assert ours == theirs
    assert ours


def test_what_has_a_value_in_the_example_file_needs_one_but_for_the_drafter() -> None:
    assert "needs one, but for DRAFT_MODEL" in (ROOT / ".env.example").read_text().replace("\n# ", " ")
    for name in (name for name, value in DEFAULTS.items() if value):
        if name == "DRAFT_MODEL":
            assert load(DRAFT_MODEL="").draft_tokens == 0
        else:
            assert refusal(**{name: ""}).startswith(f"{name} is empty")


@pytest.mark.parametrize(
    "name", ["vllm/vllm-openai:v0.33.0", "localhost:5000/a_b/c--d@sha256:" + "0" * 64, "0a1b2c3d4e5f"]
)
def test_an_image_is_named_as_docker_names_them(name: str) -> None:
    assert load(BASE_IMAGE=name)["BASE_IMAGE"] == name


@pytest.mark.parametrize("advice", ["Run 'docker run --help' for more information", "See 'docker run --help'."])
def test_dockers_own_reason_is_shown_and_not_its_advice_to_read_the_help(advice: str) -> None:
    reason = "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    said = Host("head").complaint(Result(125, "", f"{reason}\n\n{advice}"), "planning in the image")
    assert reason in said
    assert "--help" not in said


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody may write, also not root")
def test_a_clone_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(LaunchError, match=r"^/sys/kernel/\.env cannot be written \(.*\): .*\.$"):
        serve.make_env_file(Path("/sys/kernel"))


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody may write, also not root")
def test_a_state_folder_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/sys/kernel")
    with (
        pytest.raises(LaunchError, match=r"^/sys/kernel/vllm-launcher cannot be written \(.*\): .*\.$"),
        state.lock(take_over=False),
    ):
        pass


@hypothesis_settings(deadline=None)
@given(st.sampled_from(sorted(DEFAULTS)), st.text())
def test_any_text_in_any_setting_gives_commands_or_one_sentence(name: str, text: str) -> None:
    try:
        made = ranks.make(load(**{name: text.replace("\0", "")}), None)
    except LaunchError as error:
        assert str(error).endswith(".")
    else:
        assert [rank.host.rank for rank in made] == list(range(len(made)))


@pytest.mark.parametrize("value", ["", "0", "00", " "])
def test_no_width_means_no_plugin(value: str) -> None:
    made = load(DFLASH_VERIFY_TOKENS=value, DFLASH_MAX_GRAPHS="100")
    assert not made.plugin_active
    assert made.plugin_environment == {}


def test_block_verification_alone_brings_the_plugin() -> None:
    assert load(DFLASH_BLOCK_VERIFY="1").plugin_environment == {"DFLASH_BLOCK_VERIFY": "1", "DFLASH_TOKENS": "7"}


def test_every_variable_of_the_plugin_is_passed_on_when_a_width_is_active() -> None:
    made = load(DFLASH_VERIFY_TOKENS="auto:1,3", DFLASH_MAX_GRAPHS="100", DFLASH_VENV="/x", DFLASH_COST_TABLE=" ")
    assert made.plugin_environment == {
        "DFLASH_MAX_GRAPHS": "100",
        "DFLASH_TOKENS": "7",
        "DFLASH_VERIFY_TOKENS": "auto:1,3",
    }


@pytest.mark.parametrize(
    ("extra", "key"),
    [("--api-key k", "k"), ("--api-key=k", "k"), ("", "from-env"), ("--seed 1 --api-key 'a b'", "a b")],
)
def test_the_api_key_is_known_and_never_printed(extra: str, key: str) -> None:
    made = load(EXTRA_ARGS=extra, VLLM_API_KEY="from-env", HF_TOKEN="hf_x", HF_SECRET="s3")
    assert made.api_key == key
    for rank in ranks.make(made, None):
        shown = rank.command(shown=True)
        for secret in (f"api-key {key}", f"api-key={key}", f"'{key}'", "from-env", "hf_x", "s3"):
            assert secret not in shown
        assert "export HF_TOKEN=****" in shown
    assert "s3" not in repr(made)
