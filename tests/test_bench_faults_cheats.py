"""B1 to B7 of other harnesses' faults: a cheat that would have passed, and a harness that catches it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bench_device_fakes import BF16, FP8, SIDE_STREAM, Coarse, Kernel, PreparedKernel, SimulatedGpu, run_case

from evenkv.bench.case import Case
from evenkv.bench.device.correctness import Rows, judge
from evenkv.bench.device.inputs import make_pool, pool_bytes
from evenkv.bench.device.subject import Subject
from evenkv.bench.effort import ROUNDS
from evenkv.bench.judge import Judge, Provenance
from evenkv.bench.protocol import DeviceFacts, Outcome

torch.set_num_threads(1)


def tried(kernel: type[Kernel], case: Case = BF16, **options: Any) -> Outcome:
    return run_case({"evenkv-cuda": lambda gpu: kernel("evenkv-cuda", gpu)}, case, **options)["evenkv-cuda"]


@pytest.mark.parametrize("case", [BF16, FP8, replace(BF16, layout="HND"), replace(BF16, page_size=1)])
def test_an_honest_kernel_passes(case: Case) -> None:
    outcome = tried(Kernel, case)
    assert outcome.status == "ok", outcome.reason
    assert outcome.graph_us == outcome.eager_us == 10.0
    assert outcome.iterations == 20 and outcome.spread == (10.0, 10.0)


class CachedOutput(Kernel):
    """B1: right once, then the same output again for whatever comes."""

    def attend(self, prepared: PreparedKernel) -> None:
        if prepared.calls == 1:
            prepared.write_exact()
            self.kept = [tensor.clone() for tensor in prepared.returned]
        for target, kept in zip(prepared.returned, self.kept, strict=True):
            target.copy_(kept)
        self.gpu.launch("copy", 2.0)


class CachedByQueries(Kernel):
    """B1, cleverer: knows its inputs again, until it is timed; then it writes nothing at all."""

    def attend(self, prepared: PreparedKernel) -> None:
        if prepared.calls <= 4:
            prepared.write_exact()
        self.gpu.launch("nothing", 2.0)


@pytest.mark.parametrize("cheat", [CachedOutput, CachedByQueries])
def test_b1_kept_outputs_are_caught(cheat: type[Kernel]) -> None:
    outcome = tried(cheat)
    assert outcome.status == "wrong" and outcome.graph_us is None
    assert outcome.reason is not None


class RemembersQueries(Kernel):
    """B1, cleverest: right for every query, and at once for those that it has seen before."""

    def attend(self, prepared: PreparedKernel) -> None:
        self.seen: set[bytes] = getattr(self, "seen", set())
        query = bytes(prepared.tensors.q.view(torch.uint8).numpy())
        prepared.write_exact()
        self.gpu.launch("attend", 1.0 if query in self.seen else self.us)
        self.seen.add(query)


def test_b1_who_remembers_queries_gains_nothing() -> None:
    outcome = tried(RemembersQueries)
    assert outcome.status == "ok"
    assert outcome.graph_us == outcome.eager_us == Kernel.us and outcome.spread == (Kernel.us, Kernel.us)


def test_b1_nobody_can_know_which_call_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[int] = set()
    seen: list[int] = []
    original = Subject.time_graph

    def watch(self: Subject, draws: Any, cold: bool, checked: int, **rest: Any) -> Any:
        drawn.add(checked)
        seen.extend(draws)
        return original(self, draws, cold, checked, **rest)

    monkeypatch.setattr(Subject, "time_graph", watch)
    assert tried(Kernel, iterations=100).status == "ok"
    assert len(drawn) > 1
    assert len(set(seen)) == len(seen) == 100, "no timed call sees queries that another one saw"


def test_b1_each_round_compares_other_requests_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(BF16, batch=24, lengths=tuple(range(1, 25)))
    asked: list[tuple[int, ...]] = []
    original = Subject.time_graph

    def watch(self: Subject, *arguments: Any, requests: Any, **rest: Any) -> Any:
        asked.append(tuple(requests))
        return original(self, *arguments, requests=requests, **rest)

    monkeypatch.setattr(Subject, "time_graph", watch)
    assert tried(Kernel, case).status == "ok"
    assert {len(requests) for requests in asked} == {16} and len(set(asked)) == len(asked) == ROUNDS


class OtherStream(Kernel):
    """B2: a short kernel where the timer looks, the work on a stream of its own."""

    def attend(self, prepared: PreparedKernel) -> None:
        prepared.write_exact()
        self.gpu.launch("decoy", 1.0)
        self.gpu.launch("attend", 400.0, stream=SIDE_STREAM)


@pytest.mark.parametrize("timer", ["cupti", "events"])
def test_b2_work_on_another_stream_is_caught(timer: str) -> None:
    outcome = tried(OtherStream, timer=timer)
    assert outcome.status == "wrong"
    assert "stream" in (outcome.reason or "")


class NothingLaunched(Kernel):
    """B2, the other way round: results by the host, the device idle."""

    def attend(self, prepared: PreparedKernel) -> None:
        prepared.write_exact()


def test_b2_a_call_without_work_has_no_time() -> None:
    outcome = tried(NothingLaunched)
    assert outcome.status == "wrong" and "launched nothing" in (outcome.reason or "")


def test_b3_a_time_that_memory_cannot_give_is_a_failure() -> None:
    case = Case(32, 4096, None, 32, 8, 128, 16)
    facts = DeviceFacts("Simulated", None, None, None, datasheet_gbps=4800.0)
    judge_rows = Judge(facts, 4200.0, Provenance({"evenkv-cuda": "0"}, None))
    honest = Outcome(
        "ok", None, 130.0, 140.0, 9.0, 100, (129.0, 131.0), 1e-3, 1e-3, 130.0, "cupti", 1980, 1980
    )
    assert judge_rows.row(case, "evenkv-cuda", honest).status == "ok"
    for time_us in (0.0, 0.5, 100.0):  # 512 MiB take 112 us at 4.8 TB/s
        row = judge_rows.row(
            case, "evenkv-cuda", replace(honest, graph_us=time_us, spread=(time_us, time_us))
        )
        assert row.status == "wrong" and row.graph_us is None and row.reason


class AllZero(Kernel):
    def attend(self, prepared: PreparedKernel) -> None:
        for tensor in prepared.returned:
            tensor.zero_()
        self.gpu.launch("zero", 2.0)


class ZeroOutputOnly(Kernel):
    """lse is right, and zeros are within 1e-2 of every element of a long context's output."""

    def attend(self, prepared: PreparedKernel) -> None:
        prepared.returned[0].zero_()
        prepared.returned[1].copy_(prepared.exact()[1])
        self.gpu.launch("zero", 2.0)


