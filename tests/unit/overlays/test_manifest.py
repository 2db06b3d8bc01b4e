"""A manifest says which functions, in which releases, and why; anything less is refused with its file name."""

import pytest

from dflash_verify.overlays.manifest import ManifestError, load_manifests, read_manifest

HEAD = """
title = "t"
why = "w"
upstream = []
remove_when = "r"
modes = ["width"]
"""
ONE, TWO = "1" * 32, "2" * 32


def target(**entries: str) -> str:
    lines = "\n".join(f'"{release}" = "{digest}"' for release, digest in entries.items())
    return f'[[targets]]\nfile = "vllm/a.py"\nfunction = "f"\nrole = "r"\n[targets.fingerprints]\n{lines}\n'


def read(tmp_path, text):
    path = tmp_path / "toy.toml"
    path.write_text(text)
    return read_manifest(path)


def test_a_complete_manifest_is_read(tmp_path):
    manifest = read(tmp_path, HEAD + target(**{"0.10.0": ONE, "0.9.0": TWO}))
    assert manifest.name == "toy"
    assert manifest.releases() == ["0.9.0", "0.10.0"]  # by number, not by letter
    assert manifest.targets[0].module == "vllm.a"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "targets"),
        (HEAD + target(**{"0.9.0": "123"}), "32 hexadecimal digits"),
        (HEAD + target(latest=ONE), "no release"),
        (HEAD + 'colour = "red"\n' + target(**{"0.9.0": ONE}), "colour"),
        (HEAD + target(**{"0.9.0": ONE}) + target(**{"0.10.0": ONE}), "different releases"),
        (HEAD + '[not_needed]\n"0.10.0" = "fixed"\n' + target(**{"0.9.0": ONE}), "no fingerprint tells"),
        (HEAD + '[not_needed]\n"0.10.0" = "fixed"\n' + target(**{"0.9.0": ONE, "0.10.0": ONE}), "only one of them"),
        (HEAD + target(**{"0.9.0": ONE}) + '[targets.absent]\n"0.9.0" = "gone"\n', "both present and absent"),
        (HEAD.replace("width", "always") + target(**{"0.9.0": ONE}), "modes"),
        (HEAD + "[[targets", "toy.toml"),
    ],
)
def test_an_unclear_manifest_is_refused(tmp_path, text, says):
    with pytest.raises(ManifestError, match=says) as error:
        read(tmp_path, text)
    assert "toy.toml" in str(error.value)


def test_an_empty_directory_is_an_incomplete_installation(tmp_path):
    with pytest.raises(ManifestError, match="incomplete"):
        load_manifests(tmp_path)


def test_every_shipped_manifest_describes_the_same_releases():
    manifests = load_manifests()
    assert {tuple(m.releases()) for m in manifests} == {("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")}


def test_every_wrapped_target_has_a_wrapper_and_every_wrapper_a_target():
    import importlib

    for manifest in load_manifests():
        wrappers = importlib.import_module(manifest.module).WRAPPERS
        assert set(wrappers) == {t.function for t in manifest.wrapped()}, manifest.name
