"""Peer: FlashInfer's paged decode on CUDA cores."""

from .decode import make_run

run = make_run(use_tensor_cores=False)
