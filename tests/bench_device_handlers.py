"""Handlers for real worker processes: standard library only, so that they start quickly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class Handler:
    """Answers, fails, crashes or hangs, as told."""

    def __init__(self, greeting: str = "hello", broken: bool = False) -> None:
        if broken:
            raise ValueError("cannot be made")
        self.greeting = greeting
        self.memory: list[Any] = []

    def classify(self, error: Exception) -> tuple[str, bool]:
        return {"MemoryError": ("oom", False), "SystemError": ("refused", True)}.get(
            type(error).__name__, ("refused", False)
        )

    def greet(self, name: str) -> str:
        self.memory.append(name)
        return f"{self.greeting} {name} {len(self.memory)}"

    def refuse(self) -> None:
        raise ValueError("page_size 3 is not for me\nand more lines")

    def run_out(self) -> None:
        raise MemoryError("out of memory")

    def poison(self) -> None:
        raise SystemError("an illegal memory access was encountered")

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self) -> None:
        time.sleep(600)
