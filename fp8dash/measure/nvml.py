"""A GPU's energy, clocks and driver version from NVML, called by ctypes because it comes with the driver.

Every answer is None where the library, the device or the counter is not there, as on a CPU or a slice of a GPU. Source:
NVML API reference, `nvml.h` (R550).
"""

import ctypes
from functools import cache
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK, MEMORY_CLOCK = 1, 2  # nvmlClockType_t
TEXT = 96  # bytes; NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80


def energy_joules(where: torch.device) -> float | None:
    """The energy that the GPU has used since its driver was loaded; its counter moves about ten times a second."""
    millijoules = ctypes.c_ulonglong()
    is_counted = _answered(where, "nvmlDeviceGetTotalEnergyConsumption", ctypes.byref(millijoules))
    return millijoules.value / 1000 if is_counted else None


def clocks_mhz(where: torch.device) -> dict[str, int]:
    """The clocks of the multiprocessors and of the memory now, MHz, as far as the library reports them."""
    clocks = {}
    for name, kind in (("sm", SM_CLOCK), ("memory", MEMORY_CLOCK)):
        clock = ctypes.c_uint()
        if _answered(where, "nvmlDeviceGetClockInfo", ctypes.c_int(kind), ctypes.byref(clock)):
            clocks[name] = int(clock.value)
    return clocks


def driver() -> str | None:
    """The driver's version."""
    library, text = _library(), ctypes.create_string_buffer(TEXT)
    if library is None or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(TEXT)) != 0:
        return None
    return text.value.decode()


def _answered(where: torch.device, name: str, *arguments: Any) -> bool:
    """True where the library answered this question about the device."""
    library = _library()
    handle = _handle(where) if library is not None and where.type == "cuda" else None
    return handle is not None and getattr(library, name)(handle, *arguments) == 0


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:  # no driver
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _handle(where: torch.device) -> ctypes.c_void_p | None:
    """NVML counts all devices, torch those that it may see: the UUID is the same to both."""
    library, handle = _library(), ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(where).uuid}"
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    return handle
