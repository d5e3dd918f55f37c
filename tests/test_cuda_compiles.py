"""The CUDA kernels compile for every target without spills, and the check would see it if they did not."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from flashinfer_bench.compile.utils import write_sources_to_path
from pack_fixtures import make_folder, manifest
from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path

from evenkv.errors import EvenkvError
from evenkv.library import toolchain
from evenkv.pack.compile import ARCHS, compile_check, compile_units, parse_ptxas
from evenkv.pack.manifest import load_kernel, load_kernels
from evenkv.pack.render import pack_solution
from evenkv.paths import find_repository
from evenkv.spec.family import FAMILY, DecodeSpec, parse_name

try:
    toolchain.find_nvcc()
    HAS_NVCC = True
except EvenkvError:
    HAS_NVCC = False
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="no CUDA toolkit on this machine")

SEED = parse_name("gqa_paged_decode_h5_kv1_d128_ps1")

# 128 floats live at once: far above the 32 registers that 2048 threads an SM leave a thread.
KERNEL_CU = """\
#include "specialisation.h"
__global__ void __launch_bounds__(kThreads, kBlocks) live(float* x) {
  __shared__ float staged[256];
  float a[kLive];
#pragma unroll
  for (int i = 0; i < kLive; ++i) a[i] = x[i * 1024 + threadIdx.x];
  staged[threadIdx.x % 256] = a[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLive; ++i)
    x[i * 1024 + threadIdx.x] = a[i] * a[(i * 7 + 1) % kLive] + staged[i % 256];
}
"""
SPECIALISATION = """\
constexpr int kLive = {{ 128 if spec.head_dim == 256 else 8 }};
constexpr int kThreads = 1024, kBlocks = {{ 2 if spec.head_dim == 256 else 1 }};
"""
FILES = {
    "kernel.cu": KERNEL_CU,
    "specialisation.h.j2": SPECIALISATION,
    "binding.cpp": '#include "definition.h"\n',
    "definition.h.j2": "constexpr int kPageSize = {{ spec.page_size }};\n",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compile"


def _kernel(root, files=None):
    fields = manifest(
        name="live",
        language="cuda",
        sources=["*.cu", "*.cpp"],
        supports={},
        config_templates={"specialisation.h": "specialisation.h.j2", "definition.h": "definition.h.j2"},
    )
    return load_kernel(make_folder(root, fields, files or FILES))


def test_definitions_that_differ_in_the_binding_alone_are_one_unit(tmp_path):
    kernel = _kernel(tmp_path)
    units = compile_units([kernel], [DecodeSpec(5, 1, 128, ps) for ps in (1, 16, 64)])
    assert [u.specs for u in units] == [
        tuple(f"gqa_paged_decode_h5_kv1_d128_ps{ps}" for ps in (1, 16, 64)),
    ]
    assert [path for path, _ in units[0].files] == ["kernel.cu", "specialisation.h"]
    assert len(compile_units([kernel], [SEED, DecodeSpec(5, 1, 256, 1)])) == 2


def test_headers_are_followed_through_folders(tmp_path):
    files = {
        **FILES,
        "kernel.cu": '#include "detail/a.h"\n__global__ void k() {}\n',
        "detail/a.h": '#  include "b.h"\n#include "specialisation.h"\n#include <cuda_fp16.h>\n',
        "detail/b.h": "// beside its includer\n",
        "b.h": "// not this one\n",
    }
    kernel = _kernel(tmp_path, files)
    kernel = load_kernel(
        make_folder(
            tmp_path, {**json.loads((kernel.folder / "kernel.json").read_text()), "sources": ["**/*"]}
        )
    )
    (unit,) = compile_units([kernel], [SEED])
    assert [path for path, _ in unit.files] == [
        "detail/a.h",
        "detail/b.h",
        "kernel.cu",
        "specialisation.h",
    ]


@needs_nvcc
def test_a_kernel_that_spills_is_caught_and_one_that_does_not_passes(tmp_path, cache):
    kernel = _kernel(tmp_path)
    done = []
    fits, spills = compile_check(
        [kernel],
        [SEED, DecodeSpec(5, 1, 256, 1)],
        archs=["sm_90a"],
        progress=lambda count, total, result: done.append((count, total, result.arch)),
        jobs=1,
    )
    assert fits.ok and fits.compiled and fits.spill_stores == fits.spill_loads == 0
    assert 8 < fits.registers <= 64 and fits.smem == 1024 and fits.seconds > 0
    assert spills.compiled and not spills.ok
    assert spills.spill_stores > 0 and spills.spill_loads > 0 and spills.stack > 0
    assert spills.registers <= 32
    assert [f.name for f in spills.functions] == ["_Z4livePf"]
    assert done == [(1, 2, "sm_90a"), (2, 2, "sm_90a")]

    again = compile_check([kernel], [DecodeSpec(7, 1, 256, 64)], archs=["sm_90a"])
    assert again[0].cached and not again[0].ok
    assert (again[0].functions, again[0].log) == (spills.functions, spills.log)
    assert again[0].specs == ("gqa_paged_decode_h7_kv1_d256_ps64",)
    for path in cache.glob("*.json"):
        path.write_text("{", encoding="utf-8")
    assert not compile_check([kernel], [DecodeSpec(5, 1, 128, 1)], archs=["sm_90a"])[0].cached


@needs_nvcc
def test_a_source_that_does_not_compile_is_a_result_and_never_cached(tmp_path, cache):
    kernel = _kernel(tmp_path, {**FILES, "kernel.cu": "#error wrong on purpose\n"})
    (result,) = compile_check([kernel], [SEED], archs=["sm_80"])
    assert not result.compiled and not result.ok and result.functions == ()
    assert "kernel.cu" in result.log and "wrong on purpose" in result.log
    assert str(tmp_path) not in result.log
    assert not list(cache.glob("*")) if cache.exists() else True


def test_no_nvcc_and_odd_targets_are_named(tmp_path, cache, monkeypatch):
    kernel = _kernel(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(EvenkvError, match="nowhere/bin/nvcc") as caught:
        compile_check([kernel], [SEED])
    assert "CUDA_HOME" in caught.value.remedy and caught.value.exit_code == 2
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: tmp_path)
    with pytest.raises(EvenkvError, match="hopper"):
        compile_check([kernel], [SEED], archs=["hopper"])
    assert compile_check([], [SEED]) == []


PTXAS = """\
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_100a'
ptxas info    : Function properties for _Z5firstv
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 49152 bytes smem
ptxas info    : Compile time = 5.000 ms
ptxas info    : Function properties for _Z6helperv
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_100a'
ptxas info    : Function properties for _Z6secondv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 380 bytes cmem[0]
"""


def test_ptxas_output_is_read_function_by_function():
    first, helper, second = parse_ptxas(PTXAS)
    assert (first.name, first.registers, first.stack) == ("_Z5firstv", 255, 16)
    assert (first.spill_stores, first.spill_loads, first.smem) == (12, 8, 49152)
    assert (helper.name, helper.stack, helper.registers) == ("_Z6helperv", 32, 0)
    assert (second.name, second.registers, second.stack, second.smem) == ("_Z6secondv", 40, 0, 0)


# A few stand for the family here, since one takes several seconds; `evenkv run` compiles every one.
# fp8 has the most code, head_dim 256 the most live registers.
CHOSEN = [
    *(("gqa_paged_decode_h5_kv1_d128_ps1", arch) for arch in ARCHS),
    *(("gqa_paged_decode_fp8_h32_kv4_d128_ps16", arch) for arch in ("sm_80", "sm_90a")),
    ("gqa_paged_decode_h16_kv4_d256_ps16", "sm_100a"),
]


@pytest.fixture(scope="module")
def compiled():
    """The chosen ones, two compilers at a time; the user's cache serves reruns."""
    kernels = [k for k in load_kernels(find_repository()) if k.manifest.language == "cuda"]
    found = {}
    for name in dict.fromkeys(name for name, _ in CHOSEN):
        archs = [arch for chosen, arch in CHOSEN if chosen == name]
        for result in compile_check(kernels, [parse_name(name)], archs=archs):
            found.setdefault((name, result.arch), []).append(result)
    return found


