"""A process that obeys: commands over a pipe, answered before a deadline or the process is killed.

Imports nothing but the standard library, so that the parent never makes a CUDA context of its own and a
child pays only for what its handler imports.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

_START_SECONDS = 120.0
_END_SECONDS = 5.0


class WorkerFault(Exception):
    """A command failed. `status` is the row's status for it, `gone` whether the process has ended."""

    def __init__(self, reason: str, status: str = "refused", gone: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.gone = gone


class Worker:
    """A child process that runs one handler: restarted on use after it has died or was killed.

    Parameters
    ----------
    name : str
        For messages.
    factory : str
        "package.module:callable", called in the child with `arguments`; gives the handler, whose public
        methods are the commands. `handler.classify(error)` gives (status, poisoned) of an exception.
    deadline_s : float
        Seconds that a command may take, unless the call says otherwise.
    """

    def __init__(
        self, name: str, factory: str, arguments: Mapping[str, Any] | None = None, deadline_s: float = 60.0
    ) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self.generation = 0  # counts starts: who remembers a child's state compares it
        self._factory = factory
        self._arguments = dict(arguments or {})
        self._process: Any = None
        self._pipe: Connection | None = None
        self._pending: tuple[str, float] | None = None
        self._turn = threading.Lock()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Start the child, unless it runs; waits until its handler is made.

        Raises
        ------
        WorkerFault
            When the handler cannot be made or does not come up in time.
        """
        if self.alive:
            return
        self.end()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._factory, self._arguments), name=self.name, daemon=True
        )
        self._process.start()
        theirs.close()
        self._pipe = ours
        self.generation += 1
        self._pending = ("start", time.monotonic() + _START_SECONDS)
        self.receive()

    def call(self, command: str, *, deadline_s: float | None = None, **arguments: Any) -> Any:
        """Run a command and wait for its answer; calls of several threads wait for one another.

        Raises
        ------
        WorkerFault
            With the handler's reason, or saying that the process died or was killed at its deadline.
        """
        with self._turn:
            self.send(command, deadline_s=deadline_s, **arguments)
            return self.receive()

    def send(self, command: str, *, deadline_s: float | None = None, **arguments: Any) -> None:
        """Begin a command; `receive` must follow. Lets several processes work at once."""
        self.start()
        assert self._pipe is not None and self._pending is None
        seconds = self.deadline_s if deadline_s is None else deadline_s
        self._pending = (command, time.monotonic() + seconds)
        with contextlib.suppress(OSError):  # a dead child shows when its answer is awaited
            self._pipe.send((command, arguments))

    def receive(self) -> Any:
        """The answer to the last `send`."""
        assert self._pipe is not None and self._pending is not None
        process, pipe = self._process, self._pipe
        command, until = self._pending
        self._pending = None
        begun = time.monotonic()
        try:
            if not pipe.poll(max(0.0, until - begun)):
                self._kill(process)
                raise WorkerFault(f"killed: {command} did not end before its deadline", gone=True)
            kind, value, poisoned = pipe.recv()
        except (EOFError, OSError):
            code = _exit_code(process)
            self._kill(process)
            raise WorkerFault(f"the process died in {command} ({code})", gone=True) from None
        except BaseException:
            # Interrupted: the answer that is still to come would pass for the next command's.
            self._kill(process)
            raise
        if kind == "ok":
            return value
        if poisoned:
            # Nothing that this CUDA context does can be trusted any more.
            self._kill(process)
        raise WorkerFault(value, status=kind, gone=poisoned)

    def kill(self) -> None:
        """SIGKILL: a child that waits for a kernel that never ends hears nothing milder."""
        self._kill(self._process)

    def _kill(self, process: Any) -> None:
        """The child `process`; another that has taken its place meanwhile lives on."""
        if process is not None:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # another thread was quicker
                    os.kill(process.pid, signal.SIGKILL)
            process.join(_END_SECONDS)
        if self._process is process:
            self._forget()

    def end(self) -> None:
        """Ask the child to leave, then kill it."""
        if self.alive and self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(_END_SECONDS)
        self.kill()

    def _forget(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = self._pending = None


def _serve(pipe: Connection, factory: str, arguments: dict[str, Any]) -> None:
    # Ctrl-C goes to the whole group: the parent decides when a child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Started by "spawn", a child gives locks (tqdm makes one) a name for others of its kind, and whoever is
    # left warns of a leak when it ends at once, as here. By the platform's own method they have no name.
    multiprocessing.set_start_method(None, force=True)
    try:
        module, _, name = factory.partition(":")
        handler = getattr(importlib.import_module(module), name)(**arguments)
    except BaseException as error:  # the parent must hear of it, whatever it is
        pipe.send(("refused", describe(error), True))
        return
    pipe.send(("ok", None, False))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            message = None
        if message is None:
            # Nothing is left to be tidied: exit handlers of CUDA libraries and profilers may hang or crash.
            _leave(0)
        command, values = message
        try:
            answer = ("ok", getattr(handler, command)(**values), False)
        except Exception as error:
            status, poisoned = handler.classify(error)
            answer = (status, describe(error), poisoned)
        pipe.send(answer)
        if answer[2]:
            _leave(1)


def _exit_code(process: Any) -> str:
    process.join(_END_SECONDS)
    code = process.exitcode
    if code is None:
        return "no exit code"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def describe(error: BaseException) -> str:
    """One line: what was raised, and where when it says nothing itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines:
        return f"{type(error).__name__}: {lines[0]}"[:500]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name} ({os.path.basename(frame.filename)}:{frame.lineno})"
