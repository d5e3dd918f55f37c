"""Runs a list of cases on a device: a row for every (case, implementation), whatever happens."""

from __future__ import annotations

from evenkv.bench.protocol import Device, DeviceFacts, DeviceLost, Outcome

__all__ = ["Device", "DeviceFacts", "DeviceLost", "Outcome"]
