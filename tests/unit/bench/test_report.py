"""The page: self-contained, complete and honest about what it does not know."""

import json
import re

import pytest
from bench_fake_server import FakeServer
from click.testing import CliRunner

from dflash_verify.bench.report import write_report
from dflash_verify.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A one-arm run with a guided workload and a mixed probe in its directory."""
    out = tmp_path_factory.mktemp("report") / "run"
    with FakeServer(width=3, step_s=0.002) as server:
        common = ["--url", server.url, "--out", str(out)]
        bench = ["bench", *common, "-w", "code", "-w", "object", "-c", "1,2", "--repeats", "2", "--max-tokens", "60"]
        assert CliRunner().invoke(main, bench, catch_exceptions=False).exit_code == 0
        mixed = ["mixed", *common, "--repeats", "1", "--max-tokens", "150", "--min-overlap-steps", "10"]
        assert CliRunner().invoke(main, mixed, catch_exceptions=False).exit_code == 0
    write_report(out)
    return out


def test_the_page_loads_nothing_from_anywhere(run):
    page = (run / "report.html").read_text()
    for attribute in re.findall(r'(?:src|srcset|href)="([^"]*)"', page):
        assert attribute.startswith("data:image/svg+xml;base64,")
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_the_page_has_both_colour_schemes_and_a_phone_width(run):
    page = (run / "report.html").read_text()
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<picture>") == page.count('media="(prefers-color-scheme: dark)"')


def test_the_page_says_what_was_not_known(run):
    page = (run / "report.html").read_text()
    assert "temperature and clocks were not readable" in page or "SM clock" in page
    assert "server restarts" in page
    assert "excluded by a salt" in page
    assert "dflash-verify report --audit" in page


def test_the_probe_is_on_the_page_of_its_directory(run):
    page = (run / "report.html").read_text()
    verdict = "decoded together for at least"
    assert verdict in page
    assert "valid JSON" in page


def test_the_audit_recomputes_the_probe_as_well(run, cli, tmp_path):
    import shutil

    assert cli("report", "--audit", run).exit_code == 0
    copied = shutil.copytree(run, tmp_path / "run")
    mixed = json.loads((copied / "mixed.json").read_text())
    mixed["phases"][-1]["overlap_steps"] += 1
    (copied / "mixed.json").write_text(json.dumps(mixed))
    result = cli("report", "--audit", copied)
    assert result.exit_code == 1
    assert "overlap_steps is" in result.output


def test_every_row_of_the_summary_is_in_the_table(run):
    page = (run / "report.html").read_text()
    for row in json.loads((run / "summary.json").read_text())["rows"]:
        assert f"<b>{row['tok_s']['median']:.1f}</b>" in page


def test_the_same_records_give_the_same_page(run):
    before = (run / "report.html").read_bytes()
    write_report(run)
    assert (run / "report.html").read_bytes() == before


def test_names_of_models_and_prompts_cannot_inject_markup(run, tmp_path):
    import shutil

    copied = shutil.copytree(run, tmp_path / "run")
    path = copied / "records.jsonl"
    path.write_text(path.read_text().replace('"model":"tiny"', '"model":"<b>x</b>"'))
    write_report(copied)
    assert "<b>x</b>" not in (copied / "report.html").read_text()


def test_a_directory_without_runs_is_refused(cli, tmp_path):
    result = cli("report", tmp_path)
    assert result.exit_code == 1
    assert "is no run directory" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{oops", "manifest.json is not JSON"),
        (b"\xff\xfe", "manifest.json is not JSON"),
        (b"{}", "manifest.json is not that of a run: it lacks"),
        (b"[]", "manifest.json is not that of a run: found a list, expected an object"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--audit",)])
def test_a_broken_manifest_is_named_in_one_sentence(run, cli, tmp_path, text, message, option):
    import shutil

    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "manifest.json").write_bytes(text)
    result = cli("report", *option, copied)
    assert result.exit_code == 1
    assert message in result.output
    assert "Error: '" not in result.output  # no KeyError dressed up


@pytest.mark.parametrize("change", [{"workloads": [{}]}, {"arms": {}}, {"created": "x"}, {"options": []}])
def test_a_manifest_with_a_value_of_the_wrong_form_is_named(run, cli, tmp_path, change):
    import shutil

    copied = shutil.copytree(run, tmp_path / "run")
    path = copied / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    result = cli("report", copied)
    assert result.exit_code == 1
    assert f"manifest.json is not that of a run: {next(iter(change))}" in result.output


def test_records_that_lack_a_field_are_named(run, cli, tmp_path):
    import shutil

    copied = shutil.copytree(run, tmp_path / "run")
    path = copied / "records.jsonl"
    path.write_text(path.read_text().replace('"completion_tokens"', '"tokens"'))
    result = cli("report", copied)
    assert result.exit_code == 1
    assert "was changed after it was written" in result.output
    path.write_bytes(b"\xff\n")
    result = cli("report", copied)
    assert result.exit_code == 1
    assert "records.jsonl is not UTF-8" in result.output


@pytest.mark.parametrize("text", ["{oops", "[]", "{}"])
def test_a_mixed_file_that_is_none_is_named(run, cli, tmp_path, text):
    path = tmp_path / "mixed.json"
    path.write_text(text)
    result = cli("report", run, "--mixed", path)
    assert result.exit_code == 1
    assert f"{path} is not a result of `dflash-verify mixed`" in result.output


PROBE = """<iframe id="f" style="width:WIDTHpx;height:3000px;border:0"></iframe><pre id="o"></pre><script>
const f = document.getElementById("f");
f.onload = () => {
  const d = f.contentDocument;
  const broken = [...d.images].filter(i => !i.complete || i.naturalWidth === 0).length;
  document.getElementById("o").textContent =
    `scroll=${d.documentElement.scrollWidth} broken=${broken} bg=${getComputedStyle(d.body).backgroundColor}`;
};
f.srcdoc = PAGE;
</script>"""


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_without_sideways_scrolling(run, tmp_path, scheme, width):
    """Headless Chromium lays the page out; a table may scroll in its box, the page itself may not."""
    import shutil
    import subprocess

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "the full suite needs Chromium: apt-get install chromium"
    probe = tmp_path / "probe.html"
    # Chromium's window has a least width, an iframe has none.
    page = json.dumps((run / "report.html").read_text()).replace("</", "<\\/")
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", page))
    done = subprocess.run(
        [
            *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"),
            *(f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--dump-dom", probe.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r"scroll=(\d+) broken=(\d+) bg=rgb\((\d+),", done.stdout)
    assert found, done.stderr[-2000:]
    assert int(found[1]) <= width
    assert int(found[2]) == 0
    assert (int(found[3]) > 128) == (scheme == "light")
