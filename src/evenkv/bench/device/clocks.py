"""Clocks, temperature and throttle reasons, from NVML's C library, which comes with the driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from evenkv.bench.device.worker import describe

_CLOCK_SM, _CLOCK_MEM = 1, 2
_TEMPERATURE_GPU = 0

# Of nvmlClocksThrottleReason*: those that make a measurement slower than the machine is. The software power
# cap is left out: at full memory speed it is always near, and when it bites the SM clock shows it.
_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class ClockState:
    """MHz, degrees Celsius, and why the clock is held down (empty: it is not)."""

    sm_clock_mhz: float
    temperature_c: float
    throttle_reasons: tuple[str, ...]


class Clocks:
    """Reads one GPU. `reason` says why it cannot; then every state is None.

    Parameters
    ----------
    uuid : str or None
        The GPU's, "GPU-..." : CUDA_VISIBLE_DEVICES does not renumber it. None: the GPU of `index`.
    library : optional
        Stands in for `libnvidia-ml.so.1`.
    """

    def __init__(self, uuid: str | None, index: int = 0, library: Any = None) -> None:
        self.reason: str | None = None
        self._handle = ctypes.c_void_p()
        try:
            self._nvml = library if library is not None else ctypes.CDLL("libnvidia-ml.so.1")
            self._ask("nvmlInit_v2")
            handle = ctypes.byref(self._handle)
            if uuid is not None:
                self._ask("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), handle)
            else:
                self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), handle)
        except (OSError, AttributeError, _NvmlError) as error:
            self.reason = f"no NVML: {describe(error)}"

    def state(self) -> ClockState | None:
        """Now; None when it cannot be read, and then `reason` says why."""
        if self.reason is not None:
            return None
        try:
            clock = self._number("nvmlDeviceGetClockInfo", _CLOCK_SM)
            temperature = self._number("nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
            bits = ctypes.c_ulonglong()
            self._ask(self._throttle_function(), self._handle, ctypes.byref(bits))
        except (AttributeError, _NvmlError) as error:
            self.reason = f"NVML: {describe(error)}"
            return None
        reasons = tuple(text for bit, text in _THROTTLES.items() if bits.value & bit)
        return ClockState(float(clock), float(temperature), reasons)

    def memory_peak_gbps(self) -> float | None:
        """1e9 bytes a second that the memory's clock and width allow (two transfers a clock), or None."""
        if self.reason is not None:
            return None
        try:
            mhz = self._number("nvmlDeviceGetMaxClockInfo", _CLOCK_MEM)
            bits = ctypes.c_uint()
            self._ask("nvmlDeviceGetMemoryBusWidth", self._handle, ctypes.byref(bits))
        except (AttributeError, _NvmlError):
            return None
        return 2 * mhz * bits.value / 8 / 1000 or None

    def _throttle_function(self) -> str:
        """The older of its two names, which drivers have kept so far, or the newer."""
        older = "nvmlDeviceGetCurrentClocksThrottleReasons"
        return older if hasattr(self._nvml, older) else "nvmlDeviceGetCurrentClocksEventReasons"

    def _number(self, function: str, which: int) -> int:
        value = ctypes.c_uint()
        self._ask(function, self._handle, ctypes.c_int(which), ctypes.byref(value))
        return value.value

    def _ask(self, function: str, *arguments: Any) -> None:
        code = getattr(self._nvml, function)(*arguments)
        if code != 0:
            raise _NvmlError(f"{function} answered {code}")


class _NvmlError(Exception):
    """NVML's own complaint."""
