"""The roofline harness on an NVIDIA GPU: `CudaDevice`.

Importing this package imports no kernel library and makes no CUDA context.
"""

from evenkv.bench.device.cuda_device import CudaDevice

__all__ = ["CudaDevice"]
