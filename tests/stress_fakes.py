"""Kernels for the stress test's own tests, on the CPU: right ones that go wrong at one problem."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from numerics_oracle import make_kernel

from evenkv.spec.family import DecodeSpec

if TYPE_CHECKING:
    from stress_problems import Plan

TRIGGER = 3  # the seed of the problem where a fake misbehaves


class Right:
    """Plain attention."""

    def __init__(self) -> None:
        self.seed = -1
        self.call = -1
        self._attend = make_kernel()

    def spoil_scratch(self, plan: Plan, call: int) -> None:
        self.seed, self.call = plan.seed, call

    def __call__(self, spec: DecodeSpec, *arguments: Any) -> None:
        self._attend(spec, *arguments)
        if self.seed == TRIGGER:
            self.misbehave(*arguments)

    def misbehave(self, *arguments: Any) -> None:
        """Nothing."""


class WrongOnce(Right):
    """One element of the last head of the last request."""

    def misbehave(self, *arguments: Any) -> None:
        arguments[-2][-1, -1, 5] += 3.0


class WrongInTheSecondCall(Right):
    """By less than any limit: what scratch held shows in the bits."""

    def misbehave(self, *arguments: Any) -> None:
        if self.call == 1:
            arguments[-1][:] *= 1 + 2.0**-20


class WritesBeside(Right):
    """One element behind the output."""

    def misbehave(self, *arguments: Any) -> None:
        output = arguments[-2]
        output.as_strided((1,), (1,), output.storage_offset() + output.numel()).zero_()


class Hangs(Right):
    def misbehave(self, *arguments: Any) -> None:
        time.sleep(600)


class Crashes(Right):
    def misbehave(self, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
