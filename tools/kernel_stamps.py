"""Edits of the authored sources that make every block write down when it reached each stage.

The clock is the GPU's global timer, the same on all SMs. What a launch noted is printed a line a block,
`stamp BLOCK NAME=nanoseconds ...`, which `summarise` turns into a table.
"""

from __future__ import annotations

import re
import statistics

from kernel_edits import Edit, after, instrument

_STREAM = "streaming_warps.cuh"
_MERGE = "merging_warps.cuh"
_BLOCK = "static_cast<int32_t>(blockIdx.x)"
# Columns: the order of a block's life. Streams note the earliest and the latest of their warps.
STAGES = (
    "entry",
    "schedule",
    "primed",
    "arrived",
    "first_end",
    "last_end",
    "pieces",
    "merged",
    "exit",
)
_SLOTS = {name: i for i, name in enumerate(STAGES)}


def _now(stage: str) -> str:
    return f"note_stage({_SLOTS[stage]});"


_FORMAT = " ".join(f"{name}=%llu" for name in STAGES)
_VALUES = ", ".join(f"row[{i}]" for i in range(len(STAGES)))
_HELPERS = f"""
__device__ unsigned long long block_stages[1024][{len(STAGES) + 1}];
__device__ __forceinline__ unsigned long long global_time() {{
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}}
__device__ __forceinline__ void note_stage(int stage) {{ block_stages[{_BLOCK}][stage] = global_time(); }}
__device__ __forceinline__ void note_sm() {{
  uint32_t sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  block_stages[{_BLOCK}][{len(STAGES)}] = sm;
}}
__device__ __forceinline__ void note_first(int stage) {{
  atomicMin(&block_stages[{_BLOCK}][stage], global_time());
}}
__device__ __forceinline__ void note_last(int stage) {{
  atomicMax(&block_stages[{_BLOCK}][stage], global_time());
}}
__device__ __forceinline__ void print_stages() {{
  unsigned long long* row = block_stages[{_BLOCK}];
  if (row[0] != 0) {{
    printf("stamp %d sm=%llu {_FORMAT}\\n", {_BLOCK}, row[{len(STAGES)}], {_VALUES});
  }}
  for (int i = 0; i < {len(STAGES)}; ++i) row[i] = 0;
  row[{_SLOTS["first_end"]}] = ~0ull;
}}
"""

STAMPS: list[Edit] = [
    *instrument(
        _HELPERS,
        "if (threadIdx.x == 0) print_stages();",
        f"if (threadIdx.x == 0) {{ note_sm(); {_now('entry')} }}",
    ),
    after(_STREAM, "    __syncthreads();\n", f"    if (threadIdx.x == 0) {_now('schedule')}"),
    after(
        "kernel.cuh",
        "  merge_chunks(p, shared, schedule, place);\n",
        f"  if (threadIdx.x == kStreamThreads) {_now('exit')}",
    ),
    after(
        _STREAM,
        "    if (consumed < 0) continue;\n",
        f"    if (consumed == 0 && threadIdx.x == 0) {_now('primed')}",
    ),
    after(
        _STREAM,
        "      __syncwarp();  // all lanes' copies of the tile arrived\n",
        f"      if (consumed == 0 && threadIdx.x == 0) {_now('arrived')}",
    ),
    after(
        _STREAM,
        "  copy_async_wait<0>();\n",
        f"  if (lane == 0) {{\n    note_first({_SLOTS['first_end']});\n"
        f"    note_last({_SLOTS['last_end']});\n  }}",
    ),
    after(
        _MERGE,
        "      barrier_wait(kPiecesReady, kStreamThreads + kMergeThreads);\n",
        f"      if (threadIdx.x == kStreamThreads) {_now('pieces')}",
    ),
    after(
        _MERGE,
        "    if (thread == 0) publish_shared(&shared_.chunks_read, place + 1);\n",
        f"    if (thread == 0) {_now('merged')}",
    ),
]


def summarise(printed: str) -> str:
    """A table in microseconds since the first block's entry: minimum, quartiles and maximum of each stage."""
    rows = [
        {name: int(ns) for name, ns in re.findall(r"(\w+)=(\d+)", line)}
        for line in printed.splitlines()
        if line.startswith("stamp ")
    ]
    if not rows:
        return "no stamps"
    begin = min(row["entry"] for row in rows)
    lines = [f"{'stage':12s}{'min':>8s}{'25%':>8s}{'50%':>8s}{'75%':>8s}{'max':>8s}   ({len(rows)} blocks)"]
    for stage in STAGES:
        times = sorted((row[stage] - begin) / 1e3 for row in rows if begin <= row[stage] < 1 << 63)
        if len(times) < 2:
            lines.append(f"{stage:12s} " + " ".join(f"{t:.1f}" for t in times))
            continue
        quarters = statistics.quantiles(times, n=4, method="inclusive")
        lines.append(f"{stage:12s}" + "".join(f"{t:8.1f}" for t in (times[0], *quarters, times[-1])))
    return "\n".join(lines)
