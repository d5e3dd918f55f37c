"""Peers as the harness calls them: scales, tables, layouts and lse, against stand-ins by the book."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_device_fakes import BF16, FP8, Kernel, SimulatedGpu

from evenkv.bench.case import Case
from evenkv.bench.device.correctness import judge, reference_rows
from evenkv.bench.device.implementations import make_implementation
from evenkv.bench.device.inputs import build_tensors, make_pool, pool_bytes
from evenkv.bench.device.subject import Refused, Subject
from evenkv.bench.device.worker import Worker
from evenkv.bench.plan import _SETTINGS
from evenkv.bench.record import IMPLEMENTATIONS, OURS
from evenkv.errors import EvenkvError

torch.set_num_threads(1)
CASES = [
    BF16,
    FP8,
    replace(BF16, layout="HND"),
    replace(FP8, layout="HND"),
    replace(FP8, lengths=(64, 1, 17)),
]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: list[torch.Tensor],
    lengths: list[int],
    scale: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural lse; q `[batch, heads, dim]`, caches NHD, `scale` `[batch, kv heads]` or one."""
    batch, heads, dim = q.shape
    kv_heads = k.shape[2]
    output, lse = torch.zeros(batch, heads, dim), torch.zeros(batch, heads)
    scale = torch.as_tensor(scale, dtype=torch.float32).expand(batch, kv_heads)
    for request, length in enumerate(lengths):
        rows = [
            cache.float()[pages[request].long()].flatten(0, 1)[:length].transpose(0, 1) for cache in (k, v)
        ]
        by_head = q[request].float().view(kv_heads, -1, dim)
        logits = torch.bmm(by_head, rows[0].transpose(1, 2)) * scale[request][:, None, None]
        lse[request] = torch.logsumexp(logits, -1).view(-1)
        output[request] = torch.bmm(logits.softmax(-1), rows[1]).view(heads, dim)
    return output, lse


def nhd(cache: torch.Tensor, layout: str) -> torch.Tensor:
    assert cache.is_contiguous()
    return cache.transpose(1, 2) if layout == "HND" else cache


class FakeWrapper:
    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool, backend: str) -> None:
        assert backend == ("fa2" if use_tensor_cores else "auto")
        self.layout = layout

    def plan(self, indptr: Any, indices: Any, last: Any, *shape: int, **options: Any) -> None:
        heads, kv_heads, dim, page = shape
        self.planned = options
        counts = (indptr[1:] - indptr[:-1]).tolist()
        self.pages = list(indices.split(counts))
        self.lengths = [(c - 1) * page + n for c, n in zip(counts, last.tolist(), strict=True)]

    def run(self, q: Any, caches: Any, *, out: Any, lse: Any, return_lse: bool) -> None:
        assert q.dtype == out.dtype == self.planned["q_data_type"] and return_lse
        k, v = (nhd(cache, self.layout) for cache in caches)
        assert k.dtype == self.planned["kv_data_type"]
        output, natural = attend(q, k, v, self.pages, self.lengths, self.planned["sm_scale"])
        out.copy_(output)
        lse.copy_(natural * math.log2(math.e))


def fake_xqa(**a: Any) -> None:
    assert a["seq_lens"].dtype == torch.uint32 and a["bmm2_scale"] == 1.0
    assert a["query"].dtype == a["out"].dtype
    k, v = (nhd(cache, a["kv_layout"]) for cache in a["kv_cache"])
    lengths = a["seq_lens"].view(torch.int32).tolist()
    assert a["max_seq_len"] == max(lengths)
    a["out"].copy_(attend(a["query"], k, v, list(a["block_tables"]), lengths, a["bmm1_scale"])[0])


