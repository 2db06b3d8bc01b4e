"""`dflash-verify verify-gain` prints exact acceptance lengths for recorded probabilities, and refuses what is not one."""

import itertools
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dflash_verify.cli import main
from dflash_verify.verify import expected_accepted, transport_bound

TARGET = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]])
DRAFT = np.array([[0.2, 0.3, 0.5], [0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])


def record(path: Path, steps: int = 4000, **changes: np.ndarray) -> Path:
    """`steps` blocks drawn from DRAFT, four to a request; rows ignore earlier tokens, so exact values are known."""
    rng = np.random.default_rng(0)
    arrays = {
        "target": np.broadcast_to(TARGET, (steps, 4, 3)),
        "draft": np.broadcast_to(DRAFT, (steps, 3, 3)),
        "draft_tokens": np.stack([rng.choice(3, size=steps, p=row) for row in DRAFT], axis=1),
        "request": np.arange(steps) // 4,
    }
    np.savez(path, **{**arrays, **changes})
    return path


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["verify-gain", *map(str, args)])
    return result.exit_code, result.output


def test_the_lengths_are_those_of_the_enumeration(tmp_path: Path) -> None:
    code, output = run(record(tmp_path / "steps.npz"), "--json")
    assert code == 0, output
    report = json.loads(output)
    assert report["steps"] == 4000
    assert [row["width"] for row in report["widths"]] == [1, 2, 3]
    for row in report["widths"]:
        width = row["width"]
        args = (TARGET[: width + 1], DRAFT[:width])
        # What is left is the draw of the drafts before the last one: three half-widths of the 95 % interval, twice over.
        slack = 1e-12 if width == 1 else 6 * 1.0 / np.sqrt(4000)
        assert row["token_wise"] == pytest.approx(1 + expected_accepted(*args, "token"), abs=slack)
        assert row["block"] == pytest.approx(1 + expected_accepted(*args, "block"), abs=slack)
        assert row["bound"] == pytest.approx(1 + transport_bound(*args), abs=2 * slack)
        exact_gain = expected_accepted(*args, "block") - expected_accepted(*args, "token")
        assert abs(row["gain_tokens"] - exact_gain) <= 1e-12 + 2 * row["gain_tokens_95"], "about four standard errors"
        assert row["token_wise"] <= row["block"] <= row["bound"]


def test_the_recording_that_comes_with_the_bench_shows_a_gain_that_grows_with_the_width() -> None:
    code, output = run(Path(__file__).resolve().parents[3] / "bench" / "block" / "steps.npz", "--json")
    assert code == 0, output
    gains = [row["gain_tokens"] for row in json.loads(output)["widths"]]
    assert len(gains) == 7
    assert abs(gains[0]) < 1e-12, "one draft: both are maximal couplings"
    assert all(wider > narrower for narrower, wider in itertools.pairwise(gains))


def test_the_table_names_every_width(tmp_path: Path) -> None:
    code, output = run(record(tmp_path / "steps.npz", steps=8))
    assert code == 0, output
    for heading in ("width", "token-wise", "block", "bound"):
        assert heading in output


def test_greedy_drafts_are_said_to_gain_nothing(tmp_path: Path) -> None:
    greedy = np.broadcast_to(np.eye(3)[:3], (50, 3, 3))
    code, output = run(
        record(tmp_path / "steps.npz", steps=50, draft=greedy, draft_tokens=np.tile(np.arange(3), (50, 1)))
    )
    assert code == 0, output
    assert "No gain" in output


def test_the_row_after_the_last_draft_may_be_left_out(tmp_path: Path) -> None:
    with_row = run(record(tmp_path / "a.npz", steps=40), "--json")
    without = run(record(tmp_path / "b.npz", steps=40, target=np.broadcast_to(TARGET[:3], (40, 3, 3))), "--json")
    assert with_row == without


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": np.full((8, 4, 3), 0.3)}, "sums to 0.9"),
        ({"draft_tokens": np.full((8, 3), 7)}, "outside 0 .. 2"),
        ({"draft": np.full((8, 2, 3), 1 / 3)}, "one target row more"),
        ({"request": np.arange(5)}, "differ in their number of steps"),
        ({"request": np.zeros((8, 2), dtype=int)}, "request has shape (8, 2)"),
        ({"request": np.full(8, 0.5)}, "request"),
        ({"draft_tokens": np.full((8, 3), 0.5)}, "whole token ids"),
        ({"draft_tokens": np.zeros(8, dtype=int)}, "draft_tokens has shape (8,)"),
        ({"draft_tokens": np.zeros((8, 0), dtype=int), "draft": np.zeros((8, 0, 3))}, "no drafts"),
        ({"draft": np.broadcast_to(np.eye(3), (8, 3, 3)), "draft_tokens": np.full((8, 3), 2)}, "probability 0"),
        ({"target": np.full((8, 4, 3), 1 / 3, dtype=np.complex64)}, "complex64"),
        ({"target": np.array(1.0)}, "target has shape ()"),
        ({"target": np.full((8, 4, 3), "x")}, "expected numbers"),
    ],
)
def test_what_is_not_a_recording_is_refused_with_one_sentence(
    tmp_path: Path, changes: dict[str, np.ndarray], says: str
) -> None:
    code, output = run(record(tmp_path / "steps.npz", steps=8, **changes))
    assert code == 1
    assert says in " ".join(output.split())


def test_missing_arrays_and_other_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "empty.npz", target=TARGET[None])
    assert "no array draft, draft_tokens" in run(tmp_path / "empty.npz")[1]
    (tmp_path / "text.npz").write_text("no archive")
    assert run(tmp_path / "text.npz")[0] == 1


def truncated(path: Path) -> None:
    whole = record(path.with_name("whole.npz"), steps=8).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, TARGET)


def no_arrays_inside(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("target", "draft", "draft_tokens"):
            archive.writestr(f"{name}.npy", b"no array")


def damaged(path: Path) -> None:
    np.savez_compressed(path, target=np.random.default_rng(0).random((50, 4, 3)), draft=DRAFT, draft_tokens=DRAFT)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


@pytest.mark.parametrize("make", [truncated, one_array, no_arrays_inside, damaged, Path.touch])
def test_a_file_that_is_no_archive_of_arrays_is_one_sentence(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "steps.npz"
    make(path)
    code, output = run(path)
    assert code == 1
    assert output.startswith(f"Error: {path} cannot be read as .npz")
    assert output.count("\n") == 1


def test_a_device_is_one_sentence_too() -> None:
    code, output = run("/dev/null")
    assert code == 1
    assert output.startswith("Error: /dev/null cannot be read as .npz")


def test_without_torch_the_command_says_what_to_install(tmp_path: Path) -> None:
    """In a process of its own, in which torch cannot be imported."""
    path = record(tmp_path / "steps.npz", steps=8)
    program = "import sys; sys.modules['torch'] = None; from dflash_verify.cli import main; main(['verify-gain', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: verify-gain needs torch, which is not installed")
    assert done.stderr.count("\n") == 1
