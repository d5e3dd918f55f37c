"""Inputs, reference, sampling, clocks and copies of the device's half of the roofline harness."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_device_fakes import BF16, FP8, SimulatedGpu

from evenkv.bench.case import Case
from evenkv.bench.device import correctness, keeper
from evenkv.bench.device.clocks import Clocks, ClockState
from evenkv.bench.device.copies import COPY_GRAIN, copy_call, gbps, matched_bytes, peak_bytes
from evenkv.bench.device.inputs import Tensors, build_tensors, make_pool, pool_bytes, seed_of, view_cache
from evenkv.bench.device.verdict import hidden_work, throttling
from evenkv.errors import EvenkvError
from evenkv.numerics.problem import Problem
from evenkv.numerics.reference import reference

torch.set_num_threads(1)
CPU = torch.device("cpu")
CASES = [
    BF16,
    FP8,
    replace(BF16, layout="HND"),
    replace(FP8, page_size=1, layout="HND"),
    replace(BF16, lengths=(0, 17, 64)),
    Case(2, 48, None, 5, 1, 128, 64),
]


def drawn(case: Case, seed: int = 3) -> Tensors:
    pools = [make_pool(pool_bytes(case), case.kv_dtype, CPU, half) for half in range(2)]
    return build_tensors(case, *pools, seed, (0, 1))


def as_problem(case: Case, tensors: Tensors, variant: int) -> Problem:
    values = {name: getattr(tensors, name) for name in case.spec().input_names}
    return Problem(case.spec(), tuple(case.request_lengths()), {**values, "q": tensors.queries[variant]})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_fp32_reference_agrees_with_the_fp64_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "_CHUNK_ELEMENTS", 2048)  # several pieces a request
    tensors = drawn(case)
    requests = [case.batch - 1, 0]
    outputs, lses = correctness.reference_rows(case, tensors, requests)
    assert len(outputs) == len(tensors.queries) == 2
    for variant in range(2):
        output, lse = reference(as_problem(case, tensors, variant))
        np.testing.assert_allclose(outputs[variant], output[requests].numpy(), rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(lses[variant], lse[requests].numpy(), rtol=2e-6, atol=2e-6)


def one_by_one(case: Case, tensors: Tensors, requests: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same attention in the plainest way: fp32, request by request, each as a whole."""
    outputs = torch.zeros(len(tensors.queries), len(requests), case.num_qo_heads, case.head_dim)
    lses = torch.full(outputs.shape[:3], -torch.inf)
    one = torch.ones(case.num_kv_heads)
    k_scale, v_scale = (one if scale is None else scale for scale in (tensors.k_scale, tensors.v_scale))
    for row, request in enumerate(requests):
        length = case.request_lengths()[request]
        begin, end = tensors.kv_indptr_host[request : request + 2].tolist()
        pages = tensors.kv_indices[begin:end].long()
        k, v = (
            cache.float()[pages].flatten(0, 1)[:length].transpose(0, 1)
            for cache in (tensors.k_cache, tensors.v_cache)
        )
        for variant, queries in enumerate(tensors.queries if length else ()):
            q = queries[request].float().view(case.num_kv_heads, -1, case.head_dim)
            logits = torch.bmm(q, k.transpose(1, 2)) * tensors.sm_scale * k_scale[:, None, None]
            lse = torch.logsumexp(logits, -1)
            attended = torch.bmm(torch.exp(logits - lse[..., None]), v) * v_scale[:, None, None]
            outputs[variant, row] = attended.flatten(0, 1)
            lses[variant, row] = lse.flatten() * correctness.LOG2_E
    return outputs.numpy(), lses.numpy()