def fake_fa3(q: Any, k: Any, v: Any, **a: Any) -> Any:
    assert a["return_softmax_lse"] and q.dtype == k.dtype and k.stride(-1) == 1
    scale = a["softmax_scale"]
    if "q_descale" in a:
        scale = scale * a["q_descale"] * a["k_descale"]
    output, lse = attend(q[:, 0], k, v, list(a["page_table"]), a["cache_seqlens"].tolist(), scale)
    if "v_descale" in a:
        batch, heads, dim = output.shape
        by_head = output.view(batch, k.shape[2], -1, dim) * a["v_descale"][:, :, None, None]
        output = by_head.view(batch, heads, dim)
    return output.to(torch.bfloat16)[:, None], lse[..., None], None, None


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    decode.xqa_batch_decode_with_kv_cache = fake_xqa  # type: ignore[attr-defined]
    flash_attn = ModuleType("flash_attn_interface")
    flash_attn.flash_attn_with_kvcache = fake_fa3  # type: ignore[attr-defined]
    flash_attn.get_scheduler_metadata = lambda *a, **k: "metadata"  # type: ignore[attr-defined]
    for module in (flashinfer, decode, flash_attn):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["flashinfer-tc", "flashinfer-cc", "flashinfer-xqa", "fa3"])
def test_peers_attend_to_what_the_case_says(name: str, case: Case) -> None:
    implementation = make_implementation(name)
    assert implementation.missing() is None and implementation.supports(case) is None
    pools = [make_pool(pool_bytes(case), case.kv_dtype, torch.device("cpu"), half) for half in range(2)]
    subject = Subject(name, 0, "cupti", machine=SimulatedGpu(), implementation=implementation)
    subject._pools = tuple(pools)
    requests = list(range(case.batch))
    outputs, lses = reference_rows(case, build_tensors(case, *pools, 9, (0, 1)), requests)
    for setting in implementation.settings(case):
        tensors = build_tensors(case, *pools, 9)
        subject._running = subject._capture(case, tensors, setting)
        for draw in (1, 0, 1):
            rows = subject.check(draw, requests)
            verdict = judge(
                case,
                rows,
                outputs[draw],
                lses[draw],
                quantises_query=implementation.quantises_query(case),
            )
            assert verdict.faults == (), (setting, draw)
            assert (rows.lse is None) == (name == "flashinfer-xqa")
            # Quantised queries cost accuracy: the row must say so, and only then may it be so.
            stand_in_rounds = name == "fa3" and case.spec().is_fp8
            assert (verdict.rel_err > 0.004) == stand_in_rounds


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_of_the_record_can_be_made(name: str) -> None:
    implementation = make_implementation(name)
    assert implementation.name == name
    assert implementation.quantises_query(FP8) == (name in ("flashinfer-xqa", "fa3"))
    assert not implementation.quantises_query(BF16)
    assert len(implementation.settings(BF16)) == _SETTINGS.get(name, 1), "the plan counts them"


def test_refusals_have_reasons() -> None:
    assert "page sizes" in (make_implementation("flashinfer-xqa").supports(replace(BF16, page_size=1)) or "")
    assert make_implementation("flashinfer-cc").supports(Case(1, 8, None, 5, 1, 128, 16))
    with pytest.raises(EvenkvError, match="Unknown implementation 'x'"):
        make_implementation("x")
    gpu = SimulatedGpu()
    subject = Subject("flashinfer-xqa", 0, "cupti", machine=gpu)
    subject._pools = (torch.empty(0), torch.empty(0))
    with pytest.raises(Refused, match="page sizes"):
        subject.prepare(replace(BF16, page_size=1), 1)


