"""This side of the CPU evaluation's worker process: start it, ask it, kill it when its time is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from queue import Empty, Queue
from typing import IO, Any


class WorkerTimeoutError(Exception):
    """The answer did not come in time; the process is gone."""


class WorkerDiedError(Exception):
    """The process ended without an answer, say from a crash in a kernel."""


class Worker:
    """`python -m evenkv.evaluate.worker` with extra environment variables; restarts itself after a death."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[str] | None = None
        self._answers: Queue[str | None] = Queue()
        self._errors: IO[str] | None = None

    def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one job, wait for its result, at most `timeout_s` seconds (infinite: as long as it takes).

        Raises
        ------
        WorkerTimeoutError, WorkerDiedError
        """
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        except Empty:
            self.close()
            raise WorkerTimeoutError from None
        except OSError:
            answer = None
        if answer is None:
            code, said = process.wait(), self._last_line()
            self.close()
            raise WorkerDiedError(f"the process ended with code {code}: {said}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            # A queue of its own: a late answer of the process before must not be taken for this one's.
            self._answers = Queue()
            self._errors = tempfile.TemporaryFile("w+", prefix="evenkv-worker-")  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evenkv.evaluate.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._environment,
            )
            reader = threading.Thread(
                target=_forward, args=(self._process.stdout, self._answers), daemon=True
            )
            reader.start()
        return self._process

    def _last_line(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else "no message"


def _forward(stream: IO[str], answers: Queue[str | None]) -> None:
    for line in stream:
        answers.put(line)
    answers.put(None)
