"""README and docs against the tree: tables match the traces, named paths and commands exist."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from evaluate_fixtures import FLAT, LENGTHS, PAGED, FakeGpu, make_repository
from flashinfer_bench.cli.main import cli as upstream_cli
from flashinfer_bench.data import EvaluationStatus, Trace
from typer.testing import CliRunner

from evenkv.cli.main import app, repeat_options
from evenkv.errors import EvenkvError
from evenkv.evaluate import readme
from evenkv.evaluate.gpu import evaluate_on_gpu
from evenkv.evaluate.load import load_package, select_cases
from evenkv.evaluate.traces import load_traces
from evenkv.pack.manifest import find_kernel
from evenkv.paths import Repository, find_repository

ROOT = find_repository().root
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))

# What a run makes: named in the documents, absent from a fresh clone.
_MADE = ("traces", ".venv", "results")
_TOP = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != ".git"} | {*_MADE}
_SUFFIXES = ["py", "md", "json", "jsonl", "j2", "cu", "cuh", "h", "cpp", "toml", "txt", "safetensors"]
_FILE = re.compile(rf"[\w<>*./-]*[\w>*]\.(?:{'|'.join(_SUFFIXES)})")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)\)")
_PLACE = re.compile(r"<[^>]+>")
# Files of the reader's own that examples name.
_EXAMPLES = {"engine.jsonl"}

LIBS = {"timer": "a test's timer", "driver": "580.1", "flashinfer_bench": "0.1.2", "flashinfer": "0.7.4"}


def prose(document: Path) -> str:
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def commands_of(document: Path) -> Iterator[list[str]]:
    """Command lines in fenced blocks without a language, and in inline code."""
    text = document.read_text(encoding="utf-8")
    blocks = [body.replace("\\\n", " ") for language, body in _FENCE.findall(text) if not language]
    lines = [line for block in blocks for line in block.splitlines()]
    for line in (*lines, *_CODE.findall(prose(document))):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def known_names() -> set[str]:
    skipped = {".git", ".venv", ".cache"}
    names: set[str] = set()
    for top in ROOT.iterdir():
        if top.name not in skipped and not top.name.startswith(".bundle"):
            names |= {p.name for p in (top.rglob("*") if top.is_dir() else (top,))}
    return names | {name.removesuffix(".j2") for name in names}


def paths_of(document: Path) -> set[str]:
    """Path-looking words in inline code, and the targets of links that stay in the tree."""
    words = {word.strip(",;:()'\"") for code in _CODE.findall(prose(document)) for word in code.split()}
    found = {word for word in words if _FILE.fullmatch(word) or ("/" in word and word.split("/")[0] in _TOP)}
    links = {link for link in _LINK.findall(prose(document)) if "://" not in link}
    return {path for path in found - _EXAMPLES if not path.startswith(("~", "/", "--"))} | links


def exists(path: str, document: Path, names: set[str]) -> bool:
    if path.split("/")[0] in _MADE:
        return True
    pattern = _PLACE.sub("*", path).rstrip("/")
    if "/" not in path:
        return pattern in names if "*" not in pattern else any(Path(n).match(pattern) for n in names)
    return any(True for base in (ROOT, document.parent) for _ in base.glob(pattern))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_paths_exist(document):
    names = known_names()
    paths = paths_of(document)
    assert paths, "found no path in it: the patterns above no longer fit"
    assert sorted(path for path in paths if not exists(path, document, names)) == []


def test_a_path_that_is_gone_is_found(tmp_path):
    document = tmp_path / "x.md"
    document.write_text(
        "`src/evenkv/gone.py`, `src/evenkv/paths.py`, `gone.cuh`, `tests/<name>.rs/`, `a/b`, "
        "[x](docs/gone.md)"
    )
    paths = paths_of(document)
    gone = {path for path in paths if not exists(path, document, known_names())}
    assert gone == {"src/evenkv/gone.py", "gone.cuh", "tests/<name>.rs/", "docs/gone.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_commands_exist(document):
    faults = [fault for words in commands_of(document) if (fault := fault_of(words))]
    assert faults == []


def test_wrong_commands_are_found():
    for line in (
        "evenkv gone",
        "evenkv run --gone",
        "evenkv workloads gone",
        "evenkv workloads synth --gone 3",
        "make gone",
        "python -m evenkv.gone",
        "python -m evenkv.evaluate.readme --gone",
        "flashinfer-bench run --gone",
        "pytest tests/test_gone.py",
    ):
        assert fault_of(line.split()), line
    assert not fault_of(["evenkv", "run", "--definitions", "a", "b", "--resume"])


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command line of a tool that the package has; None for others."""
    tool, *rest = words
    check: dict[str, Callable[[list[str]], str | None]] = {
        "evenkv": lambda rest: _click_fault(app, rest),
        "make": _make_fault,
        "python": _module_fault,
        "flashinfer-bench": _upstream_fault,
        "pytest": lambda rest: next(
            (f"no {word}" for word in rest if word.startswith("tests/") and not (ROOT / word).exists()), None
        ),
    }
    fault = check[tool](rest) if tool in check else None
    return f"{' '.join(words)}: {fault}" if fault else None


