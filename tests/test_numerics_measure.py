"""Byte counter, error measure, limits, and fake kernels that must not pass."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from evenkv.errors import EvenkvError
from evenkv.numerics import fakes
from evenkv.numerics.bytes import kv_bytes, problem_bytes
from evenkv.numerics.check import check_outputs
from evenkv.numerics.error import measure
from evenkv.numerics.problem import Problem, make_problem
from evenkv.numerics.reference import definition_reference, reference
from evenkv.numerics.tolerance import TOLERANCES, tolerance
from evenkv.paths import OP_TYPE, Repository
from evenkv.spec.family import DecodeSpec, parse_name

REPOSITORY = Repository(Path(__file__).resolve().parents[1])
SEED = DecodeSpec(5, 1, 128, 1)
FP8 = DecodeSpec(8, 2, 128, 16, "float8_e4m3fn")


def test_bytes_by_hand() -> None:
    # 91 tokens of one head: 2 * 91 * 128 * 2 bytes.
    assert kv_bytes(SEED, [91]) == 46_592
    assert problem_bytes(SEED, [91]) == 46_592 + 2 * (5 * 128 * 2) + 5 * 4 + (2 + 91) * 4
    # Pages are counted in the tables, tokens in the caches: 17 tokens are 2 pages of 16.
    assert kv_bytes(FP8, [17, 0]) == 2 * 17 * 2 * 128
    tables = (3 + 2) * 4 + 2 * 4 + 2 * 2 * 4
    assert problem_bytes(FP8, [17, 0]) == kv_bytes(FP8, [17]) + 2 * (2 * 8 * 128 * 2) + 2 * 8 * 4 + tables


@pytest.mark.parametrize("spec", [SEED, DecodeSpec(8, 2, 64, 16), FP8], ids=lambda spec: spec.short_name)
def test_problem_bytes_are_the_bytes_of_the_tensors(spec: DecodeSpec) -> None:
    lengths = [3 * spec.page_size, spec.page_size]  # whole pages, so that a pool of them holds nothing else
    problem = make_problem(spec, lengths, num_pages=4)
    tensors = [t for t in problem.tensors.values() if isinstance(t, torch.Tensor)]
    moved = [*tensors, *problem.empty_outputs()]
    assert problem_bytes(spec, lengths) == sum(t.numel() * t.element_size() for t in moved)


def test_negative_length_is_named() -> None:
    with pytest.raises(EvenkvError, match=r"lengths\[1\] is -3"):
        kv_bytes(SEED, [1, -3])


@pytest.mark.parametrize("pair", TOLERANCES, ids="-".join)
def test_rounding_the_exact_result_passes_with_room(pair: tuple[str, str]) -> None:
    output, lse = reference(make_problem(DecodeSpec(8, 2, 64, 16), [1, 5, 600, 0]))
    report = measure(output.to(getattr(torch, pair[1])), lse.float(), output, lse)
    limit = tolerance(*pair)
    assert 0 < report.max_request_rel_err < limit.output / 2
    assert report.lse_err < limit.lse / 100


def test_unknown_pair_is_named() -> None:
    with pytest.raises(EvenkvError, match="int8"):
        tolerance("int8")


def _exact(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    output, lse = reference(make_problem(FP8, lengths, seed=seed))
    return output.bfloat16(), lse.float(), output, lse


def test_worst_index_is_found() -> None:
    output, lse, ref_output, ref_lse = _exact([5, 9, 300])
    output[1, 3, 77] += 1.0
    lse[2, 4] += 0.5
    report = measure(output, lse, ref_output, ref_lse)
    assert report.worst_request == 1 and report.worst_index == (1, 3, 77) and report.worst_lse_index == (2, 4)
    assert report.max_abs_err == pytest.approx(1.0, abs=0.02)
    assert report.max_request_rel_err == pytest.approx(1.0 / float(ref_output[1].norm()), rel=0.03)
    faults = check_outputs(FP8, output, lse, ref_output, ref_lse)
    assert len(faults) == 2
    assert "request 1" in faults[0] and "head 3, dim 77" in faults[0]
    assert "request 2, head 4" in faults[1]


def test_error_is_relative_to_each_request() -> None:
    output, lse, ref_output, ref_lse = _exact([1, 4000])
    output[1] = 0  # small beside request 0, all of request 1
    report = measure(output, lse, ref_output, ref_lse)
    assert report.max_request_rel_err == 1.0 and report.rel_err < 0.2
    assert check_outputs(FP8, output, lse, ref_output, ref_lse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_output_never_passes(value: float) -> None:
    output, lse, ref_output, ref_lse = _exact([5])
    output[0, 0, 0] = value
    assert measure(output, lse, ref_output, ref_lse).max_request_rel_err == math.inf
    assert check_outputs(FP8, output, lse, ref_output, ref_lse)


def test_infinities_of_lse_match_by_sign_only() -> None:
    output, lse, ref_output, ref_lse = _exact([0, 5])
    assert check_outputs(FP8, output, lse, ref_output, ref_lse) == []
    for request, value in ((0, math.inf), (0, -1e30), (0, math.nan), (1, -math.inf)):
        changed = lse.clone()
        changed[request, 2] = value
        assert measure(output, changed, ref_output, ref_lse).lse_err == math.inf
        assert "lse" in check_outputs(FP8, output, changed, ref_output, ref_lse)[0]


def test_wrong_shapes_and_dtypes_are_faults() -> None:
    output, lse, ref_output, ref_lse = _exact([5])
    assert check_outputs(FP8, output[:, :7], lse, ref_output, ref_lse)
    assert "float32" in check_outputs(FP8, output.float(), lse, ref_output, ref_lse)[0]
    assert "lse" in check_outputs(FP8, output, lse.double(), ref_output, ref_lse)[0]
    with pytest.raises(EvenkvError, match="shape"):
        measure(output[:, :7], lse, ref_output, ref_lse)


def _fakes(problem: Problem) -> dict[str, fakes.KernelCallable]:
    before = make_problem(problem.spec, problem.lengths, seed=991)
    return {
        "no-op": fakes.no_op,
        "all-zero": fakes.all_zero,
        "mean-of-V": fakes.mean_of_v,
        "stale": fakes.StaleOutput(before),
    }


def _assert_fakes_fail(problem: Problem) -> None:
    wanted = reference(problem)
    for name, fake in _fakes(problem).items():
        output, lse = problem.empty_outputs()
        fake(problem.spec, *problem.inputs(), output, lse)
        assert check_outputs(problem.spec, output, lse, *wanted), f"{name} passed {problem.spec.name}"


@pytest.mark.parametrize("spec", [SEED, DecodeSpec(8, 2, 64, 16), FP8], ids=lambda spec: spec.short_name)
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [16], [0, 7], [2500, 40, 1]], ids=str)
def test_fakes_fail(spec: DecodeSpec, lengths: list[int]) -> None:
    _assert_fakes_fail(make_problem(spec, lengths))


def test_fakes_fail_on_a_long_context_by_the_output_alone() -> None:
    """The error is relative: at 131072 tokens outputs are near 0.004, and a limit of 0.01 passes zeros."""
    problem = make_problem(DecodeSpec(1, 1, 64, 64), [131072])
    ref_output, ref_lse = reference(problem)
    assert float(ref_output.abs().max()) < 0.03
    for name, fake in _fakes(problem).items():
        output, lse = problem.empty_outputs()
        fake(problem.spec, *problem.inputs(), output, lse)
        report = measure(output, lse, ref_output, ref_lse)
        assert report.max_request_rel_err > 50 * tolerance("bfloat16").output, name


def _committed_workloads() -> list[tuple[str, str, list[int]]]:
    """(definition, uuid, the shortest request and the longest that is cheap enough) of workloads on disk.

    One request that a fake gets wrong fails a workload, and the worst request decides: so its shortest and
    longest requests stand for it. Of each definition the first, the middle and the last workload.
    """
    chosen = []
    for path in sorted(REPOSITORY.workloads.glob("*.jsonl")):
        spec = parse_name(path.stem)
        lines = path.read_text(encoding="utf-8").splitlines()
        for number in sorted({0, len(lines) // 2, len(lines) - 1}) if lines else []:
            workload = json.loads(lines[number])["workload"]
            lengths = [n for n in _lengths(spec, workload["inputs"]) if n <= 16384 // spec.num_kv_heads]
            if lengths:
                chosen.append((spec.name, workload["uuid"], sorted({min(lengths), max(lengths)})))
    return chosen


def _lengths(spec: DecodeSpec, inputs: dict) -> list[int]:
    def table(name: str) -> torch.Tensor:
        entry = inputs[name]
        with safe_open(REPOSITORY.root / entry["path"], framework="pt") as file:
            return file.get_tensor(entry["tensor_key"]).long()

    indptr = table("kv_indptr")
    pages = indptr[1:] - indptr[:-1]
    last = table("kv_last_page_len") if spec.has_last_page_len else torch.ones_like(pages)
    return torch.where(pages > 0, (pages - 1) * spec.page_size + last, 0).tolist()


WORKLOADS = _committed_workloads()


@pytest.mark.skipif(not WORKLOADS, reason=f"no workloads committed under workloads/{OP_TYPE}")
def test_fakes_fail_on_committed_workloads() -> None:
    for name, uuid, lengths in WORKLOADS:
        _assert_fakes_fail(make_problem(parse_name(name), lengths, seed=len(uuid)))


@pytest.mark.parametrize(
    "spec", [SEED, DecodeSpec(32, 8, 128, 16), DecodeSpec(32, 8, 128, 16, "float8_e4m3fn")]
)
def test_the_definitions_reference_agrees_with_the_oracle(spec: DecodeSpec) -> None:
    if not (REPOSITORY.definitions / f"{spec.name}.json").is_file():
        pytest.skip(f"{spec.name} is not committed")
    problem = make_problem(spec, [0, 1, 37, 300])
    result = definition_reference(spec, REPOSITORY)(*problem.inputs())
    output, lse = result.values() if isinstance(result, dict) else result
    assert check_outputs(spec, output, lse, *reference(problem)) == []


def test_missing_definition_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvenkvError, match=f"No definition {SEED.name}"):
        definition_reference(SEED, Repository(tmp_path))
