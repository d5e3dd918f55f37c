"""Compiles evenkv_triton's kernel without a GPU; prints shared memory, spilled bytes and registers a thread.

Arguments: cache dtype in Triton's words, page size, architecture, shared memory a program may take, group,
CUT.
"""

import re
import subprocess
import sys
import tempfile

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evenkv.kernels.evenkv_triton import kernel, tuning

cache = sys.argv[1]
page_size, arch, shared, group, is_cut = map(int, sys.argv[2:])
scaled, head_dim = cache.startswith("fp8"), 128
chosen = tuning.choose(head_dim, 1 if scaled else 2, group, shared)
constants = dict(
    K_SLOT_STRIDE=256,
    V_SLOT_STRIDE=256,
    NUM_KV_HEADS=2,
    GROUP=group,
    ROWS=chosen.rows,
    MERGE_ROWS=chosen.merge_rows,
    HEAD_DIM=head_dim,
    PAGE_SIZE=page_size,
    STEP=chosen.tile,
    TILE=chosen.tile,
    STREAMS=chosen.streams,
    RUN=tuning.RUN_TOKENS,
    PAIRS=cache == "fp8e4nv",
    CUT=bool(is_cut),
    UNROLL=chosen.unroll,
    SEARCH=tuning.SEARCH_BLOCK,
    COMPUTE=tl.float16 if scaled else tl.bfloat16,
)
if page_size == 1:
    constants["last_page_len_ptr"] = None
if not scaled:
    constants |= {"k_scale_ptr": None, "v_scale_ptr": None}
types = {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_ptr": "*" + cache, "v_ptr": "*" + cache}
types |= {"logit_scale": "fp32", "multiplier": "i64"}
types |= {n + "_ptr": "*fp32" for n in ("k_scale", "v_scale", "lse", "acc", "stats")}
types |= {n + "_ptr": "*i32" for n in ("indptr", "indices", "last_page_len", "counters")}
names = kernel.decode_kernel.arg_names
signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
aligned = [n for n in names if n not in constants and n.endswith(("_ptr", "_stride"))]
attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
source = ASTSource(kernel.decode_kernel, signature, constants, attributes)
options = {"num_warps": tuning.WARPS, "num_stages": chosen.stages, "enable_fp_fusion": True}
built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
    ptx.write(built.asm["ptx"])
    ptx.flush()
    suffix = "a" if arch == 90 else ""
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch=sm_{arch}{suffix}", ptx.name, "-o", "/dev/null"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
print(built.metadata.shared, spilled, *re.findall(r"Used (\d+) registers", report))
