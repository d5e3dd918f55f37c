"""What an implementation offers to the harness, and where its clock begins and ends.

In the clock: one call, as a serving engine makes it for every layer and step. Outside: planning (its host
time is reported beside), what an engine fuses into the producer of q (scaling, rounding to fp8), and what it
folds into the next weights (V scales). Where a peer lacks something that we do in the kernel, this favours
the peer.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import replace

import torch

from evenkv.bench.case import Case
from evenkv.bench.device.inputs import Tensors

Returned = tuple[torch.Tensor, ...]


class Prepared(abc.ABC):
    """A case, ready to be called again and again with other contents of `tensors.q`.

    `returned` holds the tensors that the latest `call` wrote: the same ones every time where the
    implementation takes outputs, new ones where it allocates. `plan_us` is the host time of planning.
    """

    returned: Returned
    plan_us: float = 0.0

    def new_queries(self) -> None:  # noqa: B027 (most have nothing to do)
        """Told that `tensors.q` has new contents; outside the clock."""

    @abc.abstractmethod
    def call(self) -> None:
        """One decode step, on the current stream. This is what the clock sees."""

    def result(self, returned: Returned) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and base-2 lse (None: it gives none) from what a call wrote; outside the clock."""
        output, lse = returned
        return output, lse


class Implementation(abc.ABC):
    """One of the rows' `impl`.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Why it cannot run on this machine at all, or None."""

    def version(self) -> str | None:
        """Of the peer's package; None for our own."""
        return None

    def supports(self, case: Case) -> str | None:
        """Why it cannot run the case, or None. Asked in processes without a GPU context, too."""
        return None

    def quantises_query(self, case: Case) -> bool:
        """Whether it rounds q to fp8: other accuracy, said in the row."""
        return False

    def settings(self, case: Case) -> tuple[str, ...]:
        """Ways to call it that could be the fastest: the harness tries them and times the best."""
        return ("default",)

    def build_key(self, case: Case) -> Hashable:
        """Names the compiler's work that the case needs: None when there is none worth doing ahead."""
        return None

    def build_cases(self, case: Case) -> tuple[Case, ...]:
        """Cases that do this work when they are run: together they compile whatever cases of its build key
        need. Small ones, because several builders share the GPU."""
        return (replace(case, batch=1, context=case.page_size, lengths=None),)

    @abc.abstractmethod
    def prepare(self, case: Case, tensors: Tensors, setting: str) -> Prepared:
        """Plan and allocate. Raises when the implementation refuses the case."""


def bf16_outputs(case: Case, device: torch.device) -> Returned:
    """Output bf16 `[batch, num_qo_heads, head_dim]` and lse float32 `[batch, num_qo_heads]`."""
    shape = (case.batch, case.num_qo_heads, case.head_dim)
    output = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return output, torch.empty(shape[:2], dtype=torch.float32, device=device)


def per_head(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    """`[batch, num_qo_heads, head_dim]` as `[batch, num_kv_heads, group, head_dim]`."""
    group = case.num_qo_heads // case.num_kv_heads
    return tensor.view(case.batch, case.num_kv_heads, group, case.head_dim)
