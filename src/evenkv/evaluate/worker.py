"""The process that evaluates solutions on a CPU: one JSON job a line in, one JSON result a line out.

A process of its own, because a kernel may crash or never end, and because Triton reads TRITON_INTERPRET
when it is imported.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

_TIMED_RUNS = 5
_TIMED_SECONDS = 1.0


def evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """Run one solution on one workload and compare it with the definition's reference.

    `job` holds `definition`, `solution` and `workload` (upstream's JSON), `root` (where blob paths start),
    `seed` of the random inputs and `timed` (whether to measure). The result holds `status`, `faults`,
    `max_abs_err`, `rel_err`, `latency_ms` (median of host wall clock; None where not measured).
    """
    import torch
    from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.compile import BuilderRegistry, BuildError
    from flashinfer_bench.data import Definition, Solution, Workload

    from evenkv.numerics.check import check_outputs
    from evenkv.numerics.error import measure
    from evenkv.spec.family import parse_name

    definition = Definition.model_validate(job["definition"])
    solution = Solution.model_validate(job["solution"])
    workload = Workload.model_validate(job["workload"])
    registry = BuilderRegistry.get_instance()
    try:
        runnable = registry.build(definition, solution)
    except BuildError as error:
        return {"status": "COMPILE_ERROR", "faults": [_first_line(error)]}

    torch.manual_seed(job["seed"])
    tensors = load_safetensors(definition, workload, Path(job["root"]))
    inputs = gen_inputs(definition, workload, device="cpu", safe_tensors=tensors)
    with torch.no_grad():
        expected = normalize_result(definition, registry.build_reference(definition)(*inputs), "cpu")

    outputs = allocate_outputs(definition, inputs, "cpu")
    for output in outputs:
        output.fill_(float("nan"))

    def call() -> list[Any]:
        if runnable.metadata.destination_passing_style:
            runnable(*inputs, *outputs)
            return outputs
        return normalize_result(definition, runnable(*inputs), "cpu")

    try:
        with torch.no_grad():
            got = call()
    except Exception as error:  # whatever a solution raises is its own failure
        return {"status": "RUNTIME_ERROR", "faults": [f"{type(error).__name__}: {_first_line(error)}"]}
    faults = check_outputs(parse_name(definition.name), *got, *expected)
    result = {"status": "INCORRECT_NUMERICAL" if faults else "PASSED", "faults": faults, "latency_ms": None}
    if tuple(got[0].shape) == tuple(expected[0].shape):
        report = measure(*got, *expected)
        result |= {"max_abs_err": report.max_abs_err, "rel_err": report.rel_err}
    if job["timed"] and not faults:
        result["latency_ms"] = _time(call)
    return result


def _time(call: Any) -> float:
    times: list[float] = []
    while len(times) < _TIMED_RUNS and sum(times) < _TIMED_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def main() -> None:
    # Kernels may print: results go out on a private copy of stdout, everything else to stderr.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = evaluate(json.loads(line))
        except Exception as error:  # a job that cannot be prepared must not take the others with it
            result = {"status": "RUNTIME_ERROR", "faults": [f"{type(error).__name__}: {_first_line(error)}"]}
        results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
