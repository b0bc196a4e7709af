"""A run is marked dead only when its process surely is; SIGTERM is noticed and passed on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dspark.run_lifecycle import (
    BOOT,
    HOST,
    NAMESPACE,
    PID,
    START,
    Sigterm,
    is_gone,
    process_start,
    process_tags,
    status_for,
)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_living_process_is_not_gone(child: "subprocess.Popen[bytes]") -> None:
    assert not is_gone(process_tags(os.getpid()))
    assert not is_gone(process_tags(child.pid))


@pytest.mark.parametrize("collected", [False, True], ids=["zombie", "collected"])
def test_a_killed_process_is_gone(child: "subprocess.Popen[bytes]", collected: bool) -> None:
    tags = process_tags(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the process table
    if collected:
        child.wait()
    assert process_start(child.pid) is None
    assert is_gone(tags)


def test_another_process_with_the_same_id_does_not_count_as_living() -> None:
    assert is_gone(process_tags(os.getpid()) | {START: "1"})


def test_nothing_survives_a_restart_of_the_host() -> None:
    assert is_gone(process_tags(os.getpid()) | {BOOT: "an earlier boot"})


@pytest.mark.parametrize("unseen", [{HOST: "another host"}, {NAMESPACE: "pid:[1]"}], ids=["host", "container"])
def test_a_process_that_cannot_be_seen_from_here_is_not_called_gone(unseen: dict[str, str]) -> None:
    assert not is_gone(process_tags(os.getpid()) | {PID: "1", START: "1"} | unseen)


def test_a_run_without_process_tags_is_left_alone() -> None:
    assert not is_gone({"mlflow.runName": "from elsewhere"})


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """The system's own handling, whatever a library that other tests loaded has put in its place."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
def test_sigterm_is_noted_and_ends_the_process_with_143() -> None:
    with pytest.raises(SystemExit) as caught, Sigterm() as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert sigterm.received


def test_sigterm_reaches_the_handler_that_was_there_before_once() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        with Sigterm() as sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert sigterm.received
        assert calls == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(calls) == 2  # restored
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_set_inside_the_block_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def later(*_: object) -> None: ...

    try:
        with Sigterm():
            signal.signal(signal.SIGTERM, later)
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_no_handler_is_set() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def use() -> None:
        with Sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(
    ("error", "sigterm", "status"),
    [
        (None, False, "FINISHED"),
        (None, True, "KILLED"),
        (ValueError("x"), False, "FAILED"),
        (ValueError("x"), True, "KILLED"),
        (KeyboardInterrupt(), False, "KILLED"),
        (SystemExit(0), False, "FINISHED"),
        (SystemExit(), False, "FINISHED"),
        (SystemExit(1), False, "FAILED"),
        (SystemExit("message"), False, "FAILED"),
        (SystemExit(15), False, "KILLED"),
        (SystemExit(143), False, "KILLED"),
    ],
)
def test_status_follows_from_how_the_block_was_left(error: BaseException | None, sigterm: bool, status: str) -> None:
    assert status_for(error, sigterm=sigterm) == status
