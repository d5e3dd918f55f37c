"""`evenkv workloads`: import, synth and capture, what they write and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from evenkv.cli.workloads import app
from evenkv.errors import EvenkvError
from evenkv.paths import Repository
from evenkv.spec.family import SEED_DEFINITION, parse_name
from evenkv.workloads import store

ROOT = Path(__file__).resolve().parents[1]
PS16 = "gqa_paged_decode_h5_kv1_d128_ps16"
FP8 = "gqa_paged_decode_fp8_h5_kv1_d128_ps16"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n"


def invoke(*arguments, fails: bool = False):
    """Run a command; a fault comes back as the EvenkvError that the root command prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if fails:
        assert isinstance(result.exception, EvenkvError), result.output or result.exception
        assert result.exception.exit_code == 2
        return str(result.exception)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def checked(root: Path, name: str):
    """Workloads and steps of one definition, each held against the contract."""
    traces = store.load_workloads(store.workloads_path(Repository(root), name), name)
    return [(t, store.check_workload(root, parse_name(name), t, t.workload.uuid)) for t in traces]


def write_log(path: Path, *records) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


# capture


def test_capture_keeps_the_logged_numbers(tmp_path):
    log = write_log(
        tmp_path / "log.jsonl",
        {"step": 17, "lengths": [812, 90, 0, 16], "num_pages": 4096, "sm_scale": 0.1, "engine": "x"},
        "",
        {"lengths": [1]},
    )
    out = tmp_path / "set"
    report = json.loads(invoke("capture", log, "--definition", PS16, "--out", out, "--json"))
    assert report["definitions"][0]["added"] == 2
    (first, step), (second, small) = checked(out, PS16)
    assert step.lengths.tolist() == [812, 90, 16], "padding is left out"
    assert step.num_pages == 4096 and first.workload.inputs["sm_scale"].value == 0.1
    assert step.kv_last_page_len.tolist() == [12, 10, 16]
    assert small.lengths.tolist() == [1]
    assert second.workload.inputs["sm_scale"].value == pytest.approx(128**-0.5)
    assert first.workload.uuid.startswith("capture-")
    about = store.blob_about(out / first.workload.inputs["kv_indices"].path)
    assert about["captured"]["step"] == 17 and "permutation" in about["kv_indices"]


def test_capturing_twice_adds_nothing_and_changes_nothing(tmp_path):
    log = write_log(tmp_path / "log.jsonl", *({"lengths": [n, 40]} for n in range(5, 11)))
    out = tmp_path / "set"
    invoke("capture", log, "--definition", FP8, "--out", out, "--every", 2)
    before = files(out)
    report = json.loads(invoke("capture", log, "--definition", FP8, "--out", out, "--every", 2, "--json"))
    assert report["definitions"][0]["unchanged"] == 3 and files(out) == before
    for trace, _ in checked(out, FP8):
        blob = store.load_blob(out / trace.workload.inputs["k_scale"].path)
        assert (
            blob["k_scale"].dtype == np.float32 and 0.5 <= blob["k_scale"].min() <= blob["k_scale"].max() <= 2
        )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "wanted a JSON object"),
        ([1, 2], "line: wanted a JSON object"),
        ({}, "lengths: wanted a list of whole numbers"),
        ({"lengths": []}, "lengths: wanted a list"),
        ({"lengths": [3, 1.5]}, r"lengths: .* got \[3, 1.5\]"),
        ({"lengths": [True]}, "lengths"),
        ({"lengths": [-1]}, "lengths"),
        ({"lengths": [2**40]}, "lengths"),
        ({"lengths": [0, 0]}, "at least one request that has tokens"),
        ({"lengths": [17], "num_pages": 1}, "num_pages: wanted a whole number from 2"),
        ({"lengths": [17], "num_pages": "9"}, "num_pages"),
        ({"lengths": [17], "sm_scale": 0}, "sm_scale: wanted a positive number"),
        ('{"lengths": [17], "sm_scale": NaN}', "sm_scale"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, named):
    log = write_log(tmp_path / "log.jsonl", {"lengths": [5]}, line)
    out = tmp_path / "set"
    message = invoke("capture", log, "--definition", PS16, "--out", out, fails=True)
    assert "log.jsonl:2" in message and re.search(named, message), message
    assert not out.exists()


