"""Edits of the authored sources, as the labs make them."""

from __future__ import annotations

Edit = tuple[str, str, str]  # file, text, replacement


def after(file: str, text: str, code: str) -> Edit:
    """`code` behind `text`, on a line of its own."""
    return (file, text, f"{text}{code}\n")


def before(file: str, text: str, code: str) -> Edit:
    """`code` before `text`, on a line of its own."""
    return (file, text, f"{code}\n{text}")
