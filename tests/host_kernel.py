"""Builds the sources of evenkv_cuda for the host (see tests/host_gpu/ptx.cuh) and launches them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
from cut_library import KERNEL, Cut, clusters_of

from evenkv.library.toolchain import find_cxx
from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import Problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

HOST_GPU = Path(__file__).with_name("host_gpu")
HOST_RUNTIME = Path(__file__).with_name("host_runtime")

Outputs = tuple[torch.Tensor, torch.Tensor]

# What a host compiler cannot take as it stands, and where tests step in: file, pattern, replacement; once.
_EDITS = (
    ("kernel.cuh", r"extern __shared__ .* raw\[\];", "uint8_t* raw = host_gpu::current->block->shared;"),
    ("kernel.cu", r"choose_cut\(", "host_gpu::choose("),
    # Tensor copies in small problems too.
    ("choose.h", r"kTensorSlots = \d+;", "kTensorSlots = 0;"),
)

# Outputs before a launch, and what lies around them: no result of a test's problem.
_POISON, _AROUND = 7.0, 64


class _Integers(ctypes.Structure):
    """A C struct of 32-bit integers."""

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name, _ in self._fields_}


class Params(ctypes.Structure):
    """params.h: DecodeParams."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("kv_indptr", "kv_indices", "kv_last_page_len")]
        + [
            (name, ctypes.c_int32)
            for name in ("batch", "page_size", "num_kv_indices", "num_kv_heads", "num_pages", "tensor_copies")
        ]
        + [("by_page_size", ctypes.c_int32 * 2), ("cut", Cut)]
        + [(name, ctypes.c_void_p) for name in ("k_cache", "v_cache")]
        + [(f"{kv}_stride_{d}", ctypes.c_int64) for kv in "kv" for d in ("page", "slot", "head")]
        + [("units", ctypes.c_uint32 * 5), ("q", ctypes.c_void_p)]
        + [("q_stride_batch", ctypes.c_int64), ("q_stride_head", ctypes.c_int64)]
        + [("k_scale", ctypes.c_void_p), ("sm_scale", ctypes.c_float)]
        + [("invariant_tokens", ctypes.c_int32), ("always_cut", ctypes.c_int32)]
        + [(name, ctypes.c_void_p) for name in ("v_scale", "output", "lse", "partials", "counters")]
    )


class _Forced(_Integers):
    """launch.cpp: Forced."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "splits",
            "clusters",
            "even_parts",
            "part_tokens",
            "tail_slot",
            "tail_scale",
            "least_64ths",
            "dealt",
            "alone",
            "is_even",
            "is_uncut",
        )
    ]


class _Options(_Integers):
    """launch.cpp: Options."""

    _fields_ = [
        ("resident", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("copies_early", ctypes.c_int32),
        ("any_order", ctypes.c_int32),
        ("scratch_byte", ctypes.c_int32),
        ("by_lanes", ctypes.c_int32),
    ]


class Report(_Integers):
    """launch.cpp: Report. Which kernel ran, its grid, and what it left."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "heads",
            "is_uncut",
            "splits",
            "units",
            "clusters",
            "numbers",
            "places",
            "places_written",
            "counters_left",
            "block_bytes",
            "tensor_copies",
        )
    ]


class CountersLeft(AssertionError):
    """Counters were not put back to zero."""


@dataclass(frozen=True)
class Room:
    """A device.

    Attributes
    ----------
    workers : int
        SMs.
    resident : int
        Blocks an SM.
    most_splits : int
        Blocks of the largest cluster; 1: a device without clusters.
    """

    workers: int = 3
    resident: int = 4  # single heads all run at once where pairs of them would: blocks take one
    most_splits: int = 8

    def clusters(self) -> tuple[int, ...]:
        """How many run at once, of 1, 2, ... 8 blocks."""
        return clusters_of(self.workers * self.resident, self.most_splits)


