"""kernel.json: good folders load, every kind of fault names the folder and the field."""

from __future__ import annotations

import json

import pytest
from pack_fixtures import CPP_FILES, make_folder, manifest

from evenkv.errors import EvenkvError
from evenkv.pack.manifest import load_kernel
from evenkv.pack.render import pack_solution, source_hash
from evenkv.spec.family import DecodeSpec


def test_a_good_folder_loads_with_subfolders_and_without_what_is_not_listed(tmp_path):
    kernel = load_kernel(make_folder(tmp_path))
    assert kernel.sources == ("binding.cpp", "detail/offset.h")
    assert kernel.packed_paths == ("binding.cpp", "definition.h", "detail/offset.h")


def _without(field):
    return {name: value for name, value in manifest().items() if name != field}


FAULTS = {
    "unknown key": (manifest(colour="red"), "colour"),
    "missing key": (_without("trace_set"), "trace_set"),
    "wrong type": (manifest(destination_passing_style="yes"), "destination_passing_style"),
    "unknown key inside supports": (manifest(supports={"head_dim": [128]}), "supports.head_dim"),
    "unknown dtype": (manifest(supports={"kv_dtypes": ["bf16"]}), "supports.kv_dtypes"),
    "unknown language": (manifest(language="fortran"), "language"),
    "unknown trace set": (manifest(trace_set="extra"), "trace_set"),
    "no hardware": (manifest(target_hardware=[]), "target_hardware"),
    "author that leaves the folder": (manifest(author="../x"), "author"),
    "entry point without function": (manifest(entry_point="binding.cpp"), "entry_point"),
    "entry point not packed": (manifest(entry_point="other.cpp::run"), "entry_point"),
    "compiled without binding": (manifest(binding=None), "binding"),
    "python with binding": (manifest(language="python"), "binding"),
    "glob that leaves the folder": (manifest(sources=["../*.cpp"]), "sources"),
    "absolute glob": (manifest(sources=["/etc/*"]), "sources"),
    "empty glob": (manifest(sources=[""]), "sources"),
    "glob without match": (manifest(sources=["*.cpp", "**/*.h", "*.cu"]), "sources"),
    "missing template": (manifest(config_templates={"definition.h": "absent.j2"}), "config_templates"),
    "template over a source": (
        manifest(config_templates={"binding.cpp": "definition.h.j2"}),
        "config_templates",
    ),
    "template target outside": (
        manifest(config_templates={"../definition.h": "definition.h.j2"}),
        "config_templates",
    ),
}


@pytest.mark.parametrize("fields, field", FAULTS.values(), ids=FAULTS.keys())
def test_faults_name_folder_and_field(tmp_path, fields, field):
    folder = make_folder(tmp_path, fields)
    with pytest.raises(EvenkvError) as caught:
        load_kernel(folder)
    assert str(folder) in caught.value.problem
    assert field in caught.value.problem
    assert caught.value.remedy and caught.value.exit_code == 2


def test_the_name_is_the_folder_name(tmp_path):
    folder = make_folder(tmp_path)
    folder = folder.rename(tmp_path / "other")
    with pytest.raises(EvenkvError, match="`name`.*'other'.*'adder'"):
        load_kernel(folder)


def test_a_folder_without_manifest_and_one_with_broken_json_say_so(tmp_path):
    with pytest.raises(EvenkvError, match="has no kernel.json"):
        load_kernel(tmp_path)
    folder = make_folder(tmp_path)
    (folder / "kernel.json").write_text("{", encoding="utf-8")
    with pytest.raises(EvenkvError, match="Invalid JSON"):
        load_kernel(folder)


def test_a_link_out_of_the_folder_is_no_source(tmp_path):
    folder = make_folder(tmp_path)
    (tmp_path / "secret.h").write_text("outside\n", encoding="utf-8")
    (folder / "linked.h").symlink_to(tmp_path / "secret.h")
    assert "linked.h" not in load_kernel(folder).sources


@pytest.mark.parametrize(
    "spec, wanted",
    [
        (DecodeSpec(5, 1, 128, 1), None),
        (DecodeSpec(64, 8, 128, 16), None),
        (DecodeSpec(9, 1, 128, 1), "group size 9"),
        (DecodeSpec(5, 1, 64, 1), "head_dim 64"),
        (DecodeSpec(5, 1, 128, 64), "page_size 64"),
        (DecodeSpec(5, 1, 128, 1, "float8_e4m3fn"), "kv_dtype float8_e4m3fn"),
    ],
)
def test_supports_narrows_by_every_field(tmp_path, spec, wanted):
    kernel = load_kernel(make_folder(tmp_path))
    assert kernel.supports(spec) is (wanted is None)
    if wanted is not None:
        with pytest.raises(EvenkvError, match=wanted):
            pack_solution(kernel, spec)


def test_null_supports_takes_anything_and_group_sizes_narrow(tmp_path):
    anything = load_kernel(make_folder(tmp_path / "a", manifest(supports={})))
    assert anything.supports(DecodeSpec(96, 1, 80, 7, "float8_e5m2"))
    listed = load_kernel(make_folder(tmp_path / "b", manifest(supports={"group_sizes": [4, 8]})))
    assert listed.supports(DecodeSpec(8, 2, 128, 1))
    assert not listed.supports(DecodeSpec(5, 1, 128, 1))


@pytest.mark.parametrize(
    "template, wanted",
    [
        ("int x = {{ spec.no_such_field }};\n", "no_such_field"),
        ("{% if %}", "definition.h.j2:1"),
        ('{% include "absent.j2" %}', "absent.j2"),
        ("{# nothing #}", "renders to nothing"),
    ],
)
def test_template_faults_name_the_template(tmp_path, template, wanted):
    kernel = load_kernel(make_folder(tmp_path, files={**CPP_FILES, "definition.h.j2": template}))
    with pytest.raises(EvenkvError, match=wanted):
        pack_solution(kernel, DecodeSpec(5, 1, 128, 1))


@pytest.mark.parametrize("content, wanted", [(b"", "is empty"), (b"\xff\xfe", "not UTF-8")])
def test_sources_that_cannot_be_packed_are_named(tmp_path, content, wanted):
    folder = make_folder(tmp_path)
    (folder / "detail" / "offset.h").write_bytes(content)
    with pytest.raises(EvenkvError, match=f"offset.h.*{wanted}"):
        pack_solution(load_kernel(folder), DecodeSpec(5, 1, 128, 1))


def test_source_hash_follows_sources_and_templates_and_nothing_else(tmp_path):
    folder = make_folder(tmp_path)
    first = source_hash(load_kernel(folder))
    assert len(first) == 64

    (folder / "notes.md").write_text("edited\n", encoding="utf-8")
    (folder / "kernel.json").write_text(json.dumps(manifest(description="Other words.")), encoding="utf-8")
    assert source_hash(load_kernel(folder)) == first

    seen = {first}
    for path in ("binding.cpp", "detail/offset.h", "definition.h.j2"):
        with (folder / path).open("ab") as file:
            file.write(b"// edited\n")
        seen.add(source_hash(load_kernel(folder)))
    (folder / "binding.cpp").rename(folder / "renamed.cpp")
    (folder / "kernel.json").write_text(
        json.dumps(manifest(entry_point="renamed.cpp::run")), encoding="utf-8"
    )
    seen.add(source_hash(load_kernel(folder)))
    assert len(seen) == 5