def test_capture_refuses_missing_and_empty_logs(tmp_path):
    absent = tmp_path / "absent.jsonl"
    said = invoke("capture", absent, "--definition", PS16, fails=True)
    assert said.startswith(f"log: wanted a file, got {absent}: no such file.") and "Errno" not in said
    said = invoke("capture", tmp_path, "--definition", PS16, fails=True)
    assert said.startswith(f"log: wanted a file, got the folder {tmp_path}.") and "Errno" not in said
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    said = invoke("capture", binary, "--definition", PS16, fails=True)
    assert said.startswith(f"log: wanted UTF-8 text, got {binary}: ")
    empty = write_log(tmp_path / "empty.jsonl")
    assert "empty file" in invoke("capture", empty, "--definition", PS16, fails=True)
    log = write_log(tmp_path / "log.jsonl", {"lengths": [5]})
    for option, value, least in (("--every", 0, 1), ("--seed", -1, 0)):
        said = invoke("capture", log, "--definition", PS16, option, value, fails=True)
        assert said == (
            f"{option}: wanted {least} or more, got {value}. See `evenkv workloads capture --help`."
        )


# synth


def test_synth_records_its_parameters_and_is_deterministic(tmp_path):
    arguments = ["synth", "--definition", SEED_DEFINITION, "--count", 2, "--batch", 6, "--prompt-median", 40]
    arguments += ["--output-median", 10, "--seed", 3, "--num-pages", 3000, "--prefix", 20]
    for name in ("one", "two"):
        invoke(*arguments, "--out", tmp_path / name)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    steps = checked(tmp_path / "one", SEED_DEFINITION)
    assert len(steps) == 2
    for number, (trace, step) in enumerate(steps):
        assert step.batch_size == 6 and step.num_pages == 3000 and trace.workload.uuid.startswith("synth-")
        about = store.blob_about(tmp_path / "one" / trace.workload.inputs["kv_indptr"].path)
        assert about["seed"] == 3 + number and about["batch"] == 6
        assert about["traffic"]["prompt"] == {"median": 40, "sigma": 1.0}
        assert about["traffic"]["prefixes"] == [20]
    assert not np.array_equal(steps[0][1].lengths, steps[1][1].lengths)


def test_synth_finds_a_pool_by_itself_and_appends_empty_requests(tmp_path):
    invoke("synth", "--definition", FP8, "--batch", 20, "--empty", 2, "--out", tmp_path)
    ((_, step),) = checked(tmp_path, FP8)
    assert step.batch_size == 22 and step.lengths[-2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--definition", "nonsense"], "one that the package ships, got 'nonsense'"),
        (["--definition", "gqa_paged_decode_h7_kv1_d128_ps2"], "one that the package ships"),
        (["--definition", PS16, "--count", "0"], "1 or more, got 0. See `evenkv workloads synth --help`."),
        (["--definition", PS16, "--batch", "0"], "1 or more, got 0. See `evenkv workloads synth --help`."),
        (["--definition", PS16, "--empty", "-1"], "0 or more, got -1"),
        (["--definition", PS16, "--seed", "-1"], "0 or more, got -1"),
        (["--definition", PS16, "--prompt-median", "nan"], "a positive number of tokens, got nan"),
        (["--definition", PS16, "--output-sigma", "-1"], "0 to 5, got -1"),
        (["--definition", PS16, "--arrival-rate", "0"], "above 0, got 0"),
        (["--definition", PS16, "--prefix", "0"], "lengths above 0"),
        (["--definition", PS16, "--prefix-probability", "2"], "0 to 1, got 2"),
        (["--definition", PS16, "--num-pages", "0"], "1 or more, got 0"),
        (["--definition", PS16, "--max-context", "1"], "more than a prefix, got 1"),
    ],
)
def test_synth_names_bad_parameters(tmp_path, arguments, named):
    said = invoke("synth", *arguments, "--out", tmp_path / "set", fails=True)
    assert said.startswith(f"{arguments[-2]}: wanted {named}")
    assert not (tmp_path / "set").exists()