@dataclass(frozen=True)
class HostKernel:
    """The launcher and the kernels of one specialisation."""

    library: ctypes.CDLL
    params_type: type[Params] = Params
    _devices: dict[Room, int] = field(default_factory=dict)

    def _device_of(self, room: Room) -> int:
        """The launcher asks a device for its room once: each room is a device."""
        if room not in self._devices:
            device = self._devices[room] = len(self._devices)
            told = (ctypes.c_int32 * 10)(room.workers, room.resident, *room.clusters())
            self.library.set_device(device, told)
        return self._devices[room]

    def params_of(self, problem: Problem) -> Params:
        """What the binding hands to the launcher, outputs excepted."""
        spec, t = problem.spec, problem.tensors
        params = self.params_type(batch=len(t["q"]), num_kv_heads=spec.num_kv_heads, page_size=spec.page_size)
        for name in ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices"):
            setattr(params, name, t[name].data_ptr())
        for name in ("kv_last_page_len", "k_scale", "v_scale"):
            setattr(params, name, t[name].data_ptr() if name in t else None)
        params.q_stride_batch, params.q_stride_head = t["q"].stride()[:2]
        params.k_stride_page, params.k_stride_slot, params.k_stride_head = t["k_cache"].stride()[:3]
        params.v_stride_page, params.v_stride_slot, params.v_stride_head = t["v_cache"].stride()[:3]
        params.num_pages, params.num_kv_indices = len(t["k_cache"]), len(t["kv_indices"])
        params.sm_scale = float(t["sm_scale"])
        return params

    def __call__(
        self,
        problem: Problem,
        outputs: Outputs | None = None,
        *,
        room: Room = Room(),  # noqa: B008
        always_cut: bool = False,
        invariant_tokens: int = 0,
        running: int = 2,
        seed: int = 0,
        early: bool = False,
        any_order: bool = True,
        scratch_byte: int = 0xFF,
        by_lanes: bool = False,
        report: Report | None = None,
        **forced: int,
    ) -> Outputs:
        """Launches as the binding does.

        Parameters
        ----------
        problem : Problem
            On the CPU; of this kernel's specialisation, any page size and number of KV heads.
        outputs : pair of tensors, optional
            output and lse; by default fresh ones, poisoned before the launch and watched around their ends.
        room : Room
            The device.
        always_cut, invariant_tokens
            As in params.h.
        running : int
            Clusters that run at a time.
        seed : int
            Draws who runs when.
        early : bool
            Copies arrive at once, else as late as the kernel lets them.
        any_order : bool
            Clusters start in any order.
        scratch_byte : int
            Fills all scratch before the launch.
        by_lanes : bool
            No tensor copies, although page sizes allow them.
        report : Report, optional
            Filled in.
        **forced : int
            Of launch.cpp's Forced: in the place of what shapes settle.
        """
        watched = None if outputs else _Watched(problem)
        output, lse = outputs or (watched.output, watched.lse)  # type: ignore[union-attr]
        params = self.params_of(problem)
        params.output, params.lse = output.data_ptr(), lse.data_ptr()
        params.invariant_tokens, params.always_cut = invariant_tokens, always_cut
        report = report or Report()
        fault = self.library.launch(
            ctypes.byref(params),
            self._device_of(room),
            ctypes.byref(_Forced(**forced)),
            ctypes.byref(_Options(running, seed, early, any_order, scratch_byte, by_lanes)),
            ctypes.byref(report),
        )
        assert fault is None, fault.decode()
        if watched is not None:
            watched.check()
        if report.counters_left != 0:
            raise CountersLeft(f"{report.counters_left} counters are not zero after the launch")
        return output, lse

    def find_requests(
        self, problem: Problem, part_tokens: int, tail_slot: int, share_64ths: int, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The request that find.cuh finds for each of `numbers`, and each request's first number."""
        numbers, found = numbers.int().contiguous(), torch.full(numbers.shape, -7, dtype=torch.int32)
        begins = torch.empty_like(problem.tensors["kv_indptr"])
        fault = self.library.find_requests(
            ctypes.byref(self.params_of(problem)),
            part_tokens,
            tail_slot,
            share_64ths,
            len(numbers),
            ctypes.c_void_p(numbers.data_ptr()),
            ctypes.c_void_p(found.data_ptr()),
            ctypes.c_void_p(begins.data_ptr()),
        )
        assert fault is None, fault.decode()
        return found, begins


class _Watched:
    """Poisoned outputs, and memory around them that must not change."""

    def __init__(self, problem: Problem) -> None:
        self._wide = []
        views = []
        for wanted in problem.empty_outputs():
            wide = wanted.new_full((wanted.numel() + 2 * _AROUND,), _POISON)
            self._wide.append(wide)
            views.append(wide[_AROUND:-_AROUND].view(wanted.shape))
        self.output, self.lse = views

    def check(self) -> None:
        for wide in self._wide:
            ends = torch.cat([wide[:_AROUND], wide[-_AROUND:]])
            assert (ends == _POISON).all(), "memory beside the outputs is written"


def build_host_kernel(
    spec: DecodeSpec,
    folder: Path,
    sources: Path = KERNEL,
    params_type: type[Params] = Params,
    changes: Sequence[tuple[str, str, str]] = (),
) -> HostKernel:
    """Compiles the specialisation of `spec` in `folder`, which must be empty.

    Parameters
    ----------
    sources : Path
        Of the kernel; a variant's may have parameters of their own (`params_type`).
    changes : sequence of (file, text, replacement)
        In what stands in for the GPU, or in the sources' edits for the host; each text is there once.
    """
    for pattern in ("*.cu", "*.cuh", "*.h"):
        for source in sources.glob(pattern):
            text = source.read_text()
            for name, wanted, replacement in _EDITS:
                if name == source.name:
                    text, count = re.subn(wanted, replacement, text)
                    assert count == 1, f"{name}: {wanted} found {count} times, wanted once"
            (folder / source.name).write_text(text)
    template = jinja2.Template((sources / "specialisation.h.j2").read_text())
    (folder / "specialisation.h").write_text(template.render(spec=spec))
    for source in HOST_GPU.iterdir():
        (folder / source.name).write_text(source.read_text())
    for name, wanted, replacement in changes:
        text = (folder / name).read_text()
        assert text.count(wanted) == 1, f"{name}: {wanted} found {text.count(wanted)} times, wanted once"
        (folder / name).write_text(text.replace(wanted, replacement))
    # Fibers jump between stacks, which a fortified longjmp takes for an attack.
    flags = ["-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    command = [find_cxx(), *flags, f"-I{HOST_RUNTIME}", folder / "launch.cpp", "-o", folder / "kernel.so"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    loaded.launch.restype = loaded.find_requests.restype = ctypes.c_char_p
    assert loaded.params_bytes() == ctypes.sizeof(params_type), "params.h and Params differ"
    return HostKernel(loaded, params_type)


def check_kernel(
    kernel: HostKernel, problem: Problem, wanted: Outputs | None = None, **options: Any
) -> Report:
    """Right with late copies and with early ones, the same bits both times; whoever runs when."""
    told = f"lengths {problem.lengths}, {options}"
    report = Report()
    late = kernel(problem, report=report, **options)
    faults = check_outputs(problem.spec, *late, *(wanted or reference(problem)))
    assert faults == [], f"{told}: {faults}"
    seed = options.pop("seed", 0) + 1
    options["running"] = 1 + (options.pop("running", 2) + seed) % 5
    changed = {"early": True, "any_order": seed % 2 == 0, "scratch_byte": 0x41, "by_lanes": seed % 3 > 0}
    again = kernel(problem, seed=seed, **changed, **options)
    assert bit_equal(again, late), told
    return report
