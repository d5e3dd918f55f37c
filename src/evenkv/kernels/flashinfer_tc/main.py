"""Peer: FlashInfer's paged decode on tensor cores."""

from .decode import make_run

run = make_run(use_tensor_cores=True)
