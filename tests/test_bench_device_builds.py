"""What is run ahead of timing so that no compiler works during it."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_device_fakes import BF16, FP8, Kernel, PreparedKernel, SimulatedGpu

from evenkv.bench import grid
from evenkv.bench.case import Case
from evenkv.bench.device.implementations import make_implementation
from evenkv.bench.device.inputs import pool_bytes
from evenkv.bench.device.subject import Subject
from evenkv.bench.record import IMPLEMENTATIONS
from evenkv.numerics.bytes import ELEMENT_BYTES
from evenkv.spec.family import FAMILY

torch.set_num_threads(1)
_GPUS = (78, 114, 132, 148)  # SMs


class Recording(Kernel):
    def __init__(self, gpu: SimulatedGpu, cases: tuple[Case, ...] = ()) -> None:
        super().__init__("fa3", gpu)
        self.cases, self.ran = cases, []

    def settings(self, case: Case) -> tuple[str, ...]:
        return ("plain", "metadata")

    def build_cases(self, case: Case) -> tuple[Case, ...]:
        return self.cases or super().build_cases(case)

    def attend(self, prepared: PreparedKernel) -> None:
        assert prepared.tensors.lengths.tolist() == prepared.case.request_lengths()
        super().attend(prepared)
        self.ran.append((prepared.case, prepared.setting))


@pytest.mark.parametrize("more", [(), (replace(BF16, lengths=(40, 3, 90)),)])
def test_a_build_runs_every_case_that_the_implementation_asks_for(more: tuple[Case, ...]) -> None:
    gpu = SimulatedGpu()
    smallest = Case(1, 16, None, 4, 2, 64, 16)
    kernel = Recording(gpu, (smallest, *more) if more else ())
    Subject("fa3", 0, "events", machine=gpu, implementation=kernel).build(BF16)
    assert kernel.ran == [(c, s) for c in (smallest, *more) for s in ("plain", "metadata")]


def test_a_build_that_fails_on_its_second_case_fails() -> None:
    class Fails(Recording):
        def attend(self, prepared: PreparedKernel) -> None:
            if prepared.case.batch > 1:
                raise ValueError("no such variant")
            super().attend(prepared)

    gpu = SimulatedGpu()
    subject = Subject("fa3", 0, "events", machine=gpu, implementation=Fails(gpu, (BF16, FP8)))
    with pytest.raises(ValueError, match="no such variant"):
        subject.build(BF16)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_built_cases_are_small_and_of_the_same_build(name: str) -> None:
    implementation = make_implementation(name)
    for spec in FAMILY:
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
        case = Case(256, 131072, None, *heads, kv_dtype=spec.kv_dtype)
        small = implementation.build_cases(case)
        assert len(small) == (2 if name == "evenkv-triton" else 1)
        assert small[0].num_pages() == 1
        for each in small:
            assert each.family == case.family
            assert implementation.build_key(each) == implementation.build_key(case)
            assert 2 * pool_bytes(each) <= 160 << 20


def whether_cut(cases: list[Case]) -> list[set[bool]]:
    """By case: whether evenkv_triton cuts it, on GPUs of several sizes."""
    from evenkv.kernels.evenkv_triton import cut, tuning

    found: list[set[bool]] = []
    for case in cases:
        spec, pages = case.spec(), case.num_pages()
        group = spec.num_qo_heads // spec.num_kv_heads
        tile = tuning.choose(spec.head_dim, ELEMENT_BYTES[spec.kv_dtype], group, 57343).tile
        shape = spec.num_kv_heads, case.batch, spec.page_size, pages, tile
        choices = [cut.choose_cut(*shape, sms * tuning.PROGRAMS_PER_SM) for sms in _GPUS]
        found.append({not choice.uncut for choice in choices})
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_tritons_kernels_for_whole_and_for_cut_requests_are_both_built() -> None:
    implementation = make_implementation("evenkv-triton")
    geometries: dict[Any, Case] = {case.spec(): case for case in grid.protocol()}
    wide = (Case(1, 1, None, 64, kv, dim, 16) for kv, dim in itertools.product((1, 64), (64, 256)))
    cases = [*geometries.values(), *wide]
    small = [each for case in cases for each in implementation.build_cases(case)]
    # In a process of its own: Triton looks at its switches when it is imported, and other tests set them.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(whether_cut, small).result()
    assert found == [{False}, {True}] * len(cases)
