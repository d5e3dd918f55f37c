"""The committed workloads: schema, page tables, captured numbers, and that seeds give the same bytes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from flashinfer_bench.bench.utils import load_safetensors
from flashinfer_bench.data import Definition, TraceSet

from evenkv.errors import EvenkvError
from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, SEED_DEFINITION, parse_name
from evenkv.workloads import generate, plan, store
from evenkv.workloads.step import check_step

ROOT = Path(__file__).resolve().parents[1]
REPO = Repository(ROOT)
NAMES = [spec.name for spec in FAMILY]
MIB = 2**20


def committed(name: str):
    return store.load_workloads(store.workloads_path(REPO, name), name)


@cache
def fresh() -> generate.CommittedSet:
    return generate.generate()


def planned(name: str):
    """Only what the plan gives; a checkout may hold imported ones as well."""
    uuids = {w.workload.uuid for w in fresh().workloads[name]}
    return [trace for trace in committed(name) if trace.workload.uuid in uuids]


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_keeps_the_definitions_contract(name):
    spec, traces = parse_name(name), committed(name)
    assert len(traces) >= (20 if name == SEED_DEFINITION else 12)
    definition = Definition.model_validate_json((REPO.definitions / f"{name}.json").read_text())
    for trace in traces:
        step = store.check_workload(ROOT, spec, trace, trace.workload.uuid)
        # flashinfer-bench refuses the -inf that an empty request gives.
        assert step.lengths.min() >= 1, trace.workload.uuid
        assert step.axes() == trace.workload.axes
        loaded = load_safetensors(definition, trace.workload, ROOT)
        assert loaded["kv_indptr"].shape == (trace.workload.axes["len_indptr"],)
        for constraint in definition.constraints:
            assert eval(constraint, {}, {**trace.workload.axes, **loaded}), constraint


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_spread_and_moderate(name):
    spec = parse_name(name)
    steps = [store.check_workload(ROOT, spec, trace, trace.workload.uuid) for trace in planned(name)]
    tokens = [int(step.lengths.sum()) for step in steps]
    elements = spec.num_kv_heads * spec.head_dim * spec.page_size
    assert max(step.num_pages * elements * (1 if spec.is_fp8 else 2) for step in steps) <= 512 * MIB
    assert sum(count <= 20000 for count in tokens) >= 4
    assert sum(count > 20000 for count in tokens) >= 7
    assert {step.batch_size for step in steps} >= {1, 4, 8, 16, 32, 64, 128}
    # The first four alone are a spread: one request, a skewed batch, and a large step.
    first = steps[:4] if name != SEED_DEFINITION else steps[2:6]
    assert any(step.batch_size == 1 for step in first)
    assert any(step.lengths.max() > 4 * np.median(step.lengths) for step in first)
    assert max(int(step.lengths.sum()) for step in first) > 40000


def test_blobs_are_small_and_uuids_unique():
    # Only the generated files: imported ones are someone's own choice.
    blobs = fresh().blobs
    assert sum(map(len, blobs.values())) < 8 * MIB
    uuids = [trace.workload.uuid for name in NAMES for trace in committed(name)]
    assert len(set(uuids)) == len(uuids)
    captured = {step.uuid for step in plan.captured_steps()}
    drawn = {trace.workload.uuid for name in NAMES for trace in planned(name)} - captured
    assert captured <= set(uuids) and all(uuid.startswith("synth-") for uuid in drawn)


@pytest.mark.parametrize("captured", plan.captured_steps(), ids=lambda captured: captured.uuid)
def test_captured_workloads_have_the_captured_numbers(captured):
    trace = next(t for t in committed(captured.definition) if t.workload.uuid == captured.uuid)
    step = store.check_workload(ROOT, parse_name(captured.definition), trace, captured.uuid)
    assert step.kv_indptr.tolist() == list(captured.kv_indptr)
    assert step.num_pages == captured.num_pages
    assert trace.workload.inputs["sm_scale"].value == captured.sm_scale
    assert not (np.diff(step.kv_indices) == 1).all()
    about = store.blob_about(ROOT / trace.workload.inputs["kv_indices"].path)
    assert "permutation" in about["kv_indices"] and about["captured"] == captured.record


def test_the_captured_uuids_are_these():
    names = {(c.definition, c.uuid, c.kv_indptr[-1]) for c in plan.captured_steps()}
    assert names == {
        (SEED_DEFINITION, "captured-llama4-scout-tp8-91", 91),
        (SEED_DEFINITION, "69ec7197-791c-419a-ae93-a3d2f0d49fd0", 19134),
        ("gqa_paged_decode_h32_kv8_d128_ps1", "5444fc56-b282-4228-b233-ee170d1bd127", 58966),
    }


def test_seeds_give_the_committed_bytes():
    """All of them: it takes two seconds, and a sample would leave the rest free to drift."""
    assert generate.regenerate(REPO, check=True) == []


def test_drawn_steps_say_how_they_were_drawn():
    for name in (SEED_DEFINITION, "gqa_paged_decode_h32_kv32_d128_ps64"):
        for trace in planned(name):
            if not trace.workload.uuid.startswith("synth-"):
                continue
            about = store.blob_about(ROOT / trace.workload.inputs["kv_indices"].path)
            assert about["batch"] == trace.workload.axes["batch_size"]
            assert {"seed", "traffic", "pool_tokens", "page_size", "synthetic"} <= set(about)


def test_page_size_one_shares_prefixes_and_larger_pages_do_not():
    shared = {}
    for name in (SEED_DEFINITION, "gqa_paged_decode_h5_kv1_d128_ps16"):
        trace = next(t for t in committed(name) if t.workload.uuid.endswith("b064-llama"))
        step = store.check_workload(ROOT, parse_name(name), trace, name)
        shared[step.page_size] = len(step.kv_indices) - len(np.unique(step.kv_indices))
    assert shared[16] == 0 and shared[1] > 64 * 400


@pytest.mark.parametrize("root", [ROOT, ROOT / "optional"])
def test_flashinfer_bench_loads_the_whole_set(root):
    workloads = TraceSet.from_path(str(root)).workloads
    assert set(workloads) == set(NAMES)
    for trace in workloads["gqa_paged_decode_fp8_h5_kv1_d128_ps16"]:
        spec = parse_name(trace.definition)
        assert store.check_workload(root, spec, trace, "through the links").batch_size >= 1


def test_regenerate_mends_what_it_owns_and_keeps_the_rest(tmp_path):
    spec = parse_name("gqa_paged_decode_h32_kv32_d128_ps64")
    repo = Repository(tmp_path)
    written = generate.regenerate(repo, [spec])
    assert len(written) == 13 and generate.regenerate(repo, [spec]) == []
    file = store.workloads_path(repo, spec.name)
    lines = file.read_text().splitlines()
    added = json.loads(lines[0])
    added["workload"]["uuid"] = "one-of-mine"
    stale = json.loads(lines[1])
    stale["workload"]["uuid"] = f"synth-{spec.short_name}-99-gone"
    file.write_text("\n".join([lines[0], json.dumps(added), json.dumps(stale)]) + "\n")
    assert generate.regenerate(repo, [spec], check=True) == ["workloads/gqa_paged/" + file.name]
    assert len(file.read_text().splitlines()) == 3, "a check writes nothing"
    generate.regenerate(repo, [spec])
    uuids = [trace.workload.uuid for trace in store.load_workloads(file, spec.name)]
    assert len(uuids) == 13 and uuids[-1] == "one-of-mine"


def test_check_step_names_what_is_wrong():
    step = plan.captured_steps()[1].draw()
    tables = step.kv_indices.copy()
    tables[20] = tables[21]
    with pytest.raises(EvenkvError, match=r"request 1 lists page \d+ twice"):
        check_step(type(step)(1, step.num_pages, step.kv_indptr, tables, step.kv_last_page_len))
    with pytest.raises(EvenkvError, match="page ids from 0 to 9"):
        check_step(type(step)(1, 10, step.kv_indptr, step.kv_indices, step.kv_last_page_len))