def compare_with_one_by_one(case: Case, requests: list[int]) -> None:
    tensors = drawn(case)
    outputs, lses = correctness.reference_rows(case, tensors, requests)
    wanted = one_by_one(case, tensors, requests)
    np.testing.assert_allclose(np.stack(outputs), wanted[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(np.stack(lses), wanted[1], rtol=2e-6, atol=2e-6)


UNEVEN = (0, 300, 1, 16, 17, 96, 96, 95, 64, 0, 2, 33)


@pytest.mark.parametrize("chunk", [2048, 64 << 10, 64 << 20])
@pytest.mark.parametrize(
    "case",
    [
        *(replace(BF16, batch=12, context=context, lengths=None) for context in (1, 96)),
        *(replace(case, batch=12, lengths=UNEVEN) for case in (BF16, FP8)),
        replace(FP8, batch=12, lengths=UNEVEN, layout="HND"),
        replace(BF16, batch=12, lengths=UNEVEN, page_size=1),
        Case(12, None, UNEVEN, 5, 1, 128, 64),
    ],
    ids=lambda case: case.name,
)
def test_the_reference_of_batches_is_that_of_requests(
    case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "_CHUNK_ELEMENTS", chunk)
    compare_with_one_by_one(case, [11, 0, 1, 2, 4, 5, 6, 7, 9])


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (2, 2)])
@pytest.mark.parametrize("lengths", [(70,), (5, 0, 5, 31, 5)])
def test_the_reference_of_any_heads(heads: tuple[int, int], lengths: tuple[int, ...]) -> None:
    """A head a group, one KV head, one request: dimensions of size 1 that tensors may be viewed across."""
    case = replace(
        BF16, batch=len(lengths), lengths=lengths, num_qo_heads=heads[0], num_kv_heads=heads[1], context=None
    )
    compare_with_one_by_one(case, list(range(case.batch)))


