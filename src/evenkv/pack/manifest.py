"""`kernel.json`: what a kernel folder holds, how it is entered and which definitions it supports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evenkv.errors import EvenkvError
from evenkv.paths import Repository
from evenkv.spec.family import DecodeSpec

MANIFEST = "kernel.json"

KvDtype = Literal["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]*")
_COMPILED = ("cuda", "cpp")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Supports(_Strict):
    """Geometry that a kernel takes; a field that is null takes any value."""

    kv_dtypes: tuple[KvDtype, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group_size: int | None = None
    group_sizes: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None

    def refusal(self, spec: DecodeSpec) -> str | None:
        """Why `spec` is not supported, or None when it is."""
        listed = (
            ("kv_dtype", spec.kv_dtype, self.kv_dtypes),
            ("head_dim", spec.head_dim, self.head_dims),
            ("group size", spec.group_size, self.group_sizes),
            ("page_size", spec.page_size, self.page_sizes),
        )
        for what, value, wanted in listed:
            if wanted is not None and value not in wanted:
                return f"{what} {value}, wanted one of {', '.join(map(str, wanted))}"
        if self.max_group_size is not None and spec.group_size > self.max_group_size:
            return f"group size {spec.group_size}, wanted at most {self.max_group_size}"
        return None


class Manifest(_Strict):
    """The contents of `kernel.json`; docs/architecture.md describes the fields."""

    name: str
    author: str
    language: Literal["cuda", "cpp", "triton", "python"]
    entry_point: str
    destination_passing_style: bool
    binding: Literal["tvm-ffi", "torch"] | None = None
    target_hardware: tuple[str, ...] = Field(min_length=1)
    dependencies: tuple[str, ...] = ()
    trace_set: Literal["main", "optional"]
    description: str = Field(min_length=1)
    sources: tuple[str, ...]
    supports: Supports
    config_templates: dict[str, str] = Field(default_factory=dict)

    @field_validator("name", "author")
    @classmethod
    def _is_slug(cls, value: str) -> str:
        if not _SLUG.fullmatch(value):
            raise ValueError(f"wanted lower-case letters, digits, '_' and '-', got {value!r}")
        return value

    @field_validator("entry_point")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        path, separator, function = value.partition("::")
        if not (separator and path and function.isidentifier()):
            raise ValueError(f"wanted '<file>::<function>', got {value!r}")
        return value

    @field_validator("sources")
    @classmethod
    def _globs_stay_inside(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            _check_relative(pattern)
        return value

    @field_validator("config_templates")
    @classmethod
    def _templates_stay_inside(cls, value: dict[str, str]) -> dict[str, str]:
        for path in (*value.keys(), *value.values()):
            _check_relative(path)
        return value

    @model_validator(mode="after")
    def _compiled_kernels_name_a_binding(self) -> Manifest:
        if self.language in _COMPILED and self.binding is None:
            raise ValueError(f"binding: wanted 'tvm-ffi' or 'torch' for language {self.language!r}, got null")
        if self.language not in _COMPILED and self.binding is not None:
            raise ValueError(f"binding: wanted null for language {self.language!r}, got {self.binding!r}")
        return self


@dataclass(frozen=True)
class Kernel:
    """One kernel folder: its manifest and the authored files that it packs.

    `sources` are the matched files, relative posix paths in sorted order.
    """

    folder: Path
    manifest: Manifest
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def author(self) -> str:
        return self.manifest.author

    @property
    def packed_paths(self) -> tuple[str, ...]:
        """Paths inside a packed solution, sorted: authored files and rendered templates."""
        return tuple(sorted({*self.sources, *self.manifest.config_templates}))

    def supports(self, spec: DecodeSpec) -> bool:
        """Whether the kernel takes this geometry."""
        return self.manifest.supports.refusal(spec) is None

    def require(self, spec: DecodeSpec) -> None:
        """Raise EvenkvError naming the first part of `spec` that the kernel does not take."""
        refusal = self.manifest.supports.refusal(spec)
        if refusal is not None:
            raise EvenkvError(
                f"Kernel {self.name} does not support {spec.name}: {refusal}.",
                f"Pick another kernel, or widen `supports` in {self.folder / MANIFEST}.",
            )


def load_kernel(folder: Path) -> Kernel:
    """Read and check one kernel folder.

    Raises
    ------
    EvenkvError
        When `kernel.json` is missing or broken, a source or template is missing, a glob leaves the
        folder or matches nothing, or the entry point is not among the packed files.
    """
    manifest = _read_manifest(folder)
    if manifest.name != folder.name:
        raise _fault(folder, "name", f"wanted the folder's name {folder.name!r}, got {manifest.name!r}")

    found: set[str] = set()
    for pattern in manifest.sources:
        matches = {p.relative_to(folder).as_posix() for p in folder.glob(pattern) if _is_authored(p, folder)}
        if not matches:
            raise _fault(folder, "sources", f"the glob {pattern!r} matches no file")
        found |= matches
    for target, template in manifest.config_templates.items():
        if not (folder / template).is_file():
            raise _fault(folder, "config_templates", f"the template {template!r} is missing")
        if target in found:
            raise _fault(folder, "config_templates", f"{target!r} is also an authored source")

    kernel = Kernel(folder, manifest, tuple(sorted(found)))
    entry_file = manifest.entry_point.partition("::")[0]
    if entry_file not in kernel.packed_paths:
        raise _fault(folder, "entry_point", f"{entry_file!r} is not among the packed files")
    return kernel


def load_kernels(repo: Repository) -> list[Kernel]:
    """All kernel folders (those that hold a `kernel.json`), sorted by name."""
    return [load_kernel(path.parent) for path in sorted(repo.kernels.glob(f"*/{MANIFEST}"))]


def find_kernel(repo: Repository, name: str) -> Kernel:
    """The kernel called `name`; EvenkvError listing the known ones when there is none."""
    folder = repo.kernels / name
    if _SLUG.fullmatch(name) and (folder / MANIFEST).is_file():
        return load_kernel(folder)
    known = ", ".join(sorted(p.parent.name for p in repo.kernels.glob(f"*/{MANIFEST}"))) or "none"
    raise EvenkvError(f"Unknown kernel {name!r}.", f"Known kernels: {known}.")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise EvenkvError(
            f"Kernel folder {folder} has no {MANIFEST}.", "Add one as docs/architecture.md shows."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "document"
        raise _fault(folder, field, first["msg"].removeprefix("Value error, ")) from None


def _check_relative(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path:
        raise ValueError(f"wanted a relative posix path inside the kernel folder, got {path!r}")


def _is_authored(path: Path, folder: Path) -> bool:
    # Links may lead out of the folder, and what a run leaves behind is no source.
    inside = path.resolve().is_relative_to(folder.resolve())
    return path.is_file() and inside and "__pycache__" not in path.parts and path.name != MANIFEST


def _fault(folder: Path, field: str, what: str) -> EvenkvError:
    return EvenkvError(
        f"Kernel folder {folder}, {MANIFEST} field `{field}`: {what}.",
        "Mend the manifest or the folder; docs/architecture.md describes the fields.",
    )
