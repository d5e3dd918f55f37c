"""The roofline harness on an NVIDIA GPU: `open_device`.

Importing this package imports nothing else: worker processes start through it, and most need only a part.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenkv.bench.device.cuda_device import CudaDevice

_TIMER_VARIABLE = "EVENKV_BENCH_TIMER"


def open_device(index: int = 0) -> CudaDevice:
    """The visible GPU of that number, timed with CUPTI where it works.

    EVENKV_BENCH_TIMER = "cupti" demands CUPTI, "events" takes CUDA events.
    """
    from evenkv.bench.device.cuda_device import CudaDevice

    return CudaDevice(index, os.environ.get(_TIMER_VARIABLE, "auto"))
