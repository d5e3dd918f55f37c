"""The family of decode definitions that the package ships: geometry, models and names.

Everything that depends on a definition's shape (template, workloads, packing, numerics) starts here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evenkv.errors import EvenkvError

SEED_DEFINITION = "gqa_paged_decode_h5_kv1_d128_ps1"

_NAME = re.compile(r"gqa_paged_decode(?P<fp8>_fp8)?_h(?P<h>\d+)_kv(?P<kv>\d+)_d(?P<d>\d+)_ps(?P<ps>\d+)")


@dataclass(frozen=True)
class DecodeSpec:
    """Geometry of one definition, `gqa_paged_decode[_fp8]_h{H}_kv{K}_d{D}_ps{P}`.

    `kv_dtype` is the cache's dtype by its flashinfer-bench name; q and output are bfloat16, or float16 for a
    float16 cache.
    `models` are (model, tensor-parallel size) pairs that decode with this geometry.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: str = "bfloat16"
    models: tuple[tuple[str, int], ...] = ()

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype.startswith("float8")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def has_last_page_len(self) -> bool:
        return self.page_size > 1

    @property
    def short_name(self) -> str:
        """The name without its common prefix, `[fp8_]h5_kv1_d128_ps1`: unique within the family."""
        prefix = "fp8_" if self.is_fp8 else ""
        return f"{prefix}h{self.num_qo_heads}_kv{self.num_kv_heads}_d{self.head_dim}_ps{self.page_size}"

    @property
    def name(self) -> str:
        return f"gqa_paged_decode_{self.short_name}"

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs in the definition's order."""
        names = ["q", "k_cache", "v_cache", "kv_indptr", "kv_indices"]
        if self.has_last_page_len:
            names.append("kv_last_page_len")
        if self.is_fp8:
            names += ["k_scale", "v_scale"]
        return (*names, "sm_scale")


def parse_name(name: str) -> DecodeSpec:
    """Geometry from a definition's name; fp8 names mean float8_e4m3fn.

    Raises
    ------
    EvenkvError
        When the name does not follow the family's pattern.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise EvenkvError(
            f"Unknown definition {name!r}: wanted gqa_paged_decode[_fp8]_h<H>_kv<K>_d<D>_ps<P>.",
            "List the known ones with `ls definitions/gqa_paged`.",
        )
    for spec in FAMILY:
        if spec.name == name:
            return spec
    h, kv, d, ps = (int(match[g]) for g in ("h", "kv", "d", "ps"))
    return DecodeSpec(h, kv, d, ps, "float8_e4m3fn" if match["fp8"] else "bfloat16")


# (H, K, D), page sizes, models that decode with it. Sources: the models' public config.json files.
_GEOMETRIES: tuple[tuple[tuple[int, int, int], tuple[int, ...], tuple[tuple[str, int], ...]], ...] = (
    ((5, 1, 128), (1, 16, 64), (("llama-4-scout-17b-16e", 8), ("qwen3-14b", 8))),
    ((6, 1, 128), (1, 64), (("mixtral-8x22b", 8), ("grok-1", 8))),
    ((8, 1, 128), (16,), (("llama-3.1-70b", 8),)),
    ((10, 2, 128), (16,), (("llama-4-scout-17b-16e", 4), ("qwen3-14b", 4))),
    ((20, 4, 128), (1, 64), (("llama-4-scout-17b-16e", 2), ("qwen3-14b", 2))),
    ((32, 4, 128), (1, 16, 64), (("qwen3-30b-a3b", 1),)),
    ((32, 8, 128), (1, 16, 64), (("llama-3.1-8b", 1), ("qwen3-8b", 1))),
    ((32, 32, 128), (1, 16, 64), (("llama-2-7b", 1),)),
    ((40, 8, 128), (16,), (("llama-4-scout-17b-16e", 1), ("qwen3-14b", 1))),
    ((64, 8, 128), (16,), (("llama-3.1-70b", 1), ("qwen3-32b", 1))),
    ((16, 2, 64), (16,), (("gpt-oss-120b", 4),)),
    ((16, 4, 256), (16,), (("qwen3.5-9b", 1),)),
)

_FP8_GEOMETRIES: tuple[tuple[tuple[int, int, int], tuple[int, ...]], ...] = (
    ((5, 1, 128), (1, 16, 64)),
    ((32, 4, 128), (16, 64)),
    ((32, 8, 128), (16, 64)),
    ((32, 32, 128), (16, 64)),
)


def _family() -> tuple[DecodeSpec, ...]:
    models = {geometry: names for geometry, _, names in _GEOMETRIES}
    specs = [DecodeSpec(*g, ps, "bfloat16", names) for g, sizes, names in _GEOMETRIES for ps in sizes]
    specs += [DecodeSpec(*g, ps, "float8_e4m3fn", models[g]) for g, sizes in _FP8_GEOMETRIES for ps in sizes]
    return tuple(specs)


FAMILY: tuple[DecodeSpec, ...] = _family()
