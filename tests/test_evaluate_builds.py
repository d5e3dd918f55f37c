"""Builds in parallel processes, in a keyed cache: failures told, broken libraries rebuilt, deadlines kept."""

from __future__ import annotations

import os
import time

import pytest
import tvm_ffi
from evaluate_fixtures import PAGED, make_repository
from flashinfer_bench.compile.utils import create_package_name
from flashinfer_bench.data import BuildSpec, Solution, SourceFile

from evenkv.evaluate import builds
from evenkv.evaluate.load import load_package
from evenkv.library import toolchain

WORKS = """
#include <tvm/ffi/function.h>
static int64_t run(int64_t x) { return x + 1; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
"""


def cpp(name: str, source: str) -> Solution:
    return Solution(
        name=name,
        definition=PAGED,
        author="evenkv",
        spec=BuildSpec(
            language="cpp", target_hardware=["CPU"], entry_point="binding.cpp::run", binding="tvm-ffi"
        ),
        sources=[SourceFile(path="binding.cpp", content=source)],
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    return builds.use_keyed_cache(for_gpu=False)


@pytest.fixture
def definition(tmp_path):
    return load_package(make_repository(tmp_path / "package")).definitions[PAGED]


def test_builds_rebuilds_what_does_not_load_and_tells_failures(cache, definition):
    works, broken = cpp("works", WORKS), cpp("broken", "no C++ at all")
    assert builds.is_compiled(works) and not builds.is_built(works)
    # What upstream's own cache check would be content with.
    name = create_package_name(works, "tvm_ffi_")
    library = cache / "tvm_ffi" / name / f"{name}.so"
    library.parent.mkdir(parents=True)
    (library.parent / "binding.cpp").write_text(WORKS)
    library.write_bytes(b"\x7fELF, cut off while it was linked")

    done: list[str] = []
    failures, unbuilt = builds.build_all([(definition, works), (definition, broken)], done.append)
    assert sorted(done) == ["broken", "works"] and unbuilt == []
    assert list(failures) == ["broken"] and "broken" in failures["broken"]
    assert tvm_ffi.load_module(str(library))["run"](41) == 42
    assert builds.is_built(works) and not builds.is_built(broken)

    # A new file in its place: this process has the old one mapped, and to cut that short crashes it at exit.
    library.unlink()
    library.write_bytes(b"cut off again")
    assert not builds.is_built(works)


def test_no_build_starts_after_the_deadline(cache, definition):
    failures, unbuilt = builds.build_all([(definition, cpp("late", WORKS))], deadline=time.monotonic() - 1)
    assert failures == {} and unbuilt == ["late"]


def test_cache_folder_changes_with_the_toolchain(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENKV_CACHE", str(tmp_path))

    def folder() -> str:
        monkeypatch.delenv("FIB_CACHE_PATH", raising=False)
        found = builds.use_keyed_cache(for_gpu=False)
        assert os.environ["FIB_CACHE_PATH"] == str(found)
        return str(found)

    first = folder()
    assert first == folder() and first.startswith(str(tmp_path))
    monkeypatch.setattr(toolchain, "compiler_version", lambda compiler: "g++ 99.1")
    assert folder() != first
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O3")
    assert folder() != first
    monkeypatch.setenv("FIB_CACHE_PATH", "/set/by/the/user")
    assert str(builds.use_keyed_cache(for_gpu=False)) == "/set/by/the/user"
