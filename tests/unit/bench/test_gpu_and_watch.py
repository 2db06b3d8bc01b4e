"""GPU readings, the pause for heat, and the live view."""

import pytest

from dflash_verify.bench.gpu import GpuReading, Gpus, wait_cool
from dflash_verify.bench.runner import summarise_gpu


class FakeNvml:
    """Two GPUs; the second, like a DGX Spark's, does not tell its clock."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 60 + handle

    def nvmlDeviceGetClockInfo(self, handle, clock):
        if handle == 1:
            raise self.NVMLError
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x4 if handle == 0 else 0x40


def test_readings_of_two_gpus_one_of_which_lacks_a_value():
    readings = Gpus(FakeNvml()).read()
    # 0x4 is the ordinary power cap, 0x40 a thermal slowdown.
    assert readings == (GpuReading(0, 60, 1980, False), GpuReading(1, 61, -1, True))
    assert summarise_gpu(list(readings)) == {
        "samples": 2,
        "max_celsius": 61,
        "min_sm_mhz": 1980,
        "max_sm_mhz": 1980,
        "throttled": True,
    }


def test_a_machine_without_gpu_has_no_readings():
    assert Gpus(None).read() == ()
    assert summarise_gpu([]) is None

    class Broken(FakeNvml):
        def nvmlInit(self):
            raise self.NVMLError

    assert Gpus(Broken()).read() == ()


@pytest.mark.parametrize(
    ("temperatures", "polls"),
    [([89], 0), ([90, 85, 79], 1), ([95, 92, 81, 80, 79], 3), ([], 0)],
)
def test_the_run_pauses_at_90_degrees_until_below_80(temperatures, polls):
    left = list(temperatures)
    slept, said = [], []

    def read():
        return (GpuReading(0, left.pop(0), 1000, False),) if left else ()

    wait_cool(read, say=said.append, sleep=slept.append)
    assert len(slept) == polls
    assert bool(said) == (bool(temperatures) and temperatures[0] >= 90)


def test_watch_shows_width_acceptance_goodput_step_time_and_reason(serve, cli):
    server = serve(width=3)
    server.steps[3], server.seconds[3] = 5, 0.05
    result = cli("watch", "--url", server.url, "--once", "--period-s", 0.05)
    assert result.exit_code == 0
    for text in (
        "goodput",
        "mean width",
        "steps by width",
        "accepted / verified by position",
        "3: 2.7 tok / 9 ms beats 7",
    ):
        assert text in result.output


def test_watch_says_when_no_width_is_active(serve, cli):
    server = serve(plugin=False)
    result = cli("watch", "--url", server.url, "--once", "--period-s", 0.05)
    assert "exports no dflash_verify_* counters" in result.output


def test_watch_reports_the_last_period_only():
    from bench_fake_server import FakeServer

    from dflash_verify.bench.endpoint import parse_metrics
    from dflash_verify.bench.watch import moment

    server = FakeServer()
    server.steps[7], server.accepted[0], server.verified[0] = 100, 50, 100
    before = parse_metrics(server.metrics())
    server.steps[3], server.seconds[3], server.accepted[0], server.verified[0] = 10, 0.12, 59, 110
    after = parse_metrics(server.metrics())
    server.http.server_close()
    last = moment(before, after)
    assert last.steps == {3: 10}
    assert last.mean_width == 3.0
    assert last.step_ms == pytest.approx({3: 12.0})
    assert last.acceptance[0] == pytest.approx(0.9)