def test_a_call_that_cannot_be_captured_is_refused_by_name() -> None:
    class Gpu(SimulatedGpu):
        def capture(self, call: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    gpu = Gpu()
    subject = Subject("fa3", 0, "cupti", machine=gpu, implementation=Kernel("fa3", gpu))
    pools = [make_pool(pool_bytes(BF16), BF16.kv_dtype, gpu.device, half) for half in range(2)]
    subject._pools = tuple(pools)
    with pytest.raises(Refused, match="cannot be captured in a CUDA graph: operation not permitted"):
        subject.prepare(BF16, 1)


def test_arguments_fit_the_installed_flashinfer() -> None:
    decode = pytest.importorskip("flashinfer.decode")
    if not hasattr(decode, "xqa_batch_decode_with_kv_cache"):
        pytest.skip("this FlashInfer has no XQA")
    names = (
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale out "
        "kv_layout"
    )
    inspect.signature(decode.xqa_batch_decode_with_kv_cache).bind(**dict.fromkeys(names.split()))
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper
    inspect.signature(wrapper.__init__).bind(None, None, "NHD", use_tensor_cores=True, backend="fa2")
    inspect.signature(wrapper.run).bind(None, None, None, out=None, lse=None, return_lse=True)
    # plan() itself takes any keyword.
    plan = getattr(wrapper, "_plan_impl", wrapper.plan)
    options = dict.fromkeys(("q_data_type", "kv_data_type", "sm_scale"))
    inspect.signature(plan).bind(*[None] * 4, 32, 8, 128, 16, **options)


def test_our_kernels_take_the_case_as_the_definition_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenkv.bench.device.implementations import evenkv as ours

    calls: list[Any] = []
    monkeypatch.setattr(
        ours, "build_kernel", lambda name, spec: calls.append((name, spec)) or SimpleNamespace(__call__=None)
    )
    implementation = make_implementation("evenkv-cuda")
    pools = [make_pool(pool_bytes(FP8), FP8.kv_dtype, torch.device("cpu"), half) for half in range(2)]
    tensors = build_tensors(FP8, *pools, 9)
    prepared: Any = implementation.prepare(FP8, tensors, "default")
    assert calls == [("evenkv_cuda", FP8.spec())]
    names = [*FP8.spec().input_names, "output", "lse"]
    arguments = dict(zip(names, prepared._arguments, strict=True))
    assert arguments["k_scale"] is tensors.k_scale and arguments["sm_scale"] == tensors.sm_scale
    assert arguments["output"] is prepared.returned[0] and arguments["lse"] is prepared.returned[1]


@pytest.mark.parametrize("name", OURS)
def test_our_kernels_say_what_they_lack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenkv.bench.device.implementations import evenkv as ours

    def lacking() -> Any:
        raise EvenkvError("There is no nvcc.", "Install the CUDA toolkit.")

    subject = Subject(name, 0, "cupti", machine=SimulatedGpu())
    for tool in ("find_nvcc", "find_cxx", "require_ninja"):
        monkeypatch.setattr(ours, tool, lambda: None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert subject.describe() == (None, None)
    if name == "evenkv-cuda":
        monkeypatch.setattr(ours, "find_nvcc", lacking)
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    missing, version = subject.describe()
    assert version is None
    assert ("no nvcc" if name == "evenkv-cuda" else "triton") in (missing or "")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("case", [BF16, FP8], ids=lambda case: case.name)
def test_the_triton_kernel_goes_through_every_command(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Under the interpreter, in a process of its own: Triton looks at the switch when it is imported.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    worker = Worker(
        "evenkv-triton", "bench_device_handlers:simulated_subject", {"name": OURS[1], "case": case}
    )
    requests = list(range(case.batch))
    pools = [make_pool(pool_bytes(case), case.kv_dtype, torch.device("cpu"), half) for half in range(2)]
    outputs, lses = reference_rows(case, build_tensors(case, *pools, 9, (0, 1)), requests)
    try:
        assert worker.call("describe") == (None, None)
        facts = worker.call("prepare", case=case, seed=9)
        assert facts == {"setting": "default", "plan_us": 0.0, "quantises_query": False}
        eager = worker.call("check", draw=1, requests=requests)
        few = {"draws": [1, 0], "cold": True}
        times, replayed = worker.call("time_graph", **few, checked=1, requests=requests)
        assert len(times) == 2
        for rows, draw in ((eager, 1), (replayed, 0)):
            assert judge(case, rows, outputs[draw], lses[draw]).faults == ()
        assert len(worker.call("time_eager", **few, warm_up=0)) == 2
        assert len(worker.call("time_host", count=1)) == 1
        assert len(worker.call("time_wall", **few)) == 2
        worker.call("finish")
        assert worker.call("release") == 0
    finally:
        worker.end()
