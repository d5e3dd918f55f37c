"""A change of merges that is not taken yet (tools/kernel_waits.py), on the host: the bits of the counters."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from cut_library import KERNEL
from host_kernel import HostKernel, Params, build_host_kernel

from evenkv.numerics.check import check_outputs
from evenkv.numerics.judge import bit_equal
from evenkv.numerics.problem import make_problem
from evenkv.numerics.reference import reference
from evenkv.spec.family import DecodeSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import kernel_edits  # noqa: E402
from kernel_waits import WAITING  # noqa: E402

# Rows of a lane each, and rows of half a warp; one request in more parts than are added up at once.
BF16 = DecodeSpec(4, 2, 128, 16)
FP8 = DecodeSpec(20, 2, 64, 16, "float8_e4m3fn")
SPECS = {"bf16": BF16, "fp8": FP8}
EVEN = {"is_uncut": -1, "is_even": 1, "even_parts": 5}
MANY = {"is_uncut": -1, "is_even": 1, "even_parts": 60}
DEALT = {"is_uncut": -1, "even_parts": 3, "part_tokens": 160, "dealt": 40}
WAYS = {"even": EVEN, "many": MANY, "dealt": DEALT, "dealt to blocks": {**DEALT, "alone": 1}}


class WaitingParams(Params):
    _fields_ = [("waited", ctypes.c_void_p), ("even_waits", ctypes.c_int32), ("uneven_waits", ctypes.c_int32)]


# What the change needs of a GPU, and that nothing is left where blocks waited; every launch waits.
_STAND_IN = """
namespace evenkv {
namespace host_gpu {
inline Memory waited;
inline int64_t words_sent;
}
template <typename T>
T load_relaxed(const T* from) {
  if (host_gpu::waited.holds(from, sizeof(T))) return *from;
  host_gpu::fault = "a block waits outside the launch's scratch";
  return {};
}
template <typename T>
void store_relaxed(T* to, T v) {
  if (!host_gpu::waited.holds(to, sizeof(T))) {
    host_gpu::fault = "a partial is sent outside the launch's scratch";
    return;
  }
  *to = v;
  ++host_gpu::progress;
  ++host_gpu::words_sent;
}
inline void give_way() { host_gpu::give_way(); }
inline void wait_for_lanes(uint32_t lanes) {
  if (lanes == ~0u) return __syncwarp();
  for (int i = 0; i < 64; ++i) host_gpu::give_way();  // half a warp: long enough for the others to have read
}
inline void give_up() { host_gpu::fault = "a block gave up waiting"; }
}  // namespace evenkv
inline uint32_t __float_as_uint(float f) { return evenkv::host_gpu::as_bits(f); }

"""
_COUNTERS = "  counters = memory_of(params.counters, places * kMostSplits);\n"
_WRITTEN = "  report.places_written = count_written(places, floats);\n"
_CHANGES = (
    (
        "ptx.cuh",
        "inline void __syncwarp() {",
        "inline void __syncwarp();\n" + _STAND_IN + "inline void __syncwarp() {",
    ),
    (
        "launch.cpp",
        _COUNTERS,
        _COUNTERS + "  waited = memory_of(params.waited, places * floats);\n  words_sent = 0;\n",
    ),
    (
        "launch.cpp",
        _WRITTEN,
        _WRITTEN
        + '  if (report.places > 0 && words_sent == 0) fault = "no block waited";\n'
        + '  if (report.places_written > 0) fault = "partials were counted";\n'
        + "  if (std::any_of(waited.begin, waited.end, [](char c) { return c != '\\xff'; }))\n"
        + '    fault = "a partial was sent and not taken";\n',
    ),
    ("kernel.cu", "room->clusters[choice.splits - 1] / units", "int64_t{1} << 20"),
)


@pytest.fixture(scope="module", params=SPECS)
def changed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    sources = tmp_path_factory.mktemp("waiting")
    contents = {path.name: path.read_text() for path in KERNEL.iterdir()}
    kernel_edits.apply("waiting merges", WAITING, contents)
    for name, text in contents.items():
        (sources / name).write_text(text)
    folder = tmp_path_factory.mktemp("built")
    return build_host_kernel(SPECS[request.param], folder, sources, WaitingParams, _CHANGES)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_who_waits_computes_what_counters_gave(
    request: pytest.FixtureRequest, changed: HostKernel, way: dict[str, int]
) -> None:
    name = request.node.callspec.params["changed"]
    spec, counted = SPECS[name], request.getfixturevalue(name)
    splits = {"bf16": 1, "fp8": 2}[name]
    for lengths in ([1, 0, 17, 600, 91], [1500]):
        problem = make_problem(spec, lengths, seed=splits)
        # Clusters begin in the order of their numbers, few at a time.
        found = changed(problem, any_order=False, running=2, splits=splits, **way)
        assert check_outputs(spec, *found, *reference(problem)) == []
        assert bit_equal(found, counted(problem, splits=splits, **way))
