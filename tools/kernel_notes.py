"""Edits of the authored sources that make a launch note its progress, and tables of what it noted.

STAMPS: when every block reached each stage, by the GPU's global timer, the same on all SMs. trace(block):
each step of one block's warps, by the SM's clock. Both note at POINTS. Arithmetic may move across a note;
copies, barriers and memory do not.

A launch whose sm_scale is TAKE computes nothing: it moves the notes of the launch before it to where k_cache
lies, and clears them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from kernel_edits import Edit, after, before

TAKE = 12345.0
MOST_BLOCKS = 8192  # later ones note nothing
MOST_WARPS = 8
MOST_STEPS = 2000  # of a warp; later ones are not noted


@dataclass(frozen=True)
class Point:
    """A place behind a text (or before it), on a line of its own."""

    name: str
    stamp: str  # which of a block's visits are stages: "first", "last", "both" or "none"
    text: str
    behind: bool = True
    file: str = "kernel.cuh"
    when: str = ""  # for stamps, visits count only then: every tile's would cost too much
    step: bool = True  # of a trace


_ADD_WARPS = "  add_rows<kHeads, false, kUncut>(p, shared, rank, splits, part);\n"
_ADD_BLOCKS = "    add_rows<kHeads, true, kUncut>(p, shared, rank, splits, part);\n"
_TILE_IS_THERE = "    __syncwarp();  // all lanes' copies of the tile arrived\n"
_MERGE = "merge_blocks.cuh"
_END = "}\n\n}  // namespace evenkv\n"  # of the kernel, which is last in its file

# In the order of a block's life. A block may take several parts, and its warps end apart from each other.
POINTS = (
    Point("start", "first", "  // Page ids: into L2", behind=False),
    Point("request found", "first", "  TileRange tiles = {0,", behind=False),
    Point("tile asked for", "none", "      copy_async_commit();\n"),
    Point("ring full", "first", "    } while (filled++ < 0);\n", when="filled == 1", step=False),
    Point("tile there", "first", _TILE_IS_THERE, when="filled == 1"),
    Point("tile attended", "none", "    attention.attend(ring + stage * kTileBytes, queue[0]);\n"),
    Point("tiles through", "both", "  copy_async_wait<0>();\n"),
    Point("block met", "none", _ADD_WARPS, behind=False),
    Point("block added", "last", _ADD_WARPS),
    Point("cluster met", "last", _ADD_BLOCKS, behind=False),
    Point("cluster added", "last", _ADD_BLOCKS),
    Point("counted in", "last", "  return shared.is_last;\n", behind=False, file=_MERGE),
    Point("parts merged", "last", "    if (!is_group) return;\n", behind=False, file=_MERGE),
    Point("exit", "last", _END, behind=False),
)

_BLOCK = "((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x)"

_STAMP = f"""\
  if (threadIdx.x % 32 != 0 || {_BLOCK} >= {MOST_BLOCKS}) return;
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  unsigned long long* const visits = notes + ({_BLOCK} * {len(POINTS)} + point) * 2;
  atomicMax(visits, ~now);  // the first one
  atomicMax(visits + 1, now);
"""
STAMP_NOTES = MOST_BLOCKS * len(POINTS) * 2

_STEP = f"""\
  if (threadIdx.x % 32 != 0 || {_BLOCK} != BLOCK) return;
  __shared__ int last[{MOST_WARPS}];
  const int warp = threadIdx.x / 32;
  const int step = last[warp] = point == 0 ? 0 : last[warp] + 1;
  if (step >= {MOST_STEPS}) return;
  notes[warp * {MOST_STEPS} + step] = (point + 1ull) << 32 | static_cast<uint32_t>(clock64());
"""
TRACE_NOTES = MOST_WARPS * MOST_STEPS


def _instrument(size: int, note: str, visits: dict[int, str]) -> list[Edit]:
    """Device code that notes a visit, the launch that takes notes, and the points with when to note them."""
    device = f"""\
__device__ unsigned long long notes[{size}];
__device__ __forceinline__ void note(int point) {{
{note}}}
__device__ __noinline__ void take_notes(const void* place) {{
  if ({_BLOCK} != 0) return;
  unsigned long long* const to = static_cast<unsigned long long*>(const_cast<void*>(place));
  for (int i = threadIdx.x; i < {size}; i += blockDim.x) {{
    to[i] = notes[i];
    notes[i] = 0;
  }}
}}
"""
    edits = [
        before("ptx.cuh", "__device__ __forceinline__ void prefetch_l2(", device),
        after(
            "kernel.cuh",
            "= *reinterpret_cast<BlockShared<kHeads>*>(raw);\n",
            f"  if (p.sm_scale == {TAKE}f) {{\n    take_notes(p.k_cache);\n    return;\n  }}",
        ),
    ]
    for number, when in visits.items():
        point = POINTS[number]
        code = f"{when and f'if ({when}) '}note({number});"
        edits.append((after if point.behind else before)(point.file, point.text, code))
    return edits


STAMPS = _instrument(
    STAMP_NOTES, _STAMP, {number: point.when for number, point in enumerate(POINTS) if point.stamp != "none"}
)


def trace(block: int) -> list[Edit]:
    """The edits that trace a block, numbered along splits first, then units."""
    steps = {number: "" for number, point in enumerate(POINTS) if point.step}
    return _instrument(TRACE_NOTES, _STEP.replace("BLOCK", str(block)), steps)


def stamp_table(notes: list[int]) -> str:
    """Microseconds since the first block's start, and how many blocks reached a stage."""
    width = 2 * len(POINTS)
    rows = [notes[i : i + width] for i in range(0, len(notes), width)]
    rows = [row for row in rows if row[0] != 0]
    if not rows:
        return "no stamps"
    begin = min(~row[0] for row in rows)
    lines = [f"{'us':22s}{'blocks':>8s}{'min':>9s}{'median':>9s}{'max':>9s}"]
    for number, point in enumerate(POINTS):
        for visit in ("first", "last"):
            if point.stamp not in (visit, "both"):
                continue
            noted = [row[2 * number + (visit == "last")] for row in rows]
            times = [((~t if visit == "first" else t) - begin) / 1e3 for t in noted if t != 0]
            name = f"{point.name}, {visit}" if point.stamp == "both" else point.name
            cells = (min(times), statistics.median(times), max(times)) if times else ()
            lines.append(f"{name:22s}{len(times):8d}" + "".join(f"{t:9.1f}" for t in cells))
    return "\n".join(lines)


def trace_table(notes: list[int]) -> str:
    """Cycles from a warp's step before, and from its start to its first and last visit (over all warps)."""
    waits, places = defaultdict(list), defaultdict(list)
    for warp in range(0, len(notes), MOST_STEPS):
        steps = [(note >> 32, note & 0xFFFFFFFF) for note in notes[warp : warp + MOST_STEPS] if note != 0]
        for (_, earlier), (number, clock) in zip(steps, steps[1:], strict=False):
            waits[number].append((clock - earlier) % 2**32)
            places[number].append((clock - steps[0][1]) % 2**32)
    if not waits:
        return "no steps"
    heads = ("visits", "min", "median", "max", "from", "to")
    lines = [f"{'cycles':18s}" + "".join(f"{head:>9s}" for head in heads)]
    for number, point in enumerate(POINTS, start=1):
        if found := waits[number]:
            cells = (len(found), min(found), statistics.median(found), max(found))
            cells += (min(places[number]), max(places[number]))
            lines.append(f"{point.name:18s}" + "".join(f"{cell:9.0f}" for cell in cells))
    return "\n".join(lines)