@needs_nvcc
@pytest.mark.parametrize("name, arch", CHOSEN)
def test_shipped_cuda_kernels_compile_without_spills(name, arch, compiled):
    for result in compiled[name, arch]:
        assert result.compiled, result.log
        assert result.ok, f"{result.kernel} {result.source} spills for {arch}:\n{result.log}"


@needs_nvcc
@pytest.mark.parametrize("name, arch", CHOSEN)
def test_evenkv_cuda_has_one_kernel_for_whole_requests_and_one_for_parts(name, arch, compiled):
    """decode_kernel<KV heads a block, whether requests stay whole>; two heads with fp8, always for parts."""
    (functions,) = [result.functions for result in compiled[name, arch] if result.kernel == "evenkv_cuda"]
    found = [re.search(r"decode_kernelILi(\d)ELb([01])E", function.name) for function in functions]
    kernels = {(match[1], match[2]) for match in found if match is not None}
    pairs = {("2", "0")} if parse_name(name).is_fp8 else set()
    assert kernels == {("1", "1"), ("1", "0")} | pairs


def test_every_definition_has_a_device_compilation():
    kernels = load_kernels(find_repository())
    covered = {name for unit in compile_units(kernels, FAMILY) for name in unit.specs}
    assert covered == {spec.name for spec in FAMILY}


@pytest.mark.parametrize("name", [SEED.name, "gqa_paged_decode_fp8_h32_kv4_d128_ps16"])
def test_bindings_of_cuda_kernels_compile_with_upstreams_flags(name, tmp_path):
    # flashinfer-bench gives C++ files no CUDA include path, so a binding must do without its headers.
    kernels = [k for k in load_kernels(find_repository()) if k.manifest.language == "cuda"]
    checked = 0
    for kernel in kernels:
        folder = tmp_path / kernel.name
        for path in write_sources_to_path(folder, pack_solution(kernel, parse_name(name)).sources):
            if path.suffix == ".cpp":
                command = [str(toolchain.find_cxx()), *toolchain.CXX_FLAGS, "-fsyntax-only"]
                command += [f"-I{d}" for d in (folder, find_include_path(), find_dlpack_include_path())]
                ran = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)
                assert ran.returncode == 0, ran.stderr
                checked += 1
    assert checked