class MeanOfV(Kernel):
    def attend(self, prepared: PreparedKernel) -> None:
        kept = prepared.tensors.q.clone()
        prepared.tensors.q.zero_()
        prepared.write_exact()
        prepared.tensors.q.copy_(kept)
        self.gpu.launch("mean", 2.0)


class NoOp(Kernel):
    def attend(self, prepared: PreparedKernel) -> None:
        self.gpu.launch("nothing", 2.0)


class OneRequestShort(Kernel):
    """Leaves the last request's output as it was."""

    def attend(self, prepared: PreparedKernel) -> None:
        output, lse = prepared.exact()
        prepared.returned[0][:-1].copy_(output[:-1])
        prepared.returned[1].copy_(lse)
        self.gpu.launch("attend", 8.0)


@pytest.mark.parametrize("cheat", [AllZero, ZeroOutputOnly, MeanOfV, NoOp, OneRequestShort])
@pytest.mark.parametrize("case", [replace(BF16, lengths=(3000, 1500, 700)), FP8])
def test_b4_wrong_outputs_fail_on_any_length(cheat: type[Kernel], case: Case) -> None:
    outcome = tried(cheat, case)
    assert outcome.status == "wrong" and outcome.graph_us is None and outcome.reason


def test_b4_quantised_queries_have_a_wider_limit_that_catches_the_same() -> None:
    class Quantised(MeanOfV):
        def quantises_query(self, case: Case) -> bool:
            return True

    assert tried(Quantised, FP8).status == "wrong"


class ZeroForLong(Kernel):
    """B4: right where outputs are large, zero for one long request, whose outputs are small."""

    def attend(self, prepared: PreparedKernel) -> None:
        prepared.write_exact()
        prepared.returned[0][-1].zero_()
        self.gpu.launch("attend", 5.0)


def test_b4_each_request_has_its_own_norm() -> None:
    case = replace(BF16, batch=4, lengths=(1, 1, 1, 3000))
    outcome = tried(ZeroForLong, case)
    assert outcome.status == "wrong"
    assert "output is off by 1 of its norm" in (outcome.reason or "")
    assert outcome.rel_err is not None and outcome.rel_err < 0.02, "of all requests together it is nothing"