def test_synth_says_how_a_batch_that_never_fills_may_fill(tmp_path):
    said = invoke("synth", "--definition", PS16, "--num-pages", "40", "--out", tmp_path, fails=True)
    assert said.startswith("--batch: wanted 32 requests") and "Give more pages" in said


# import


@pytest.fixture
def clone(tmp_path) -> Path:
    """A data set laid out as upstream's: two workloads of the seed definition, and another file."""
    root = tmp_path / "flashinfer-trace"
    lines = []
    for number, lengths in enumerate(([3, 40], [7])):
        stem = f"official_{number}"
        folder = root / "blob" / "workloads" / "gqa_paged" / SEED_DEFINITION
        folder.mkdir(parents=True, exist_ok=True)
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tables = {"kv_indptr": indptr, "kv_indices": np.arange(indptr[-1], dtype=np.int32)[::-1].copy()}
        safetensors.numpy.save_file(tables, folder / f"{stem}.safetensors")
        path = f"./blob/workloads/gqa_paged/{SEED_DEFINITION}/{stem}.safetensors"
        inputs = {name: {"type": "random"} for name in ("q", "k_cache", "v_cache")}
        inputs |= {k: {"type": "safetensors", "path": path, "tensor_key": k} for k in tables}
        inputs["sm_scale"] = {"type": "scalar", "value": 0.088}
        axes = {"batch_size": len(lengths), "num_pages": 64, "len_indptr": len(indptr)}
        axes["num_kv_indices"] = int(indptr[-1])
        workload = {"uuid": f"0000-{number}", "axes": axes, "inputs": inputs}
        lines.append(
            {"definition": SEED_DEFINITION, "solution": None, "workload": workload, "evaluation": None}
        )
    folder = root / "workloads" / "gqa_paged"
    folder.mkdir(parents=True)
    write_log(folder / f"{SEED_DEFINITION}.jsonl", *lines)
    write_log(folder / "gqa_paged_prefill_causal_h32_kv8_d128_ps1.jsonl", "not ours, not read")
    return root


def edit(clone: Path, change) -> None:
    """Change the first official workload."""
    path = clone / "workloads" / "gqa_paged" / f"{SEED_DEFINITION}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[0])
    write_log(path, *records)


def test_import_keeps_uuids_and_checks_what_it_copies(clone, tmp_path):
    out = tmp_path / "set"
    report = json.loads(invoke("import", clone, "--out", out, "--json"))
    assert [(row["definition"], row["added"]) for row in report["definitions"]] == [(SEED_DEFINITION, 2)]
    steps = checked(out, SEED_DEFINITION)
    assert [trace.workload.uuid for trace, _ in steps] == ["0000-0", "0000-1"]
    assert steps[0][1].lengths.tolist() == [3, 40] and steps[0][1].kv_indices[0] == 42
    before = files(out)
    assert "2 unchanged" in invoke("import", clone, "--out", out)
    assert files(out) == before


def test_import_replaces_a_workload_of_the_same_uuid_in_its_place(clone, tmp_path):
    out = tmp_path / "set"
    for folder in ("workloads", "blob"):
        shutil.copytree(ROOT / folder, out / folder)
    uuid = "69ec7197-791c-419a-ae93-a3d2f0d49fd0"
    edit(clone, lambda record: record["workload"].update(uuid=uuid))
    count = len(checked(out, SEED_DEFINITION))
    report = json.loads(invoke("import", clone, "--out", out, "--json"))["definitions"][0]
    assert (report["added"], report["replaced"]) == (1, 1)
    steps = checked(out, SEED_DEFINITION)
    assert len(steps) == count + 1
    assert steps[1][0].workload.uuid == uuid and steps[1][1].lengths.tolist() == [3, 40]


