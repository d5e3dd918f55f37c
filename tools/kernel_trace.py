"""Edits of the authored sources that make the warps of one block note the SM's clock at each step.

What a launch noted is printed a line an event, `trace WARP EVENT CLOCK`. `summarise` lists each warp's events
with the cycles since the event before.
"""

from __future__ import annotations

from collections import defaultdict

from kernel_edits import Edit, after, before, instrument

_STREAM, _MERGE, _PLAN = "streaming_warps.cuh", "merging_warps.cuh", "planning_warp.cuh"
_MOST = 400
# The block that is traced: not the first one where there are more.
_BLOCK = "(gridDim.x > 7 ? 7 : 0)"
NAMES: list[str] = []


def _note(name: str) -> str:
    if name not in NAMES:
        NAMES.append(name)
    return f"note_event({NAMES.index(name)});"


_HELPERS = f"""
__device__ int event_counts[32];
__device__ uint2 events[32][{_MOST}];
__device__ __forceinline__ void note_event(int id) {{
  __shared__ int counts[32];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 != 0 || blockIdx.x != {_BLOCK}) return;
  const int n = counts[warp] = id == 0 ? 1 : counts[warp] + 1;
  if (n > {_MOST}) return;
  events[warp][n - 1] = make_uint2(id, static_cast<uint32_t>(clock64()));
  event_counts[warp] = n;
}}
__device__ __forceinline__ void print_events() {{
  if (threadIdx.x != 0 || blockIdx.x != {_BLOCK}) return;
  for (int warp = 0; warp < 32; ++warp) {{
    for (int i = 0; i < event_counts[warp]; ++i) {{
      printf("trace %d %d %u\\n", warp, events[warp][i].x, events[warp][i].y);
    }}
    event_counts[warp] = 0;
  }}
}}
"""


def _after(file: str, text: str, name: str) -> Edit:
    return after(file, text, _note(name))


def _before(file: str, text: str, name: str) -> Edit:
    return before(file, text, _note(name))


TRACE: list[Edit] = [
    *instrument(_HELPERS, "print_events();", _note("entry")),
    _before("kernel.cuh", "    __syncthreads();  // the streams'", "ready"),
    _before("kernel.cuh", "    const bool has_chunk =", "scheduled"),
    _before(_STREAM, "    __syncthreads();\n", "ready"),
    _before(_STREAM, "    if (!shared_.starts_anew) return false;\n", "scheduled"),
    _after(_STREAM, "    producer.produce(chunks_done);\n", "produce"),
    _before(_STREAM, "    begins_ = in_chunk_ = true;\n", "enter chunk"),
    _after(_STREAM, "        starts_before = tile.flags & kStartsBefore;\n", "q"),
    _after(_STREAM, "      wait_for_oldest<kStages - 1>(producer.produced() - 1 - consumed);\n", "wait"),
    _before(_STREAM, "      if (tile.flags & kLastOfPiece) {", "attend"),
    _before(_STREAM, "          const int last = ", "own slots"),
    _before(_STREAM, "          if (sub == 0 && lane == 0) {\n            shared.cut_pieces", "store piece"),
    _after(_STREAM, "      ++chunks_done;\n", "arrive"),
    _before(_MERGE, "    if (threadIdx.x >= kStreamThreads) {\n", "round"),
    _before(_MERGE, "      barrier_wait(kPiecesReady, kStreamThreads + kMergeThreads);\n", "plan seen"),
    _after(_MERGE, "      barrier_wait(kPiecesReady, kStreamThreads + kMergeThreads);\n", "pieces ready"),
    _after(_MERGE, "    chains.find(shared_);\n", "chains"),
    _before(_MERGE, "      if (slot >= 0) {\n", "sum"),
    _before(_MERGE, "      if (phase == kPieces && !count_in", "phase"),
    _after(_MERGE, "    if (thread == 0) publish_shared(&shared_.chunks_read, place + 1);\n", "pieces read"),
    _before(_MERGE, "    return true;\n  }\n\n  // After a group", "counted in"),
    _before(_PLAN, "      ChunkRange range = {0, 0};\n", "drawn"),
    _before(_PLAN, "    plan_chunk(p, shared, chunk, place);\n", "located"),
    _before(_PLAN, "  if (lane == 0) publish_shared(&shared.planned", "planned"),
]


def summarise(printed: str) -> str:
    """Each warp's events: cycles since entry, and since the event before; runs of one event on one line."""
    clocks = defaultdict(list)
    for line in printed.splitlines():
        if line.startswith("trace "):
            warp, event, clock = (int(word) for word in line.split()[1:])
            clocks[warp].append((NAMES[event], clock))
    lines = []
    for warp, noted in sorted(clocks.items()):
        begin = before = noted[0][1]
        cells = []
        for name, clock in noted:
            cells.append(f"{name} {(clock - begin) % 2**32} (+{(clock - before) % 2**32})")
            before = clock
        lines.append(f"warp {warp}: " + ", ".join(cells))
    return "\n".join(lines) or "no events"
