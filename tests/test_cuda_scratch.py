"""Which launch of evenkv_cuda gets which scratch: scratch.cuh on a CPU, with a stand-in for the runtime."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evenkv.library.toolchain import find_cxx
from evenkv.paths import find_repository

SOURCES = find_repository().kernels / "evenkv_cuda"
RUNTIME = Path(__file__).with_name("host_runtime")
CAPTURE = 77

Pair = tuple[int, int]  # addresses of partials and counters
Get = Callable[..., Pair]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("scratch") / "scratch.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{RUNTIME}", f"-I{SOURCES}"]
    subprocess.run(
        [str(find_cxx()), *flags, "-x", "c++", str(RUNTIME / "scratch.cpp"), "-o", str(library)],
        check=True,
        timeout=120,
    )
    return library


@pytest.fixture
def library(built: Path, tmp_path: Path) -> ctypes.CDLL:
    """A copy of its own, without scratch; stream n has the id 100 + n and does not capture."""
    copy = tmp_path / "scratch.so"
    copy.write_bytes(built.read_bytes())
    loaded = ctypes.CDLL(str(copy))
    loaded.get.restype = loaded.fill.restype = ctypes.c_char_p
    for stream in range(16):
        loaded.set_stream(stream, ctypes.c_uint64(100 + stream), ctypes.c_uint64(0))
    return loaded


@pytest.fixture
def get(library: ctypes.CDLL) -> Get:
    def call(stream: int, size: int = 100, device: int = 0) -> Pair:
        out = (ctypes.c_void_p * 2)()
        error = library.get(
            device, ctypes.c_uint64(stream), ctypes.c_uint64(4 * size), ctypes.c_uint64(size), out
        )
        if error is not None:
            raise MemoryError(error.decode())
        assert out[0] and out[1]
        return out[0], out[1]

    return call


def _set(library: ctypes.CDLL, stream: int, number: int, capture: int = 0) -> None:
    library.set_stream(stream, ctypes.c_uint64(number), ctypes.c_uint64(capture))


def test_each_stream_of_each_device_keeps_its_own(get: Get) -> None:
    places = [(stream, device) for stream in (0, 1, 2, 5) for device in (0, 1, 7)]
    first = {place: get(place[0], device=place[1]) for place in places}
    assert len(set(first.values())) == len(places)
    for place in (*places, *reversed(places)):
        for _ in range(2):
            assert get(place[0], device=place[1]) == first[place]


def test_a_new_stream_with_an_old_handle_gets_its_own(library: ctypes.CDLL, get: Get) -> None:
    before = get(3)
    _set(library, 3, 500)
    after = get(3)
    assert after != before
    _set(library, 3, 103)
    assert get(3) == before


def test_a_capture_gets_its_own_for_each_stream(library: ctypes.CDLL, get: Get) -> None:
    eager = {stream: get(stream) for stream in (1, 2)}
    for stream in (1, 2):
        _set(library, stream, 100 + stream, CAPTURE)
    captured = {stream: get(stream) for stream in (1, 2)}
    assert [get(stream) for stream in (1, 2)] == list(captured.values())
    for stream in (1, 2):
        _set(library, stream, 100 + stream, CAPTURE + 1)
    again = {stream: get(stream) for stream in (1, 2)}
    assert len({*eager.values(), *captured.values(), *again.values()}) == 6
    for stream in (1, 2):
        _set(library, stream, 100 + stream)
    assert {stream: get(stream) for stream in (1, 2)} == eager
    assert library.bad_questions() == 0, "a stream that captures was asked for its id"


def test_a_larger_one_replaces_a_smaller_one_for_good(get: Get) -> None:
    small, other = get(1), get(2)
    large = get(1, size=1000)
    assert large != small
    assert get(1) == large
    assert get(2) == other
    assert get(1) == large
    assert get(1, size=1000) == large


def test_an_allocation_that_fails_is_said_and_leaves_what_was(library: ctypes.CDLL, get: Get) -> None:
    for after, what in ((1, "allocating scratch: no memory"), (2, "allocating counters: no memory")):
        library.fail_allocation(after)
        with pytest.raises(MemoryError, match=what):
            get(1)
    assert library.fill(1) is None
    small = get(1)
    library.fail_allocation(1)
    with pytest.raises(MemoryError, match="allocating scratch"):
        get(1, size=1000)
    assert get(1) == small


def test_fill_reaches_what_every_later_launch_gets(library: ctypes.CDLL, get: Get) -> None:
    places = [(stream, device) for stream in (1, 2) for device in (0, 1)]
    for stream, device in places:
        get(stream, device=device)
    get(2, size=300)
    assert library.fill(0xA5) is None
    for stream, device in places:
        partials, counters = get(stream, device=device)
        assert ctypes.string_at(partials, 400) == b"\xa5" * 400
        assert ctypes.string_at(counters, 400) == b"\0" * 400


def test_threads_on_streams_of_their_own(get: Get) -> None:
    got: dict[int, set[Pair]] = {stream: set() for stream in range(1, 7)}

    def launch(stream: int) -> None:
        for _ in range(2000):
            got[stream].add(get(stream))

    threads = [threading.Thread(target=launch, args=(stream,)) for stream in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(pairs) for pairs in got.values()] == [1] * len(got)
    assert len(set.union(*got.values())) == len(got)