def _click_fault(group: typer.Typer, words: list[str]) -> str | None:
    command = typer.main.get_command(group)
    words = repeat_options(words)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return next((f"no option {w}" for w in words if w.startswith("--") and w not in {*known, "--help"}), None)


def _make_fault(words: list[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    return next((f"no target {word}" for word in words if word not in targets), None)


def _module_fault(words: list[str]) -> str | None:
    if words[:1] != ["-m"]:
        return None
    module = words[1]
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    if module == readme.__name__:
        only = typer.Typer()
        only.command()(readme.main)
        return _click_fault(only, words[2:])
    return None


def _upstream_fault(words: list[str]) -> str | None:
    source = ast.parse(Path(upstream_cli.__code__.co_filename).read_text(encoding="utf-8"))
    known = {
        argument.value
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_argument", "add_parser")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    known |= {option.replace("--", "--no-", 1) for option in known}
    wanted = [word for word in words[:1] if word] + [word for word in words[1:] if word.startswith("--")]
    return next((f"no {word}" for word in wanted if word not in known), None)


def test_the_python_example_is_right(monkeypatch: pytest.MonkeyPatch):
    """As it stands but on a CPU, as its comment says; request 1 has the 16 tokens of page 2."""
    (example,) = (body for language, body in _FENCE.findall(README.read_text()) if language == "python")
    on_gpu = 'device, kernel = "cuda", "evenkv_cuda"'
    assert example.count(on_gpu) == 1 and 'on a CPU: "cpu", "evenkv_cpp"' in example
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(example.replace(on_gpu, 'device, kernel = "cpu", "evenkv_cpp"'), names)
    assert find_kernel(Repository(ROOT), "evenkv_cuda").supports(names["spec"])
    call = ast.parse(example).body[-1].value
    given = [a.id if isinstance(a, ast.Name) else "sm_scale" for a in call.args]
    assert given == [*names["spec"].input_names, "output", "lse"]
    keys, values = (names[cache][2, :, 3].float() for cache in ("k_cache", "v_cache"))
    logits = names["q"][1, 12:16].float() @ keys.T * 128**-0.5
    torch.testing.assert_close(
        names["output"][1, 12:16].float(), logits.softmax(1) @ values, atol=1e-2, rtol=0
    )
    torch.testing.assert_close(names["lse"][1, 12:16], logits.logsumexp(1) / math.log(2), atol=1e-3, rtol=0)


def test_readme_shows_the_committed_traces():
    """The block is what the traces give: those in the working tree, or those committed.

    A run on a GPU adds traces, which must not make the tests of a clone fail before the tables are rendered.
    """
    repository = find_repository()
    text = README.read_text(encoding="utf-8")
    if readme.put_block(text, readme.render_block(readme.filed_traces(repository), repository)) == text:
        return
    committed = _committed_traces(repository)
    assert readme.put_block(text, readme.render_block(committed, repository)) == text, (
        f"run `{readme.COMMAND}` and commit README.md"
    )


def _committed_traces(repository: Repository) -> list[Trace]:
    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(repository.root), *arguments], capture_output=True, text=True, check=True
        )
        return answer.stdout

    try:
        paths = git("ls-tree", "-r", "--name-only", "HEAD", "--", "traces").split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("traces differ from README's tables, and there is no commit to compare with")
    lines = [line for path in sorted(paths) for line in git("show", f"HEAD:{path}").splitlines()]
    return [Trace.model_validate_json(line) for line in lines if line.strip()]


# Rendering, from a small trace set.


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(tmp_path)


def file_traces_of(repository: Repository, kernel: str, gpu: FakeGpu, libs: dict[str, str] = LIBS) -> None:
    cases = select_cases(load_package(repository), solutions=[kernel])
    evaluate_on_gpu(cases, gpu, repository, libs, gpu.hardware)


def cells(block: str, start: str) -> list[str]:
    (line,) = (line for line in block.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_no_traces_gives_the_placeholder(repository):
    assert readme.render_block([], repository) == readme.PLACEHOLDER
    assert readme.filed_traces(repository) == []


def test_tables_have_latencies_ratio_errors_and_versions(repository):
    file_traces_of(repository, "evenkv_cuda", FakeGpu(latency_ms=0.010))
    file_traces_of(repository, "flashinfer_tc", FakeGpu(latency_ms=0.060))
    file_traces_of(repository, "fa3", FakeGpu(latency_ms=0.040))
    block = readme.render_block(readme.filed_traces(repository), repository)

    head = cells(block, "workload")
    row = dict(zip(head, cells(block, "`other`"), strict=True))
    assert head[3:6] == ["evenkv_cuda", "flashinfer_tc", "fa3"]
    assert (row["batch"], row["kv tokens"]) == ("2", str(sum(LENGTHS["other"])))
    shown = [row[name] for name in ("evenkv_cuda", "flashinfer_tc", "fa3", "ratio")]
    assert shown == ["10.0", "60.0", "40.0", "6.00x"]
    assert row["evenkv_cuda error"] == "2.0e-04"
    for part in ("NVIDIA H200; driver 580.1, torch 2.11.0", "flashinfer-bench 0.1.2", "flashinfer 0.7.4"):
        assert part in block
    assert "timer: a test's timer; 1 workload; evaluated 2026-01-01." in block
    assert cells(block, "h5_kv1_d128_ps16")[1:] == ["2", "all 6", "6.00x", "6.00x", "6.00x"]
    assert cells(block, "all")[1:3] == ["3", "all 9"]


def test_failures_show_and_give_no_ratio(repository):
    file_traces_of(repository, "evenkv_cuda", FakeGpu())
    traces = readme.filed_traces(repository)
    for index, trace in enumerate(traces):
        if trace.workload.uuid == "other":
            failed = trace.evaluation.model_copy(
                update={"status": EvaluationStatus.TIMEOUT, "performance": None, "correctness": None}
            )
            traces[index] = trace.model_copy(update={"evaluation": failed})
    block = readme.render_block(traces, repository)
    assert cells(block, "`other`")[3:] == ["TIMEOUT", "-", "-", "-", "-"]
    assert cells(block, "h5_kv1_d128_ps1")[1:] == ["1", "0 of 1, evenkv_cuda: TIMEOUT x 1", "-", "-", "-"]


def test_the_summary_is_a_geometric_mean_with_its_ends(repository):
    file_traces_of(repository, "evenkv_cuda", FakeGpu(latency_ms=0.010))
    file_traces_of(repository, "flashinfer_tc", FakeGpu(latency_ms=0.020))
    package = load_package(repository)
    mixed = [c for c in select_cases(package, [PAGED], ["flashinfer_tc"]) if c.workload.uuid == "mixed"]
    evaluate_on_gpu(mixed, FakeGpu(latency_ms=0.080), repository, LIBS, "NVIDIA H200")
    block = readme.render_block(readme.filed_traces(repository), repository)
    assert cells(block, "h5_kv1_d128_ps16")[3:] == ["4.00x", "2.00x", "8.00x"]


def test_gpus_and_timers_are_never_mixed_and_unnamed_timers_left_out(repository):
    file_traces_of(repository, "evenkv_cuda", FakeGpu(latency_ms=0.010))
    file_traces_of(repository, "flashinfer_tc", FakeGpu(latency_ms=0.060, hardware="NVIDIA GB200"))
    file_traces_of(repository, "flashinfer_tc", FakeGpu(), {**LIBS, "timer": "another timer"})
    file_traces_of(repository, "fa3", FakeGpu(), {})
    block = readme.render_block(readme.filed_traces(repository), repository)
    assert block.count(f"**`{FLAT}` on ") == 3
    assert "x |" not in block
    assert block.endswith("Left out: 3 traces that name no timer.")


def test_traces_of_another_source_are_named(repository):
    file_traces_of(repository, "evenkv_cuda", FakeGpu())
    file_traces_of(repository, "flashinfer_tc", FakeGpu())
    traces = readme.filed_traces(repository)
    assert "another source" not in readme.render_block(traces, repository)
    for trace in traces[:2]:
        trace.evaluation.environment.libs["evenkv_solution"] = "0" * 12
    kernels = [trace.solution.split("_h5")[0] for trace in traces[:2]]
    assert kernels == ["flashinfer_tc"] * 2
    block = readme.render_block(traces, repository)
    assert block.endswith("to be evaluated again: flashinfer_tc (2 evaluations).")


def test_the_command_writes_checks_and_names_missing_markers(repository, monkeypatch):
    monkeypatch.setenv("EVENKV_ROOT", str(repository.root))
    only = typer.Typer()
    only.command()(readme.main)
    path = repository.root / "README.md"

    def run(*arguments: str):
        return CliRunner().invoke(only, arguments)

    assert run().exit_code == 2
    path.write_text("no markers")
    assert run().exit_code == 2 and path.read_text() == "no markers"
    path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    assert run("--check").exit_code == 1 and "old" in path.read_text()
    assert run().exit_code == 0 and run("--check").exit_code == 0
    assert path.read_text() == f"before\n{readme.BEGIN}\n{readme.PLACEHOLDER}\n{readme.END}\nafter\n"
    file_traces_of(repository, "evenkv_cuda", FakeGpu())
    assert run("--check").exit_code == 1
    assert run().exit_code == 0 and "20.0" in path.read_text()
    with pytest.raises(EvenkvError, match="traces:begin"):
        readme.put_block(f"{readme.END}\n{readme.BEGIN}", "")


@pytest.mark.parametrize(
    ("uuid", "short"),
    [
        ("synth-h5_kv1_d128_ps16-03-b064-long", "synth-03-b064-long"),
        ("captured-llama4-scout-tp8-91", "captured-llama4-scout-tp8-91"),
        ("69ec7197-791c-419a-ae93-a3d2f0d49fd0", "69ec7197"),
        ("synth-0123456789ab", "synth-0123456789ab"),
    ],
)
def test_short_uuids(uuid, short):
    assert readme.short_uuid(uuid, PAGED) == short


def test_a_broken_trace_file_is_named(repository):
    path = repository.traces / "evenkv" / "gqa_paged" / f"{PAGED}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(EvenkvError, match=f"{PAGED}.jsonl, line 1"):
        readme.filed_traces(repository)
    assert load_traces(repository.traces / "none.jsonl") == []
