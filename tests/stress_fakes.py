"""Kernels for the stress test's own tests, on the CPU: right, but for the problems of some seeds."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
from numerics_oracle import make_kernel

from evenkv.spec.family import DecodeSpec

if TYPE_CHECKING:
    from stress_problems import Plan

# The seeds where `Faulty` misbehaves, and where `Lost` does.
WRONG, OTHER_BITS, BESIDE = 2, 4, 5
HANGS, CRASHES = 2, 4


class Faulty:
    """Plain attention, but for three problems."""

    def __init__(self) -> None:
        self._attend = make_kernel()
        self._seed = self._call = -1

    def spoil_scratch(self, plan: Plan, call: int) -> None:
        self._seed, self._call = plan.seed, call

    def __call__(self, spec: DecodeSpec, *arguments: Any) -> None:
        self._attend(spec, *arguments)
        self.misbehave(self._seed, self._call, *arguments[-2:])

    def misbehave(self, seed: int, call: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        if seed == WRONG:
            output[-1, -1, 5] += 3.0
        elif seed == OTHER_BITS and call == 1:
            lse *= 1 + 2.0**-20  # less than any limit
        elif seed == BESIDE and call == 0:
            output.as_strided((1,), (1,), output.storage_offset() + output.numel()).zero_()


class Lost(Faulty):
    """Plain attention, but for two problems that never end."""

    def misbehave(self, seed: int, call: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        if seed == HANGS:
            time.sleep(600)
        elif seed == CRASHES:
            os.kill(os.getpid(), signal.SIGSEGV)
