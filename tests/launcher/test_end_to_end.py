"""./start.sh against two hosts with a real sshd and a stand-in for docker: what an operator sees when things go right, and
what is left behind when they do not."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from .conftest import PORT, Hosts, port_holder, until


def expect(result: tuple[int, str], code: int, *said: str) -> str:
    """The output of a command that ended with this code and said these things."""
    assert result[0] == code, result[1]
    for text in said:
        assert text in result[1]
    return result[1]


def stopped(hosts: Hosts) -> bool:
    return not hosts.containers() and not hosts.processes()


def test_start_serves_on_both_hosts_and_stop_leaves_nothing(hosts: Hosts) -> None:
    for role in ("head", "worker"):
        (hosts.folder(role) / "canned.json").unlink()  # here the plugin's own check and plan run
    expect(hosts.launch(), 0, f"READY http://127.0.0.1:{PORT}")
    assert hosts.containers() == ["vllm-head", "vllm-worker"]
    runs = {role: hosts.runs(role)[0] for role in ("head", "worker")}
    for role, argv in runs.items():
        assert {"DFLASH_VERIFY_TOKENS=3", "HF_TOKEN"} <= set(argv)
        assert not [word for word in argv if "hf_secret" in word]
        assert ("--headless" in argv) == (role == "worker")
    # The same plugin, named by its content, at the same place of each host's home.
    mounts = [
        [word.replace(str(hosts.folder(role)), "") for word in argv if "launcher.config=" in word or "/.cache/" in word]
        for role, argv in runs.items()
    ]
    assert mounts[0] == mounts[1]

    out = expect(hosts.launch("status"), 0, "GPU 54 C", "health  ok")
    assert out.count("running") == 3
    assert out.count("restarts 0") == 2
    assert len(set(re.findall(r"plan ([0-9a-f]{12})", out))) == 1
    expect(hosts.launch("logs"), 0, '"--node-rank", "0"')
    expect(hosts.launch("logs", "worker"), 0, '"--node-rank", "1"')

    expect(hosts.launch("stop"), 0, "Stopped.")
    until(lambda: stopped(hosts))
    expect(hosts.launch("stop"), 0)


def test_start_is_idempotent_and_restart_applies_new_settings(hosts: Hosts) -> None:
    assert hosts.launch()[0] == 0
    expect(hosts.launch("start"), 0, "Already serving")
    assert len(hosts.runs("head")) == 1
    expect(hosts.launch("start", DFLASH_VERIFY_TOKENS="auto"), 1, "./start.sh restart")
    assert len(hosts.runs("head")) == 1
    expect(hosts.launch("restart", DFLASH_VERIFY_TOKENS="nine"), 1, "is not a width")
    assert len(hosts.containers()) == 2
    expect(hosts.launch("restart", DFLASH_VERIFY_TOKENS="auto"), 0, "READY")
    assert "DFLASH_VERIFY_TOKENS=auto" in hosts.runs("worker")[-1]


def test_a_stock_server_starts_without_a_trace_of_the_plugin(hosts: Hosts) -> None:
    expect(hosts.launch(DFLASH_VERIFY_TOKENS=""), 0, "stock vLLM")
    for role in ("head", "worker"):
        assert not any("DFLASH" in word or "dflash-verify" in word for argv in hosts.calls(role) for word in argv)
        assert not (hosts.folder(role) / "home" / ".cache" / "dflash-verify").exists()


def test_a_worker_that_dies_stops_the_head(hosts: Hosts) -> None:
    assert hosts.launch()[0] == 0
    os.kill(hosts.server_pid("worker"), signal.SIGKILL)
    until(lambda: stopped(hosts), 30)
    expect(hosts.launch("logs", "worker"), 0, "plan digest=")
    expect(hosts.launch("status"), 1, "no answer")


def test_a_rank_that_fails_while_loading_stops_the_other_and_shows_its_last_words(hosts: Hosts) -> None:
    hosts.behave("worker", exit="3")
    expect(hosts.launch(), 1, "worker", "exit code 3", "this model does not fit")
    until(lambda: stopped(hosts))
    expect(hosts.launch("logs", "worker"), 0, "this model does not fit")
    expect(hosts.launch("logs"), 0, "starting")  # the other rank's too


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_start_leaves_no_container(hosts: Hosts, number: signal.Signals) -> None:
    hosts.behave("head", health="never")
    process = hosts.begin()
    until(lambda: len(hosts.containers()) == 2, 40)
    began = time.monotonic()
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=40)
    assert process.returncode == 130, out
    assert time.monotonic() - began < 30
    until(lambda: stopped(hosts))


def test_a_start_that_was_killed_is_cleaned_up_by_stop_or_by_the_next_start(hosts: Hosts) -> None:
    hosts.behave("head", health="never")
    for recover in ("stop", "start"):
        process = hosts.begin()
        until(lambda: len(hosts.containers()) == 2, 40)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if recover == "start":
            hosts.behave("head")
        expect(hosts.launch(recover), 0)
        assert len(hosts.containers()) == (2 if recover == "start" else 0)


def test_stop_takes_over_from_a_start_that_is_still_waiting(hosts: Hosts) -> None:
    hosts.behave("head", health="never")
    process = hosts.begin()
    until(lambda: len(hosts.containers()) == 2, 40)
    expect(hosts.launch("start"), 1, "another start or stop is running")
    expect(hosts.launch("stop"), 0)
    process.communicate(timeout=30)
    until(lambda: stopped(hosts))


def test_stop_is_bounded_when_the_server_ignores_it(hosts: Hosts) -> None:
    for role in ("head", "worker"):
        hosts.behave(role, term="ignore")
    assert hosts.launch()[0] == 0
    began = time.monotonic()
    expect(hosts.launch("stop"), 0)
    assert time.monotonic() - began < 30
    until(lambda: stopped(hosts))


def test_a_wrong_key_is_one_sentence_and_starts_nothing(hosts: Hosts) -> None:
    config = hosts.tmp / "ssh_config"
    config.write_text(config.read_text().replace("/user_key", "/stranger_key"))
    expect(hosts.launch(), 1, "ssh refused the key", f"ssh-copy-id {hosts.cable.worker}")
    assert not hosts.runs("head")
    assert not hosts.containers()


def test_an_unknown_host_key_is_refused_and_never_asked_about(hosts: Hosts) -> None:
    (hosts.tmp / "known_hosts").write_text("")
    expect(hosts.launch(), 1, "does not know this host's key")


def test_a_host_that_is_down_costs_seconds(hosts: Hosts) -> None:
    hosts.settings(WORKER_HOST=hosts.cable.nowhere)
    for command in ("start", "status", "stop"):
        began = time.monotonic()
        expect(hosts.launch(command), 1, "cannot be reached")
        assert time.monotonic() - began < 30
    assert not hosts.runs("head")


def test_a_worker_that_goes_down_later_does_not_keep_the_head_from_stopping(hosts: Hosts) -> None:
    assert hosts.launch()[0] == 0
    hosts.stop_sshd()
    out = expect(hosts.launch("status"), 1, "unknown")
    assert out.count("running") == 2
    began = time.monotonic()
    expect(hosts.launch("stop"), 1, "cannot be reached")
    assert time.monotonic() - began < 30
    assert hosts.containers() == ["vllm-worker"]
    hosts.start_sshd()
    assert hosts.launch("stop")[0] == 0  # it was not forgotten
    until(lambda: stopped(hosts))


def test_a_full_disk_on_the_worker_is_said_and_stops_the_head(hosts: Hosts) -> None:
    hosts.behave("worker", run_fails="write /var/lib/docker/tmp: no space left on device.")
    expect(hosts.launch(), 1, "worker", "no space left", "free some disk space")
    until(lambda: stopped(hosts))


def test_a_disk_too_full_for_the_plugin_is_said_and_nothing_half_copied_is_left(hosts: Hosts) -> None:
    cache = hosts.folder("worker") / "home" / ".cache"
    cache.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)], check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    hosts.stop_sshd()  # a new one sees the mount in its own namespace
    try:
        hosts.start_sshd()
        expect(hosts.launch(), 1, "worker", "copying the plugin failed", "No space left", "free some disk space")
        assert not list(cache.glob("dflash-verify/plugin-*"))
        hosts.stop_sshd()
    finally:
        subprocess.run(["umount", str(cache)], check=True)
    assert not hosts.runs("head") + hosts.runs("worker")


def test_a_cable_that_is_out_for_a_moment_stops_nothing(hosts: Hosts) -> None:
    assert hosts.launch()[0] == 0
    log = hosts.tmp / "state" / "vllm-launcher" / "watch.log"
    hosts.stop_sshd()
    until(lambda: "out of reach" in log.read_text(), 40)
    assert len(hosts.containers()) == 2
    hosts.start_sshd()
    os.kill(hosts.server_pid("worker"), signal.SIGKILL)
    until(lambda: stopped(hosts), 60)  # and the watch is still there to see a real end


def test_too_little_disk_for_a_model_is_refused_before_anything_starts(hosts: Hosts) -> None:
    hosts.settings(MIN_FREE_GB="99999")
    expect(hosts.launch(), 1, "no space left", "MIN_FREE_GB is 99999")
    assert not hosts.runs("head") + hosts.runs("worker")


@pytest.mark.parametrize(("name", "port"), [("PORT", PORT), ("MASTER_PORT", 29501)])
def test_a_port_that_is_taken_is_said_before_anything_starts(hosts: Hosts, name: str, port: int) -> None:
    holder = port_holder(hosts, port)
    try:
        expect(hosts.launch(), 1, f"{name}={port} is taken")
    finally:
        holder.kill()
        holder.wait()
    assert not hosts.containers()


@pytest.mark.parametrize(("digest", "said"), [("0" * 12, "different plans"), ("", "logged no plan digest")])
def test_ranks_that_do_not_agree_on_the_plan_are_stopped(hosts: Hosts, digest: str, said: str) -> None:
    hosts.behave("worker", digest=digest)
    expect(hosts.launch(), 1, said, "worker")
    until(lambda: stopped(hosts))


def test_images_that_differ_are_refused(hosts: Hosts) -> None:
    (hosts.folder("worker") / "image-id").write_text("sha256:" + "6" * 64)
    expect(hosts.launch(), 1, "not the same image")
    assert not hosts.containers()


def test_a_missing_image_is_pulled(hosts: Hosts) -> None:
    (hosts.folder("worker") / "image-id").unlink()
    expect(hosts.launch(), 0, "pulling")


@pytest.mark.parametrize(
    ("completions", "said"), [("fail", "HTTP 500 (out of memory)"), ("uncounted", "the plugin is not in charge")]
)
def test_ready_needs_completions_that_the_plugin_counts(hosts: Hosts, completions: str, said: str) -> None:
    hosts.behave("head", completions=completions)
    out = expect(hosts.launch(), 1, said)
    assert "READY" not in out
    until(lambda: stopped(hosts))


def test_the_warm_up_of_a_policy_reaches_every_captured_width_and_leaves_the_switch_free(hosts: Hosts) -> None:
    hosts.plan_widths(1, 3, 7)
    expect(hosts.launch(DFLASH_VERIFY_TOKENS="auto"), 0, "READY", "widths 1, 3, 7")
    assert set(hosts.steps()) == {1, 3, 7}
    assert not list(hosts.tmp.rglob("control.json*"))


def test_a_width_that_the_server_cannot_be_switched_to_is_not_ready(hosts: Hosts) -> None:
    hosts.plan_widths(1, 7)
    hosts.behave("head", control="ignored")
    expect(hosts.launch(DFLASH_VERIFY_TOKENS="auto"), 1, "width 1 is captured and the server did not use it")
    until(lambda: stopped(hosts))


def test_stop_status_and_logs_work_with_settings_that_nobody_could_start_with(hosts: Hosts) -> None:
    assert hosts.launch()[0] == 0
    env = hosts.root / ".env"
    env.write_text(env.read_text() + "MAX_NUM_SEQS=lots\nDFLASH_VERIFY_TOKENS='3; touch pwned'\nnonsense\n'\n")
    out = expect(hosts.launch("start"), 1)
    assert out.count("\n") == 1
    assert hosts.launch("status")[0] == 0
    assert hosts.launch("logs")[0] == 0
    env.unlink()
    assert hosts.launch("status")[0] == 0
    assert hosts.launch("stop")[0] == 0
    until(lambda: stopped(hosts))
    assert not env.exists()


def test_values_arrive_unchanged_and_execute_nothing(hosts: Hosts) -> None:
    nasty = 'a "b" $HOME `touch pwned` $(touch pwned); touch pwned # \\ end'
    hosts.settings(
        MODEL=nasty,
        VLLM_SOMETHING=f"{nasty}\nsecond line  ",
        EXTRA_ARGS='--chat-template "$(touch pwned)" --seed 1',
        SERVED_MODEL_NAME="m",
    )
    expect(hosts.launch(), 0)
    for role in ("head", "worker"):
        argv = hosts.runs(role)[0]
        assert nasty in argv
        assert f"VLLM_SOMETHING={nasty}\nsecond line  " in argv
        assert argv[argv.index("--chat-template") + 1] == "$(touch pwned)"
        started = hosts.log(role).splitlines()[0].removeprefix("starting ")
        assert json.loads(started)[1] == nasty  # through `sh -c` and into the process
    assert not list(hosts.tmp.rglob("pwned"))


def test_one_host_without_docker_starts_and_stops_with_every_child(hosts: Hosts) -> None:
    hosts.settings(NODES="1", RUNTIME="host", DFLASH_VERIFY_TOKENS="0")
    expect(hosts.launch("start"), 0, "READY")
    assert any("time.sleep(600)" in line for line in hosts.processes())
    expect(hosts.launch("status"), 0, "running")
    assert '"serve"' in hosts.launch("logs")[1]
    assert hosts.launch("stop")[0] == 0
    until(lambda: stopped(hosts))
    assert not hosts.calls("head")


def test_check_runs_the_real_self_check_on_both_hosts(hosts: Hosts) -> None:
    out = expect(hosts.launch("check"), 0, "# head", "# worker")
    assert out.count("every overlay fits") == 2


def test_plan_shows_the_graphs_of_the_settings(hosts: Hosts) -> None:
    expect(hosts.launch("plan", MAX_NUM_SEQS="8", DFLASH_VERIFY_TOKENS="3"), 0, "64", "GiB")
