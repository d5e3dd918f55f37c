"""The library's build cache: builds once, never serves a stale or broken build."""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading

import pytest
import torch
from pack_fixtures import make_folder, manifest

from evenkv.errors import EvenkvError
from evenkv.library import build, toolchain
from evenkv.pack.manifest import load_kernel
from evenkv.pack.render import pack_solution
from evenkv.spec.family import DecodeSpec

SPEC = DecodeSpec(5, 1, 128, 1)

# A real tvm-ffi library, but of the C interface alone: it compiles in a tenth of a second.
TINY_CPP = """\
#include <tvm/ffi/c_api.h>
#include "definition.h"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_run(
    void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = arguments[count - 1].v_int64 + kGroupSize;
  return 0;
}
"""
TINY_FILES = {
    "binding.cpp": TINY_CPP,
    "definition.h.j2": "#pragma once\nconstexpr int kGroupSize = {{ spec.group_size }};\n",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, on the disk and in the process."""
    monkeypatch.setenv("EVENKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_built", {})
    return tmp_path / "cache" / "library"


@pytest.fixture
def tiny(tmp_path):
    fields = manifest(name="tiny", sources=["*.cpp"])
    return pack_solution(load_kernel(make_folder(tmp_path / "kernels", fields, TINY_FILES)), SPEC)


@pytest.fixture
def compiler_log(tmp_path, monkeypatch):
    """CXX is a compiler that notes each call; the log's `compiled()` counts real compilations."""
    real, log = toolchain.find_cxx(), tmp_path / "compiler.log"
    wrapper = tmp_path / "noting-c++"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n', encoding="utf-8")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(wrapper))

    class Log:
        @staticmethod
        def compiled() -> int:
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
            return sum(" -c " in line for line in lines)

    return Log


def _entries(cache):
    return [p for p in cache.iterdir() if p.is_dir()]


def test_builds_once_and_a_new_process_state_takes_it_from_the_disk(tiny, compiler_log, monkeypatch, cache):
    assert build.build_solution(tiny)(10) == 15
    assert build.build_solution(tiny)(1) == 6
    monkeypatch.setattr(build, "_built", {})
    assert build.build_solution(tiny)(2) == 7
    assert compiler_log.compiled() == 1
    assert len(_entries(cache)) == 1 and not list(cache.glob(".*")), "no temporary folder is left"


def _build_and_call(solution, barrier, answers):
    barrier.wait()
    answers.put(build.build_solution(solution)(1))


def test_eight_processes_with_an_empty_cache_build_once_and_all_load(tiny, compiler_log, cache):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(8), context.Queue()
    workers = [
        context.Process(target=_build_and_call, args=(tiny, barrier, answers), daemon=True) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [6] * 8
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert compiler_log.compiled() == 1
    assert len(_entries(cache)) == 1


def test_threads_share_one_build(tiny, compiler_log):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(build.build_solution(tiny)(1))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [6] * 4 and compiler_log.compiled() == 1


@pytest.mark.parametrize("broken", ["truncated library", "edited source", "no record", "record is no json"])
def test_a_corrupt_entry_is_built_again(tiny, compiler_log, monkeypatch, cache, broken):
    build.build_solution(tiny)
    (entry,) = _entries(cache)
    if broken == "truncated library":
        # Another file under the same name: the loaded one stays mapped into this process.
        content = (entry / "kernel.so").read_bytes()
        (entry / "kernel.so").unlink()
        (entry / "kernel.so").write_bytes(content[: len(content) // 2])
    elif broken == "edited source":
        (entry / "sources" / "binding.cpp").write_text("// edited\n", encoding="utf-8")
    elif broken == "no record":
        (entry / "entry.json").unlink()
    else:
        (entry / "entry.json").write_text("[", encoding="utf-8")
    monkeypatch.setattr(build, "_built", {})
    assert build.build_solution(tiny)(4) == 9
    assert compiler_log.compiled() == 2


def test_code_that_does_not_build_is_a_named_error_and_leaves_no_entry(tiny, cache):
    sources = [
        s.model_copy(update={"content": "#error no such thing\n"}) if s.path == "binding.cpp" else s
        for s in tiny.sources
    ]
    with pytest.raises(EvenkvError, match="tiny_h5_kv1_d128_ps1 does not build.*") as caught:
        build.build_solution(tiny.model_copy(update={"sources": sources}))
    assert "binding.cpp:1" in caught.value.problem and "no such thing" in caught.value.problem
    assert "\n" not in caught.value.problem
    (log,) = cache.glob("*.log")
    assert str(log) in caught.value.remedy and "ninja" in log.read_text(encoding="utf-8")
    assert _entries(cache) == []


def test_a_missing_entry_function_is_named(tiny):
    spec = tiny.spec.model_copy(update={"entry_point": "binding.cpp::decode"})
    with pytest.raises(EvenkvError, match="no function 'decode'"):
        build.build_solution(tiny.model_copy(update={"spec": spec}))


@pytest.fixture
def cuda_inputs(tiny, monkeypatch, tmp_path):
    """Build inputs of a CUDA solution under a compiler, a GPU and flags that the test can change."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho nvcc 13.0\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0")
    kernel_source = tiny.sources[0].model_copy(update={"path": "kernel.cu"})
    solution = tiny.model_copy(update={"sources": [*tiny.sources, kernel_source]})
    return lambda: build.build_inputs(solution), nvcc, solution


def test_the_key_changes_with_everything_that_decides_the_bits(cuda_inputs, monkeypatch):
    inputs, nvcc, solution = cuda_inputs
    keys = [build.cache_key(inputs())]
    assert build.cache_key(inputs()) == keys[0], "the same inputs give the same key"

    with monkeypatch.context() as changed:
        changed.setenv("TVM_FFI_CUDA_ARCH_LIST", "10.0a")
        keys.append(build.cache_key(inputs()))
    with monkeypatch.context() as changed:
        changed.setattr(toolchain, "NVCC_FLAGS", (*toolchain.NVCC_FLAGS, "-lineinfo"))
        keys.append(build.cache_key(inputs()))
    with monkeypatch.context() as changed:
        changed.setattr(toolchain, "CXX_FLAGS", ("-std=c++20", "-fPIC", "-O2"))
        keys.append(build.cache_key(inputs()))
    for field, value in (("destination_passing_style", False), ("entry_point", "binding.cpp::other")):
        spec = solution.spec.model_copy(update={field: value})
        keys.append(build.cache_key(build.build_inputs(solution.model_copy(update={"spec": spec}))))
    edited = solution.sources[0].model_copy(update={"content": solution.sources[0].content + " "})
    edited_solution = solution.model_copy(update={"sources": [edited, *solution.sources[1:]]})
    keys.append(build.cache_key(build.build_inputs(edited_solution)))
    nvcc.write_text("#!/bin/sh\necho nvcc 13.1\n", encoding="utf-8")
    os.utime(nvcc, ns=(1, 1))
    keys.append(build.cache_key(inputs()))
    assert len(set(keys)) == len(keys)


def test_another_cxx_version_is_another_build(tiny, compiler_log, monkeypatch, tmp_path, cache):
    build.build_solution(tiny)
    wrapper = tmp_path / "noting-c++"
    text = wrapper.read_text(encoding="utf-8")
    newer = '[ "$1" = --version ] && echo c++ 99 && exit 0\n'
    wrapper.write_text(text.replace("exec", f"{newer}exec"), encoding="utf-8")
    os.utime(wrapper, ns=(1, 1))
    assert build.build_solution(tiny)(3) == 8
    assert compiler_log.compiled() == 2 and len(_entries(cache)) == 2


def test_missing_compilers_and_gpu_are_named(tiny, cuda_inputs, monkeypatch, tmp_path):
    inputs, _, _ = cuda_inputs
    with monkeypatch.context() as changed:
        changed.setenv("CXX", "no-such-compiler")
        with pytest.raises(EvenkvError, match="no-such-compiler"):
            build.build_solution(tiny)
    with monkeypatch.context() as changed:
        changed.delenv("TVM_FFI_CUDA_ARCH_LIST")
        changed.setattr(toolchain, "_first_gpu_capability", toolchain._first_gpu_capability.__wrapped__)
        changed.setenv("CXX", str(toolchain.find_cxx()))
        changed.setenv("PATH", str(tmp_path / "empty"))
        with pytest.raises(EvenkvError, match="No GPU to build CUDA code for"):
            inputs()


PYTHON_FILES = {
    "main.py": (
        "from .inner.scale import FACTOR\n\n\n"
        "def run(q, sm_scale):\n    return q * FACTOR, (q * sm_scale).sum(-1)\n"
    ),
    "inner/scale.py.j2": "FACTOR = {{ spec.num_qo_heads }}\n",
}


def _python_solution(root, **changes):
    fields = manifest(
        name="scaler",
        language="python",
        binding=None,
        entry_point="main.py::run",
        sources=["*.py"],
        config_templates={"inner/scale.py": "inner/scale.py.j2"},
        destination_passing_style=False,
    )
    return fields, load_kernel(make_folder(root, {**fields, **changes}, PYTHON_FILES))


def test_value_returning_python_is_adapted_and_two_geometries_live_side_by_side(tmp_path):
    _, kernel = _python_solution(tmp_path / "kernels")
    q = torch.arange(6.0).view(2, 3)
    for spec in (SPEC, DecodeSpec(8, 1, 128, 1)):
        output, lse = torch.empty(2, 3), torch.empty(2)
        assert build.build_solution(pack_solution(kernel, spec))(q, 0.5, output, lse) is None
        assert torch.equal(output, q * spec.num_qo_heads)
        assert torch.equal(lse, (q * 0.5).sum(-1))
    with pytest.raises(EvenkvError, match=r"shape \(2, 3\), wanted \(4, 2, 3\)"):
        build.build_solution(pack_solution(kernel, SPEC))(q, 0.5, torch.empty(4, 2, 3), torch.empty(2))


def test_python_that_does_not_import_is_named_and_can_be_mended(tmp_path):
    files = {**PYTHON_FILES, "main.py": "import no_such_peer\n"}
    fields, _ = _python_solution(tmp_path / "kernels")
    kernel = load_kernel(make_folder(tmp_path / "broken", fields, files))
    with pytest.raises(EvenkvError, match="No module named 'no_such_peer'"):
        build.build_solution(pack_solution(kernel, SPEC))
    assert callable(build.build_solution(pack_solution(_python_solution(tmp_path / "kernels")[1], SPEC)))


def test_unknown_kernels_and_geometries_are_refused_by_name():
    with pytest.raises(EvenkvError, match="Unknown kernel 'no_such_kernel'"):
        build.build_kernel("no_such_kernel", SPEC)
    with pytest.raises(EvenkvError, match="Unknown kernel"):
        build.build_kernel("../spec", SPEC)


def test_an_unusable_cache_is_named(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("EVENKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(EvenkvError, match="build cache .* cannot be used") as caught:
        build.build_solution(tiny)
    assert "EVENKV_CACHE" in caught.value.remedy
