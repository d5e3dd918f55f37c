"""Builds the sources of evenkv_cuda for the host (see tests/host_gpu/ptx.cuh) and launches them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch

from evenkv.library.toolchain import find_cxx
from evenkv.numerics.problem import Problem
from evenkv.paths import find_repository
from evenkv.spec.family import DecodeSpec

SOURCES = find_repository().kernels / "evenkv_cuda"
HOST_GPU = Path(__file__).with_name("host_gpu")

Tuning = tuple[int, int, int]  # schedule.h: ScheduleTuning
Outputs = tuple[torch.Tensor, torch.Tensor]

# What a host compiler cannot take as it stands: file, pattern, replacement, occurrences.
_EDITS = (
    ("shared.cuh", r"(return \*static_cast<const volatile T\*>\(word\);)", r"host_gpu::give_way(); \1", 1),
    ("kernel.cuh", r"extern __shared__ .* raw\[\];", "uint8_t* raw = host_gpu::current->block->shared;", 1),
    (
        "small_kernel.cuh",
        r"extern __shared__ .* raw\[\];",
        "uint8_t* raw = host_gpu::current->block->shared;",
        1,
    ),
)


class _Params(ctypes.Structure):
    """params.h: DecodeParams."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("kv_indptr", "kv_indices", "kv_last_page_len")]
        + [(name, ctypes.c_int32) for name in ("batch", "page_size", "num_kv_indices", "num_kv_heads")]
        + [("page_multiplier", ctypes.c_uint32)]
        + [(name, ctypes.c_int32) for name in ("page_shift", "expected_slots", "workers")]
        + [("inverse_slots", ctypes.c_double), ("first_slots", ctypes.c_int32 * 2)]
        + [("expected", ctypes.c_int64 * 5)]  # schedule.h: Schedule
        + [(name, ctypes.c_void_p) for name in ("k_cache", "v_cache")]
        + [(f"{kv}_stride_{d}", ctypes.c_int64) for kv in "kv" for d in ("page", "slot", "head")]
        + [("num_pages", ctypes.c_int32), ("units", ctypes.c_uint32 * 5), ("q", ctypes.c_void_p)]
        + [
            ("q_stride_batch", ctypes.c_int64),
            ("q_stride_head", ctypes.c_int64),
            ("k_scale", ctypes.c_void_p),
        ]
        + [("sm_scale", ctypes.c_float), ("q_copy_bytes", ctypes.c_int32)]
        + [(name, ctypes.c_void_p) for name in ("v_scale", "output", "lse")]
        + [
            (name, ctypes.c_int32)
            for name in (
                "request_chunk_shift",
                "general_only",
                "single_round_slots",
                "most_request_chunks",
                "slots_per_chunk",
            )
        ]
        + [("partials", ctypes.c_void_p), ("counters", ctypes.c_void_p)]
    )


class CountersLeft(AssertionError):
    """Counters were not put back to zero."""


@dataclass(frozen=True)
class HostKernel:
    """The kernel of one specialisation, with chunks as small as `tuning` says."""

    library: ctypes.CDLL
    tuning: Tuning
    q_copy_bytes: int = 16
    request_chunk_shift: int = 0
    splits: int = 0  # the kernel for small problems, so many blocks a cluster

    def __call__(
        self,
        problem: Problem,
        outputs: Outputs | None = None,
        *,
        workers: int = 3,
        heads: int = 1,
        resident: int = 2,
        seed: int = 0,
        early: bool = False,
    ) -> Outputs:
        """Launches as kernel.cu does.

        Parameters
        ----------
        problem : Problem
            On the CPU; of this kernel's specialisation, any page size and number of KV heads.
        outputs : pair of tensors, optional
            output and lse; fresh ones by default.
        workers : int
            SMs.
        heads : int
            KV heads a block.
        resident : int
            Blocks that run at a time.
        seed : int
            Draws who runs when.
        early : bool
            Copies arrive at once, else as late as the kernel lets them.
        """
        spec, t = problem.spec, problem.tensors
        output, lse = outputs or problem.empty_outputs()
        params = _Params(batch=len(t["q"]), num_kv_heads=spec.num_kv_heads, page_size=spec.page_size)
        named = {**t, "output": output, "lse": lse}
        for name in ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "output", "lse"):
            setattr(params, name, named[name].data_ptr())
        for name in ("kv_last_page_len", "k_scale", "v_scale"):
            setattr(params, name, named[name].data_ptr() if name in named else None)
        params.q_stride_batch, params.q_stride_head = t["q"].stride()[:2]
        params.q_copy_bytes, params.request_chunk_shift = self.q_copy_bytes, self.request_chunk_shift
        params.k_stride_page, params.k_stride_slot, params.k_stride_head = t["k_cache"].stride()[:3]
        params.v_stride_page, params.v_stride_slot, params.v_stride_head = t["v_cache"].stride()[:3]
        params.num_pages, params.num_kv_indices = len(t["k_cache"]), len(t["kv_indices"])
        params.sm_scale = float(t["sm_scale"])
        left = ctypes.c_int32(-1)
        if self.splits:
            fault = self.library.launch_small(ctypes.byref(params), self.splits, seed, early)
            assert fault is None, fault.decode()
            return output, lse
        fault = self.library.launch(
            ctypes.byref(params), heads, workers, resident, seed, early, ctypes.byref(left)
        )
        assert fault is None, fault.decode()
        if left.value != 0:
            raise CountersLeft(f"{left.value} counters are not zero after the launch")
        return output, lse


def build_host_kernel(spec: DecodeSpec, tuning: Tuning, folder: Path) -> HostKernel:
    """Compiles the specialisation of `spec` in `folder`, which must be empty."""
    edits = [
        *_EDITS,
        ("tuning.cuh", r"(kScheduleTuning = )\{.*\};", rf"\1{{{', '.join(map(str, tuning))}}};", 1),
    ]
    for source in (*SOURCES.glob("*.cuh"), *SOURCES.glob("*.h")):
        text = source.read_text()
        for name, pattern, replacement, occurrences in edits:
            if name == source.name:
                text, count = re.subn(pattern, replacement, text)
                assert count == occurrences, f"{name}: {pattern} found {count} times, wanted {occurrences}"
        (folder / source.name).write_text(text)
    template = jinja2.Template((SOURCES / "specialisation.h.j2").read_text())
    (folder / "specialisation.h").write_text(template.render(spec=spec))
    for source in HOST_GPU.iterdir():
        (folder / source.name).write_text(source.read_text())
    # Fibers jump between stacks, which a fortified longjmp takes for an attack.
    flags = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    library = folder / "kernel.so"
    subprocess.run([find_cxx(), *flags, folder / "launch.cpp", "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.launch.restype = loaded.launch_small.restype = ctypes.c_char_p
    return HostKernel(loaded, tuning)
