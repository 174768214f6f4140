"""Phases: what is open is said, with counts and seconds, where nothing else was said for long."""

import threading

import pytest

from marin_rl import progress
from marin_rl.progress import Heartbeat, Phase, open_phase, phase, say, saying


@pytest.mark.parametrize(
    ("said_at", "expected"),
    [
        ((), [4.0, 8.0, 12.0]),  # silence of 4 s each
        ((3.0, 6.0, 9.0, 11.5), []),  # something else was said in time
        ((3.0,), [7.0, 11.0]),
    ],
)
def test_a_silent_phase_is_said_at_the_limit_and_a_talkative_one_never(
    monkeypatch, said_at, expected
):
    now, lines = 0.0, []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "_opened_at", 0.0)
    heartbeat = Heartbeat(lambda line: lines.append((now, line)), 4.0)
    counted = Phase("compiling programs")
    counted.total = 20
    for half_seconds in range(1, 25):
        now = half_seconds / 2
        counted.done += 1
        if now in said_at:
            heartbeat.say("something else")
        heartbeat.beat(counted, now)
    beats = [(at, line) for at, line in lines if line != "something else"]
    assert [at for at, _ in beats] == expected
    assert all(f"{int(2 * at)}/20 ({at:.0f} s)…" in line for at, line in beats)


def test_the_innermost_phase_is_said_and_the_outer_one_again_after_it():
    heard = []
    spoken = threading.Event()

    def listen(line: str) -> None:
        heard.append(line)
        spoken.set()

    def wait_for(name: str) -> None:
        while not (heard and heard[-1].startswith(name)):
            spoken.clear()
            assert spoken.wait(30), heard

    with saying(listen, silence_s=0.01), phase("outer"):
        wait_for("outer (")
        with phase("inner"):
            wait_for("inner (")
        wait_for("outer (")
        say("a line of its own")
        assert "a line of its own" in heard
    assert open_phase() is None


def test_without_a_listener_no_thread_is_started(capsys):
    before = {*threading.enumerate()}
    with phase("alone"):
        assert {*threading.enumerate()} <= before
    say("on standard error")
    assert capsys.readouterr().err == "on standard error\n"


def test_a_phase_ends_where_its_function_raises():
    @phase("failing")
    def fails() -> None:
        current = open_phase()
        assert current is not None
        assert current.line(current.began + 2.4) == "failing (2 s)"
        raise KeyError

    for _ in range(2):  # a decorated function opens a new one in each call
        with pytest.raises(KeyError):
            fails()
    assert open_phase() is None