def test_b4_ours_may_not_be_twice_as_far_off_as_the_baseline() -> None:
    case = replace(FP8, lengths=(4, 4, 4))
    alone = tried(Coarse, case)
    assert alone.status == "ok", alone.reason
    together = run_case(
        {
            "evenkv-cuda": lambda gpu: Coarse("evenkv-cuda", gpu),
            "flashinfer-tc": lambda gpu: Kernel("flashinfer-tc", gpu),
        },
        case,
    )
    assert list(together) == ["evenkv-cuda", "flashinfer-tc"]
    assert together["evenkv-cuda"].status == "wrong"
    assert "twice the baseline's" in (together["evenkv-cuda"].reason or "")
    assert together["flashinfer-tc"].status == "ok"


@pytest.mark.parametrize(
    ("lse", "right"),
    [((-math.inf, 1.0), True), ((math.inf, 1.0), False), ((0.0, 1.0), False), ((math.nan, 1.0), False)],
)
def test_b5_infinities_match_by_sign_and_nothing_else_does(lse: tuple[float, float], right: bool) -> None:
    case = Case(2, None, (0, 2), 1, 1, 64, 16)
    output = np.zeros((2, 1, 64), np.float32)
    output[1] = 1.0
    rows = Rows(output, np.array(lse, np.float32)[:, None], all_written=True)
    verdict = judge(case, rows, output, np.array([[-math.inf], [1.0]], np.float32))
    assert (not verdict.faults) == right


def test_b5_a_finite_reference_is_not_matched_by_an_infinity() -> None:
    case = Case(1, 2, None, 1, 1, 64, 16)
    output = np.ones((1, 1, 64), np.float32)
    rows = Rows(output, np.full((1, 1), -math.inf, np.float32), all_written=True)
    assert judge(case, rows, output, np.ones((1, 1), np.float32)).faults


def test_b6_host_eager_and_graph_times_stand_side_by_side() -> None:
    class PlanInCall(Kernel):
        """Little on the device, milliseconds of planning on the host in every call."""

        def attend(self, prepared: PreparedKernel) -> None:
            time.sleep(0.004)
            prepared.write_exact()
            self.gpu.launch("attend", 5.0)

    both = {"plan": tried(PlanInCall), "none": tried(Kernel)}
    assert both["plan"].graph_us == both["plan"].eager_us == 5.0
    assert both["plan"].host_us is not None and both["none"].host_us is not None
    assert both["plan"].host_us > 4000.0 > both["none"].host_us


def test_b6_planning_ahead_is_reported_beside() -> None:
    class Planned(Kernel):
        def prepare(self, *arguments: Any) -> Any:
            prepared = super().prepare(*arguments)
            prepared.plan_us = 321.0
            return prepared

    gpu = SimulatedGpu()
    handler = Subject("x", 0, "cupti", machine=gpu, implementation=Planned("x", gpu))
    handler._pools = tuple(make_pool(pool_bytes(BF16), BF16.kv_dtype, gpu.device, 0) for _ in range(2))
    assert handler.prepare(BF16, 1)["plan_us"] == 321.0


class TwoSettings(Kernel):
    def settings(self, case: Case) -> tuple[str, ...]:
        return ("slow", "fast", "refused")

    def prepare(self, case: Case, tensors: Any, setting: str) -> Any:
        if setting == "refused":
            raise ValueError("not this one")
        return super().prepare(case, tensors, setting)

    def us_of(self, setting: str) -> float:
        return {"slow": 80.0, "fast": 10.0}[setting]


class FastIsWrong(TwoSettings):
    def attend(self, prepared: PreparedKernel) -> None:
        super().attend(prepared)
        if prepared.setting == "fast":
            prepared.returned[0].mul_(2.0)


def test_b7_a_peer_runs_at_its_best_setting_that_is_right() -> None:
    best = run_case({"fa3": lambda gpu: TwoSettings("fa3", gpu)})["fa3"]
    assert (best.status, best.graph_us, best.peer_version) == ("ok", 10.0, "1.0")
    right = run_case({"fa3": lambda gpu: FastIsWrong("fa3", gpu)})["fa3"]
    assert (right.status, right.graph_us) == ("ok", 80.0)


def test_b7_rounded_queries_are_said_beside_the_version() -> None:
    class Quantised(Kernel):
        def quantises_query(self, case: Case) -> bool:
            return True

    outcome = run_case({"fa3": lambda gpu: Quantised("fa3", gpu)}, FP8)["fa3"]
    assert outcome.peer_version == "1.0, q quantised"
