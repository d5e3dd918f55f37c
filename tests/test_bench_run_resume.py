"""--resume takes rows for its own only when they are of the same GPU."""

from __future__ import annotations

import pytest
from bench_fixtures import bench, case, row

from evenkv.bench.protocol import DeviceFacts
from evenkv.bench.record import append_rows, load_rows
from evenkv.bench.standin import GPU


@pytest.mark.parametrize(("gpu", "reused"), [(GPU, 1), ("NVIDIA H200", 0), (f"{GPU} 2", 0)])
def test_rows_of_another_gpu_settle_nothing(tmp_path, gpu, reused):
    path = tmp_path / "x.jsonl"
    append_rows(path, [row(case(), "fa3", 900.0, DeviceFacts(gpu, None, None, None))])
    report = bench(path, [case()], implementations=["fa3"], resume=True)
    assert report.reused == reused and len(report.rows) == 1 - reused
    assert len(load_rows(path)) == 2 - reused