def test_lfs_pointers_are_recognised_and_the_command_is_said(clone, tmp_path):
    out = tmp_path / "set"
    blob = f"blob/workloads/gqa_paged/{SEED_DEFINITION}/official_1.safetensors"
    (clone / blob).write_text(POINTER)
    message = invoke("import", clone, "--out", out, fails=True)
    assert f'git -C {clone} lfs pull --include "{blob}"' in message and "Git LFS pointer" in message
    lines = f"workloads/gqa_paged/{SEED_DEFINITION}.jsonl"
    (clone / lines).write_text(POINTER)
    assert f'--include "{lines}"' in invoke("import", clone, "--out", out, fails=True)
    assert not out.exists()


def test_many_lfs_pointers_are_fetched_by_folder(tmp_path):
    paths = [tmp_path / "a" / "b" / f"{n}.safetensors" for n in range(9)]
    paths[0].parent.mkdir(parents=True)
    for path in paths:
        path.write_text(POINTER)
    with pytest.raises(EvenkvError, match=r'9 such in all.*--include "a/b/\*"'):
        store.refuse_lfs_pointers(tmp_path, paths)


def set_axis(name, value):
    return lambda record: record["workload"]["axes"].update({name: value})


def set_input(name, value):
    return lambda record: record["workload"]["inputs"].update({name: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_axis("len_indptr", 9), "len_indptr: wanted batch_size + 1 = 3, got 9"),
        (set_axis("num_kv_indices", 5), r"kv_indices: wanted int32 [5], got int32 [43]"),
        (set_axis("num_pages", 20), "page ids from 0 to 19, got"),
        (set_input("sm_scale", {"type": "scalar", "value": -1.0}), "sm_scale"),
        (set_input("kv_indptr", {"type": "random"}), "kv_indptr: wanted a safetensors input"),
        (
            set_input("kv_indptr", {"type": "safetensors", "path": "../../x.safetensors", "tensor_key": "a"}),
            "inside the trace set",
        ),
        (
            set_input(
                "kv_indptr", {"type": "safetensors", "path": "blob/absent.safetensors", "tensor_key": "a"}
            ),
            "no such file",
        ),
        (lambda record: record["workload"]["inputs"].pop("sm_scale"), "inputs: wanted"),
        (lambda record: record["workload"].pop("uuid"), "workload.uuid"),
        (lambda record: record["workload"].update(uuid="0000-1"), "uuid 0000-1 is there already"),
        (lambda record: record.update(definition="another"), "got another"),
    ],
)
def test_a_broken_official_workload_is_named_and_nothing_is_written(clone, tmp_path, change, named):
    edit(clone, change)
    message = invoke("import", clone, "--out", tmp_path / "set", fails=True)
    assert named in message and str(clone) in message
    assert not (tmp_path / "set").exists()


def test_import_refuses_what_is_no_clone(clone, tmp_path):
    assert "wanted a clone" in invoke("import", tmp_path / "absent", fails=True)
    assert "got none" in invoke("import", clone, "--definition", PS16, fails=True)
    (clone / "blob/workloads/gqa_paged" / SEED_DEFINITION / "official_0.safetensors").write_bytes(
        b"\x05garbage"
    )
    assert "not a readable safetensors file" in invoke("import", clone, "--out", tmp_path / "set", fails=True)


def test_an_interrupted_write_leaves_the_old_files(tmp_path, monkeypatch):
    log = write_log(tmp_path / "log.jsonl", {"lengths": [5]})
    out = tmp_path / "set"
    invoke("capture", log, "--definition", PS16, "--out", out)
    before = files(out)
    other = write_log(tmp_path / "other.jsonl", {"lengths": [6]})

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("evenkv.files.os.chmod", full)
    result = CliRunner().invoke(app, ["capture", str(other), "--definition", PS16, "--out", str(out)])
    assert result.exit_code != 0 and files(out) == before
