"""On a GPU: what flashinfer-bench builds from a packed file gives the same bits as the library's build."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flashinfer_bench.compile import BuilderRegistry, Runnable
from flashinfer_bench.compile.builder import BuildError
from flashinfer_bench.compile.builders import PythonBuilder, TritonBuilder, TVMFFIBuilder
from flashinfer_bench.data import Definition, Solution
from flashinfer_bench.data.json_utils import load_json_file

from evenkv.library.build import build_kernel
from evenkv.numerics.problem import Problem, make_problem
from evenkv.pack.manifest import load_kernels
from evenkv.pack.render import pack_solution
from evenkv.pack.write import solution_path
from evenkv.paths import find_repository
from evenkv.spec.family import parse_name

pytestmark = pytest.mark.gpu

REPO = find_repository()
KERNELS = {k.name: k for k in load_kernels(REPO) if k.manifest.language != "cpp"}
NAMES = [
    "gqa_paged_decode_h5_kv1_d128_ps1",
    "gqa_paged_decode_h32_kv8_d128_ps16",
    "gqa_paged_decode_h16_kv4_d256_ps16",
    "gqa_paged_decode_fp8_h32_kv4_d128_ps64",
]
# One token, an empty request, a request of many parts, and lengths around page and tile ends.
LENGTHS = [1, 0, 20_000, 17, 600, 64, 333]


@pytest.fixture(autouse=True)
def fresh_harness_cache(tmp_path_factory, monkeypatch):
    """Upstream keys its cache by sources alone: an old build must not stand in for this compiler's."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path_factory.mktemp("flashinfer_bench")))


def _packed(definition: Definition, path: Path) -> Runnable:
    # A registry of its own: the shared one remembers runnables across cache folders.
    registry = BuilderRegistry([TritonBuilder(), PythonBuilder(), TVMFFIBuilder()])
    return registry.build(definition, load_json_file(Solution, path))


def _outputs(call, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = problem.empty_outputs()
    call(*problem.inputs(), output, lse)
    torch.cuda.synchronize()
    return output, lse


@pytest.mark.parametrize("definition_name", NAMES)
@pytest.mark.parametrize("kernel_name", sorted(KERNELS))
def test_packed_and_library_builds_give_equal_bits(kernel_name, definition_name):
    kernel, spec = KERNELS[kernel_name], parse_name(definition_name)
    if not kernel.supports(spec):
        pytest.skip(f"{kernel_name} does not support {spec.name}")
    definition = load_json_file(Definition, REPO.definitions / f"{spec.name}.json")
    path = solution_path(REPO, kernel, pack_solution(kernel, spec))
    try:
        runnable = _packed(definition, path)
    except BuildError as error:
        if kernel.manifest.trace_set == "optional" and isinstance(error.__cause__, ImportError):
            pytest.skip(f"{kernel_name} needs a peer that is not installed: {error}")
        raise

    problem = make_problem(spec, LENGTHS, seed=3, device="cuda")
    packed = _outputs(runnable.call_destination_passing, problem)
    library = _outputs(build_kernel(kernel_name, spec), problem)
    for name, ours, theirs in zip(("output", "lse"), library, packed, strict=True):
        assert not theirs.isnan().any(), f"{name} is written everywhere"
        # Compared as bytes: equal bits, not equal values.
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
