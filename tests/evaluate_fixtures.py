"""A small trace set on disk for the tests of evaluation: two definitions, three workloads, some solutions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flashinfer_bench.data import (
    BuildSpec,
    Correctness,
    Environment,
    Evaluation,
    EvaluationStatus,
    Performance,
    Solution,
    SourceFile,
)
from safetensors.numpy import save_file

from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec, parse_name
from evenkv.spec.generate import render_definition

PAGED = "gqa_paged_decode_h5_kv1_d128_ps16"
FLAT = "gqa_paged_decode_h5_kv1_d128_ps1"
LENGTHS = {"short": [5], "mixed": [16, 33, 1], "other": [7, 2]}
"""Tokens of each request by workload uuid; `short` and `mixed` are of PAGED, `other` of FLAT."""


def make_repository(root: Path) -> Repository:
    """Definitions, workloads with their blobs, and solutions of three kernels of two authors."""
    repository = Repository(root)
    repository.definitions.mkdir(parents=True)
    for name in (PAGED, FLAT):
        text = render_definition(parse_name(name))
        (repository.definitions / f"{name}.json").write_text(text, encoding="utf-8")
    add_workload(repository, PAGED, "short")
    add_workload(repository, PAGED, "mixed")
    add_workload(repository, FLAT, "other")
    for definition in (PAGED, FLAT):
        add_solution(repository, "evenkv_cuda", definition, language="cuda")
        add_solution(repository, "flashinfer_tc", definition, author="baseline", language="python")
        add_solution(repository, "evenkv_cpp", definition, language="cpp", hardware="CPU", optional=True)
        add_solution(repository, "fa3", definition, author="baseline", language="python", optional=True)
    return repository


def page_table(spec: DecodeSpec, lengths: list[int]) -> dict[str, np.ndarray]:
    """kv_indptr, kv_indices in order, and kv_last_page_len where the definition has it."""
    pages = [-(-n // spec.page_size) for n in lengths]
    tables = {"kv_indptr": np.concatenate([[0], np.cumsum(pages)]), "kv_indices": np.arange(sum(pages))}
    if spec.has_last_page_len:
        tables["kv_last_page_len"] = np.array([(n - 1) % spec.page_size + 1 for n in lengths])
    return {name: table.astype(np.int32) for name, table in tables.items()}


def add_workload(repository: Repository, definition: str, uuid: str) -> None:
    spec = parse_name(definition)
    tables = page_table(spec, LENGTHS[uuid])
    blob = repository.blobs / definition / f"{definition}_{uuid}.safetensors"
    blob.parent.mkdir(parents=True, exist_ok=True)
    save_file(tables, blob)
    inputs = {name: {"type": "random"} for name in spec.input_names}
    for name in tables:
        path = str(blob.relative_to(repository.root))
        inputs[name] = {"type": "safetensors", "path": path, "tensor_key": name}
    inputs["sm_scale"] = {"type": "scalar", "value": spec.head_dim**-0.5}
    axes = {
        "batch_size": len(LENGTHS[uuid]),
        "num_pages": len(tables["kv_indices"]) + 2,
        "len_indptr": len(tables["kv_indptr"]),
        "num_kv_indices": len(tables["kv_indices"]),
    }
    workload = {"uuid": uuid, "axes": axes, "inputs": inputs}
    path = workload_file(repository, definition)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"definition": definition, "workload": workload}) + "\n")


def workload_file(repository: Repository, definition: str) -> Path:
    return repository.workloads / f"{definition}.jsonl"


def blob_file(repository: Repository, definition: str, uuid: str) -> Path:
    return repository.blobs / definition / f"{definition}_{uuid}.safetensors"


def add_solution(
    repository: Repository,
    kernel: str,
    definition: str,
    *,
    author: str = "evenkv",
    language: str = "cuda",
    hardware: str = "NVIDIA H200",
    source: str = "def run(*args): ...\n",
    optional: bool = False,
) -> Path:
    name = f"{kernel}_{parse_name(definition).short_name}"
    solution = Solution(
        name=name,
        definition=definition,
        author=author,
        spec=BuildSpec(
            language=language,
            target_hardware=[hardware],
            entry_point="main.py::run",
            destination_passing_style=True,
        ),
        sources=[SourceFile(path="main.py", content=source)],
    )
    folder = repository.optional / "solutions" if optional else repository.solutions
    path = folder / author / "gqa_paged" / definition / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(solution.model_dump_json(), encoding="utf-8")
    return path


@dataclass
class FakeGpu:
    """Stands for flashinfer-bench on a GPU: notes what it was asked to run, answers with `latency_ms`."""

    hardware: str = "NVIDIA H200"
    latency_ms: float = 0.02
    fails_on: str | None = None
    interrupt_on: str | None = None

    def __post_init__(self) -> None:
        self.ran: list[tuple[str, str]] = []

    def run(self, case, solutions):
        if case.workload.uuid == self.interrupt_on:
            raise KeyboardInterrupt
        if case.workload.uuid == self.fails_on:
            raise RuntimeError("No healthy persistent workers available")
        self.ran += [(case.workload.uuid, solution.name) for solution in solutions]
        return {solution.name: self.evaluation() for solution in solutions}

    def evaluation(self, log: str = "") -> Evaluation:
        return Evaluation(
            status=EvaluationStatus.PASSED,
            environment=Environment(hardware=self.hardware, libs={"torch": "2.11.0"}),
            timestamp="2026-01-01T00:00:00",
            log=log,
            correctness=Correctness(max_relative_error=1e-3, max_absolute_error=2e-4),
            performance=Performance(
                latency_ms=self.latency_ms, reference_latency_ms=1.0, speedup_factor=1.0 / self.latency_ms
            ),
        )

    def close(self) -> None: ...


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` with its content, to see that nothing was written."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