@pytest.mark.parametrize(
    ("lengths", "passes"),
    [((2000, 3, 700, 700, 40, 1, 0, 650), 3 + 3 + 1), ((64,) * 30, 3)],
)
def test_a_pass_of_the_reference_gathers_no_more_than_its_chunk(
    lengths: tuple[int, ...], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, gathered = 100 << 10, []  # 800 tokens
    original = correctness._gather

    def gather(*arguments: Any) -> torch.Tensor:
        gathered.append(original(*arguments))
        return gathered[-1]

    monkeypatch.setattr(correctness, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(correctness, "_gather", gather)
    case = replace(BF16, batch=len(lengths), lengths=lengths)
    correctness.reference_rows(case, drawn(case), range(case.batch))
    assert max(piece.numel() for piece in gathered) <= chunk
    assert len(gathered) == 2 * passes, "K and V, and no pass for each request"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tables_list_each_page_once_and_say_the_lengths(case: Case) -> None:
    tensors = drawn(case)
    assert sorted(set(tensors.kv_indices.tolist())) == sorted(tensors.kv_indices.tolist())
    assert len(tensors.kv_indices) == case.num_pages()
    assert tensors.kv_indices.max() < tensors.k_cache.shape[0]
    pages = (tensors.kv_indptr[1:] - tensors.kv_indptr[:-1]).tolist()
    last = tensors.kv_last_page_len.tolist()
    lengths = [(p - 1) * case.page_size + n if p else 0 for p, n in zip(pages, last, strict=True)]
    assert lengths == case.request_lengths() == tensors.lengths.tolist()
    table = tensors.block_table()
    for request, count in enumerate(pages):
        begin = int(tensors.kv_indptr[request])
        assert table[request, :count].tolist() == tensors.kv_indices[begin : begin + count].tolist()


def test_every_process_draws_the_same_inputs_and_another_case_others() -> None:
    seed = seed_of(BF16)
    first, second = drawn(BF16, seed), drawn(BF16, seed)
    for name in ("kv_indices", "q", "k_cache"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.queries[0], first.queries[1])
    assert seed == seed_of(replace(BF16)) != seed_of(FP8)
    other = drawn(BF16, seed + 1)
    assert not torch.equal(first.kv_indices, other.kv_indices)


def test_a_cache_is_a_view_of_the_pool_in_its_layout() -> None:
    pool = make_pool(2 * pool_bytes(BF16), BF16.kv_dtype, CPU, 0)
    for case in (BF16, replace(BF16, layout="HND")):
        cache = view_cache(pool, case)
        assert cache.shape[1:] == (case.page_size, case.num_kv_heads, case.head_dim)
        assert cache.data_ptr() == pool.data_ptr()
    assert view_cache(pool, replace(BF16, layout="HND")).transpose(1, 2).is_contiguous()
    with pytest.raises(EvenkvError, match="pool holds torch.bfloat16"):
        view_cache(pool, FP8)
    with pytest.raises(EvenkvError, match="wanted"):
        view_cache(pool[:100], BF16)


def test_pool_contents_are_normal_in_every_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkv.bench.device.inputs._SLAB_BYTES", 1 << 14)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        pool = make_pool(1 << 18, dtype, CPU, 7).float()
        for part in pool.chunk(8):
            assert abs(float(part.mean())) < 0.05 and abs(float(part.std()) - 1) < 0.05
        assert not torch.equal(pool[: 1 << 13], pool[1 << 13 : 1 << 14])


def test_few_short_requests_are_all_checked_and_many_by_a_hidden_draw() -> None:
    assert correctness.sample_requests([5, 40, 33], 8, random.Random(0)) == [0, 1, 2]
    lengths = [1000 + n for n in range(256)]
    lengths[100], lengths[200] = 9, 50_000
    draws = [correctness.sample_requests(lengths, 8, random.Random(seed)) for seed in range(5)]
    assert len({tuple(draw) for draw in draws}) == 5
    for draw in draws:
        assert {0, 100, 200, 255} <= set(draw) and len(draw) == 64
    long = correctness.sample_requests([131072] * 256, 32, random.Random(0))
    assert sum(131072 for _ in long) * 32 <= 2 * (8 << 20)


def test_rows_that_are_not_all_written_are_faulty() -> None:
    output = torch.ones(4, 2, 64)
    lse = torch.zeros(4, 2)
    assert correctness.take_rows(output, lse, [0]).all_written
    assert correctness.take_rows(output, None, [0]).lse is None
    assert correctness.take_rows(output, lse.fill_(-torch.inf), [0]).all_written  # empty requests
    output[3, 1, 5] = torch.nan  # not in the sample
    rows = correctness.take_rows(output, lse, [0])
    assert not rows.all_written
    case = Case(4, 8, None, 2, 1, 64, 16)
    verdict = correctness.judge(case, rows, rows.output, np.full((1, 2), -np.inf, np.float32))
    assert verdict.faults


class FakeNvml:
    """Answers as the C library does, through pointers."""

    def __init__(self, throttle: int = 0, code: int = 0) -> None:
        self.throttle, self.code, self.uuid = throttle, code, None

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        self.uuid = uuid.value
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, which: Any, out: Any) -> int:
        return self._set(out, ctypes.c_uint, {1: 1980, 2: 3201}[which.value])

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, which: Any, out: Any) -> int:
        return self._set(out, ctypes.c_uint, {1: 1980, 2: 3201}[which.value])

    def nvmlDeviceGetTemperature(self, handle: Any, which: Any, out: Any) -> int:
        return self._set(out, ctypes.c_uint, 41)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, out: Any) -> int:
        return self._set(out, ctypes.c_ulonglong, self.throttle)

    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, out: Any) -> int:
        return self._set(out, ctypes.c_uint, 6144)

    @staticmethod
    def _set(out: Any, kind: Any, value: int) -> int:
        ctypes.cast(out, ctypes.POINTER(kind))[0] = value
        return 0


def test_clocks_are_read_from_nvml() -> None:
    library = FakeNvml(throttle=0x40 | 0x04)
    clocks = Clocks("GPU-1234", library=library)
    assert clocks.state() == ClockState(1980.0, 41.0, ("hardware thermal slowdown",))
    assert library.uuid == b"GPU-1234" and clocks.reason is None
    assert clocks.memory_peak_gbps() == pytest.approx(4917, rel=1e-3)


