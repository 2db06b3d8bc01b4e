"""Temperature and clocks of the GPUs of this machine, where they can be read.

A hot GPU lowers its clocks without a word, and the second arm of a comparison pays for the first.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PAUSE_AT_C = 90
RESUME_AT_C = 80


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment: degrees Celsius, SM clock in MHz and whether the driver slows it down for heat or power."""

    index: int
    celsius: int
    sm_mhz: int
    throttled: bool


class Gpus:
    """Reads through NVML (nvidia-ml-py, which vLLM brings); reads nothing where there is none."""

    def __init__(self, nvml: Any | None = None) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            self._handles = []

    @classmethod
    def of_this_machine(cls) -> "Gpus":
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            return cls(None)
        return cls(pynvml)

    def read(self) -> tuple[GpuReading, ...]:
        """All GPUs; empty when none can be read. A value one GPU does not offer (DGX Spark has gaps) is -1."""
        nvml = self._nvml
        if nvml is None:
            return ()
        readings = []
        for index, handle in enumerate(self._handles):

            def ask(call: Callable[..., int], *args: Any) -> int:
                try:
                    return int(call(*args))
                except nvml.NVMLError:
                    return -1

            reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
            # HW slowdown 0x8, SW thermal 0x20, HW thermal 0x40, HW power brake 0x80; not the ordinary power cap 0x4.
            readings.append(
                GpuReading(
                    index,
                    ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                    ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
                    reasons > 0 and bool(reasons & 0xE8),
                )
            )
        return tuple(readings)


def wait_cool(
    read: Callable[[], tuple[GpuReading, ...]],
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until no GPU is at 90 C; from there on until all are below 80 C. Returns the seconds waited."""
    start_s = time.monotonic()
    hottest = max((r.celsius for r in read()), default=-1)
    if hottest < PAUSE_AT_C:
        return 0.0
    say(f"A GPU is at {hottest} C: pausing until all are below {RESUME_AT_C} C.")
    while max((r.celsius for r in read()), default=-1) >= RESUME_AT_C:
        sleep(2.0)
    return time.monotonic() - start_s
