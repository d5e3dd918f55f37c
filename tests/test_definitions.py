"""Definitions: what upstream's schema says of them, and the reference against a naive float64 one."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from flashinfer_bench.data import Definition, TraceSet

from evenkv.paths import Repository
from evenkv.spec.family import FAMILY, SEED_DEFINITION, DecodeSpec, parse_name
from evenkv.spec.generate import drift, render_definitions, render_reference, write_definitions

ROOT = Path(__file__).resolve().parents[1]
REPO = Repository(ROOT)
NAMES = [spec.name for spec in FAMILY]


def load(name: str) -> Definition:
    return Definition.model_validate_json((REPO.definitions / f"{name}.json").read_text(encoding="utf-8"))


def reference_of(spec: DecodeSpec):
    namespace: dict = {}
    exec(compile(render_reference(spec), f"<reference of {spec.name}>", "exec"), namespace)
    return namespace["run"]


def make_case(spec: DecodeSpec, lengths, *, seed=0, num_pages=None, poison=True):
    """Inputs by name with random page ids; slots and pages that no request owns hold NaN when `poison`."""
    rng = np.random.default_rng(seed)
    ps = spec.page_size
    pages = [-(-length // ps) for length in lengths]
    num_pages = num_pages or sum(pages) + 3
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    indices = rng.permutation(num_pages)[: indptr[-1]].astype(np.int32)
    used = np.zeros((num_pages, ps), dtype=bool)
    for i, length in enumerate(lengths):
        for token in range(length):
            used[indices[indptr[i] + token // ps], token % ps] = True
    inputs = {"q": torch.from_numpy(rng.standard_normal((len(lengths), spec.num_qo_heads, spec.head_dim)))}
    inputs["q"] = inputs["q"].to(torch.bfloat16)
    dtype = getattr(torch, spec.kv_dtype)
    for name in ("k_cache", "v_cache"):
        values = rng.standard_normal((num_pages, ps, spec.num_kv_heads, spec.head_dim))
        if poison:
            values[~used] = np.nan
        inputs[name] = torch.from_numpy(values).float().to(dtype)
    inputs["kv_indptr"] = torch.from_numpy(indptr)
    inputs["kv_indices"] = torch.from_numpy(indices)
    if spec.has_last_page_len:
        last = [length - (n - 1) * ps if n else 0 for length, n in zip(lengths, pages, strict=True)]
        inputs["kv_last_page_len"] = torch.tensor(last, dtype=torch.int32)
    if spec.is_fp8:
        for name in ("k_scale", "v_scale"):
            inputs[name] = torch.from_numpy(rng.uniform(0.5, 2.0, spec.num_kv_heads)).float()
    inputs["sm_scale"] = 1.0 / math.sqrt(spec.head_dim)
    return {name: inputs[name] for name in spec.input_names}


def naive(spec: DecodeSpec, inputs: dict, lengths):
    """One request and one head after another, one token at a time, in float64."""
    q = inputs["q"].double().numpy()
    k_cache, v_cache = (inputs[n].float().double().numpy() for n in ("k_cache", "v_cache"))
    indptr, indices = inputs["kv_indptr"].numpy(), inputs["kv_indices"].numpy()
    output = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        slots = [(indices[indptr[b] + t // spec.page_size], t % spec.page_size) for t in range(length)]
        for h in range(spec.num_qo_heads):
            kv = h // spec.group_size
            keys = np.stack([k_cache[page, slot, kv] for page, slot in slots])
            values = np.stack([v_cache[page, slot, kv] for page, slot in slots])
            logits = keys @ q[b, h] * inputs["sm_scale"]
            if spec.is_fp8:
                logits = logits * float(inputs["k_scale"][kv])
                values = values * float(inputs["v_scale"][kv])
            exponentials = np.exp(logits - logits.max())
            output[b, h] = exponentials @ values / exponentials.sum()
            lse[b, h] = (logits.max() + np.log(exponentials.sum())) / np.log(2.0)
    return output, lse


def check_reference(spec: DecodeSpec, lengths, **case):
    inputs = make_case(spec, lengths, **case)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    # As flashinfer-bench's evaluators call it: positional, a tuple in the definition's order comes back.
    output, lse = reference_of(spec)(*inputs.values())
    wanted, wanted_lse = naive(spec, inputs, lengths)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.isfinite(output).all()
    # Rounding to bf16 (at most 2**-8 of the value), and nothing else, may separate the two.
    np.testing.assert_allclose(output.double().numpy(), wanted, rtol=1.01 * 2**-8, atol=1e-5)
    empty = np.array(lengths) == 0
    assert torch.isneginf(lse[torch.from_numpy(empty)]).all()
    assert (output[torch.from_numpy(empty)] == 0).all()
    np.testing.assert_allclose(lse.numpy()[~empty], wanted_lse[~empty], rtol=1e-5, atol=1e-5)
    for name, value in before.items():
        if value.numel():
            same = torch.equal(value.view(torch.uint8), inputs[name].view(torch.uint8))
            assert same, f"{name} was changed"


def test_the_committed_files_are_what_the_templates_give():
    assert drift(REPO) == []
    assert sorted(path.stem for path in REPO.definitions.glob("*.json")) == sorted(NAMES)
    assert len(NAMES) == len(set(NAMES)) == 31


@pytest.mark.parametrize("name", NAMES)
def test_definition_follows_the_schema(name):
    spec, definition = parse_name(name), load(name)
    assert definition.name == name and definition.op_type == "gqa_paged"
    assert tuple(definition.inputs) == spec.input_names
    assert tuple(definition.outputs) == ("output", "lse")
    assert definition.const_axes == {
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "page_size": spec.page_size,
    }
    assert set(definition.var_axes) == {"batch_size", "num_pages", "len_indptr", "num_kv_indices"}
    assert definition.constraints == [
        "len_indptr == batch_size + 1",
        "num_kv_indices == kv_indptr[-1].item()",
    ]
    assert definition.inputs["k_cache"].dtype.value == spec.kv_dtype
    assert definition.inputs["sm_scale"].shape is None
    described = [*definition.axes.values(), *definition.inputs.values(), *definition.outputs.values()]
    assert all(part.description for part in described)
    kinds = {tag.split(":")[0] for tag in definition.tags}
    assert {"stage", "model", "tp", "status"} <= kinds and "stage:decode" in definition.tags
    assert ("no definition of FlashInfer-Bench" in definition.description) == spec.is_fp8


def test_seed_definition_has_upstreams_interface():
    definition = load(SEED_DEFINITION)
    assert list(definition.inputs) == ["q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale"]
    assert definition.get_input_shapes(
        {"batch_size": 1, "num_pages": 96, "len_indptr": 2, "num_kv_indices": 91}
    ) == [[1, 5, 128], [96, 1, 1, 128], [96, 1, 1, 128], [2], [91], None]


@pytest.mark.parametrize("root", [ROOT, ROOT / "optional"])
def test_both_trace_sets_see_every_definition(root):
    assert set(TraceSet.from_path(str(root)).definitions) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_reference_agrees_with_a_naive_one(name):
    """What `status:verified` stands for: more than one block, a single token, an empty request."""
    check_reference(parse_name(name), [261, 1, 0, 37])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 300])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_reference_at_block_and_page_boundaries(page_size, kv_dtype):
    check_reference(DecodeSpec(6, 2, 64, page_size, kv_dtype), [255, 256, 257, 0, 16, 17, 64, 65, 1, 512, 0])


def test_reference_in_many_small_steps_gives_the_same():
    spec = DecodeSpec(5, 1, 128, 16)
    inputs = make_case(spec, [700, 1, 300])
    namespace: dict = {}
    exec(render_reference(spec), namespace)
    whole = namespace["run"](*inputs.values())
    namespace["STEP_ELEMENTS"] = {"cpu": 1}
    pieces = namespace["run"](*inputs.values())
    assert torch.equal(whole[0], pieces[0])
    torch.testing.assert_close(whole[1], pieces[1], rtol=0, atol=1e-5)


def test_reference_of_nothing_but_empty_requests():
    check_reference(DecodeSpec(5, 1, 128, 16), [0, 0])


def test_reference_reads_pages_that_requests_share():
    spec = DecodeSpec(4, 2, 64, 1)
    inputs = make_case(spec, [5, 5], poison=False)
    inputs["kv_indices"][5:8] = inputs["kv_indices"][:3]
    wanted, _ = naive(spec, inputs, [5, 5])
    got = reference_of(spec)(*inputs.values())[0].double().numpy()
    assert np.abs(got - wanted).max() <= 2**-8 * np.abs(wanted).max()


def test_reference_does_not_warn():
    spec = DecodeSpec(5, 1, 128, 16, "float8_e4m3fn")
    inputs = make_case(spec, [300])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference_of(spec)(*inputs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_reference_gives_the_same_on_a_gpu(name):
    spec = parse_name(name)
    inputs = make_case(spec, [261, 1, 0, 3000])
    run = reference_of(spec)
    there = run(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in inputs.values()))
    here = run(*inputs.values())
    assert there[0].is_cuda
    torch.testing.assert_close(there[0].cpu(), here[0], rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(there[1].cpu(), here[1], rtol=1e-5, atol=1e-5)


def test_rendering_is_deterministic_and_drift_names_the_file(tmp_path):
    assert render_definitions() == render_definitions()
    repo = Repository(tmp_path)
    assert write_definitions(repo) == sorted(NAMES)
    assert drift(repo) == [] and write_definitions(repo) == []
    edited, gone, extra = NAMES[0], NAMES[1], "gqa_paged_decode_h9_kv3_d128_ps1"
    path = repo.definitions / f"{edited}.json"
    content = json.loads(path.read_text())
    content["axes"]["head_dim"]["value"] = 129
    path.write_text(json.dumps(content))
    (repo.definitions / f"{gone}.json").unlink()
    (repo.definitions / f"{extra}.json").write_text("{}")
    lines = drift(repo)
    assert len(lines) == 3
    for name, word in ((edited, "differs"), (gone, "missing"), (extra, "not in the family")):
        assert any(name in line and word in line for line in lines)
    assert write_definitions(repo) == sorted([edited, gone, extra])
    assert drift(repo) == []