@pytest.mark.parametrize("library", [FakeNvml(code=3), SimpleNamespace()])
def test_clocks_that_cannot_be_read_say_why(library: Any) -> None:
    clocks = Clocks("GPU-1234", library=library)
    assert clocks.state() is None and clocks.memory_peak_gbps() is None
    assert clocks.reason is not None and clocks.reason.startswith("no NVML")


def test_throttling_names_reasons_and_a_falling_clock() -> None:
    def at(mhz: float, *reasons: str) -> ClockState:
        return ClockState(mhz, 50.0, reasons)

    assert throttling([]) is None
    assert throttling([None, at(1980), at(1950)]) is None
    assert throttling([at(345), at(1980)]) is None  # woke up
    assert throttling([at(1980), at(1980, "power brake"), at(1980)]) == "throttled by power brake"
    fallen = [at(1980), at(1200), at(1980)]
    assert "fell from 1980 to 1200 MHz" in (throttling(fallen) or "")
    assert "fell from 1980 to 1200 MHz" in (throttling(fallen, 1.2) or "")
    assert throttling(fallen, 1.01) is None, "what memory bounds keeps its time"
    assert throttling([at(1980), at(1200, "power brake")], 1.01) == "throttled by power brake"


def test_hidden_work_compares_with_the_wall() -> None:
    assert hidden_work(10.0, 35.0) is None
    assert hidden_work(2000.0, 2030.0) is None
    assert "another stream" in (hidden_work(5.0, 400.0) or "")


@pytest.mark.parametrize("buffer", [1 << 10, 999, 1 << 12])
def test_a_matched_copy_moves_all_its_bytes_piece_by_piece(buffer: int) -> None:
    source = torch.arange(2048, dtype=torch.int16).view(torch.bfloat16)
    target = torch.zeros(buffer, dtype=torch.uint8)
    copied: list[int] = []
    call = copy_call(source, target, 4000)
    original = torch.Tensor.copy_

    def count(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(other.numel())
        return original(self, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", count)
        call()
    assert sum(copied) == 4000 and max(copied) <= buffer
    last = copied[-1]
    assert torch.equal(target[:last], source.view(torch.uint8)[4000 - last : 4000])


def test_copy_speeds_count_read_and_write() -> None:
    assert gbps(4 << 30, 2000.0) == pytest.approx(4295, rel=1e-3)
    assert peak_bytes(140 << 30) == 4 << 30
    assert peak_bytes(6 << 30) == 2 << 30


@pytest.mark.parametrize(
    "case", [*CASES, Case(1, None, (91,), 5, 1, 128, 1), replace(BF16, lengths=(0, 0, 0))]
)
def test_a_matched_copy_is_of_whole_pages(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remainder would be a copy of its own, and count for uneven batches alone."""
    gpu, asked = SimulatedGpu(), []

    def watch(source: torch.Tensor, target: torch.Tensor, num_bytes: int) -> Callable[[], None]:
        asked.append((source.numel() * source.element_size(), target.numel(), num_bytes))
        return lambda: gpu.launch("copy", 5.0)

    monkeypatch.setattr(keeper, "copy_call", watch)
    owner = keeper.Keeper(0, "cupti", machine=gpu)
    owner.allocate(pool_bytes(case), case.kv_bytes(), case.kv_dtype, seed=1)
    owner.matched_copy(case.kv_bytes(), 2, cold=True)
    [(source, target, copied)] = asked
    assert copied == matched_bytes(case.kv_bytes()) and copied % COPY_GRAIN == 0 < copied
    assert 0 <= copied - case.kv_bytes() // 2 <= COPY_GRAIN
    assert source >= copied and target >= copied, "one copy, no pieces"
