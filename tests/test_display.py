"""Terminal output, read back as text."""

import io
import time

import pytest
from rich.console import Console

from marin_rl.analysis.dialogues import BeforeAfter, PlayedEpisode, episodes_table
from marin_rl.display.live import RunDisplay, showing
from marin_rl.display.tables import (
    duration,
    fleet_table,
    query_result,
    rounds_table,
    size,
    sparkline,
)
from marin_rl.progress import ProgressEvent, listening, phase, publish


def text_of(renderable, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def test_episodes_of_two_rounds_stand_side_by_side() -> None:
    turns = ((False, "1-8"), (True, "5"), (False, "<"), (True, "[bold]2"))
    pair = (
        "2",
        PlayedEpisode(turns=turns[:2], reward=None),
        PlayedEpisode(turns=turns, reward=0.9),
    )
    shown = text_of(episodes_table(BeforeAfter(rounds=(0, 60), pairs=[pair])))
    assert "round 0" in shown
    assert "round 60" in shown
    assert "5  no reward" in shown
    assert "5 < [bold]2  reward 0.90" in shown
    assert shown.count("1-8") == 1, "the prompt stands once"


def test_a_server_of_an_adapter_shows_its_versions_and_their_base() -> None:
    one = {
        "server": "a", "url": "http://h:1/v1", "labels": {}, "queued": 0, "busy": 1, "slots": 8,
        "tokens_per_second": 12.5, "idle": 0.5, "beat_ago_s": 1.0, "model": "p@00002-ab",
        "adapters": ["p@00001-cd", "p@00002-ab"], "base_digest": "0123456789",
    }  # fmt: skip
    whole = one | {"adapters": None, "base_digest": None}
    table = fleet_table([one, whole])
    (_, _, serves, *_) = table.columns
    assert [str(cell) for cell in serves.cells] == [
        "p@00002-ab, p@00001-cd as adapters of 01234567", "p@00002-ab",
    ]  # fmt: skip


def test_a_round_in_progress_is_drawn_with_its_numbers():
    display = RunDisplay("demo", rounds=10)
    display.update(ProgressEvent(run_id="demo", stage="generate", round=3, done=5, total=16))
    display.update(
        ProgressEvent(run_id="demo", stage="evaluate", round=3, metrics={"eval/accuracy": 0.625})
    )
    display.update(ProgressEvent(run_id="demo", stage="round", round=3, metrics={"reward": 0.5}))
    shown = text_of(display.render())
    assert "4/10" in shown
    assert "62.5%" in shown
    assert "0.500" in shown


def test_a_result_that_is_too_wide_stands_row_below_row_and_no_word_is_broken() -> None:
    names = [f"clip_ratio/region_{index}" for index in range(6)]
    rows = [["arithmetic", 0.123456789, 3, "a b", None, "x"]] * 2
    wide = text_of(query_result(names, rows, 80), 80)
    assert "row 2 of 2" in wide
    assert all(name in wide for name in (*names, "arithmetic", "0.123457"))
    narrow = text_of(query_result(names[:2], [row[:2] for row in rows], 80), 80)
    assert "row 2" not in narrow
    assert all(name in narrow for name in (*names[:2], "arithmetic", "0.123457"))


def test_events_of_another_run_change_nothing():
    display = RunDisplay("demo", rounds=10)
    before = text_of(display.render())
    display.update(ProgressEvent(run_id="other", stage="round", round=9, metrics={"reward": 1.0}))
    assert text_of(display.render()) == before


def test_without_a_terminal_each_round_is_one_line():
    console = Console(file=io.StringIO(), width=120)
    with showing(RunDisplay("demo", rounds=2), console):
        for number in range(2):
            publish(
                ProgressEvent(run_id="demo", stage="round", round=number, metrics={"reward": 0.25})
            )
    lines = console.file.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["round", "0"], ["round", "1"]]


def test_without_a_terminal_long_stages_and_their_phases_are_said():
    console = Console(file=io.StringIO(), width=120)

    def wait_for(line: str) -> None:
        while not any(said.startswith(line) for said in console.file.getvalue().splitlines()):
            time.sleep(0.001)

    with showing(RunDisplay("demo", rounds=2), console, silence_s=0.01):
        wait_for("starting (")
        publish(ProgressEvent(run_id="demo", stage="generate", round=3, done=5, total=16))
        wait_for("round 3: generating 5/16 (")
        publish(ProgressEvent(run_id="demo", stage="train", round=3))
        wait_for("round 3: training (")
        with phase("compiling the training step"):
            wait_for("compiling the training step (")
    starts = [line.partition(" (")[0] for line in console.file.getvalue().splitlines()]
    assert list(dict.fromkeys(starts)) == [
        "starting", "round 3: generating 5/16", "round 3: training", "compiling the training step",
    ]  # fmt: skip


def test_a_listener_that_raises_is_removed_and_the_others_still_hear():
    heard = []

    def broken(event):
        raise RuntimeError("display fell over")

    event = ProgressEvent(run_id="demo", stage="start")
    with listening(broken), listening(heard.append):
        publish(event)
        publish(event)
    assert heard == [event, event]


def test_sparkline_spans_low_to_high_and_keeps_the_newest():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.0] * 50 + [1.0], width=3) == "▁▁█"


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.2, "4 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("n", "text"), [(12, "12 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")])
def test_sizes_have_decimal_units(n, text):
    assert size(n) == text


def test_many_rounds_are_thinned_but_the_first_and_last_stay():
    rows = [{"round": n, "reward": n / 100, "eval/accuracy": n / 100} for n in range(100)]
    shown = text_of(rounds_table(rows, "rounds", limit=5))
    cells = [line.split() for line in shown.splitlines()]
    numbers = [line[0] for line in cells if line and line[0].isdigit()]
    assert numbers[0] == "0"
    assert numbers[-1] == "99"
    assert len(numbers) == 5


def test_few_rounds_are_all_shown_and_many_only_where_they_were_evaluated():
    few = [{"round": 0, "eval/accuracy": 0.1}, {"round": 1, "reward": 0.3}]
    few += [{"round": 2, "eval/accuracy": 0.2}]
    many = [
        {"round": n, "reward": 0.1} | ({} if n % 2 else {"eval/accuracy": 0.1}) for n in range(30)
    ]

    def numbers(rows):
        lines = [line.split() for line in text_of(rounds_table(rows, "rounds")).splitlines()]
        return [int(line[0]) for line in lines if line and line[0].isdigit()]

    assert numbers(few) == [0, 1, 2]
    assert len(numbers(many)) == 12
    assert not [number for number in numbers(many) if number % 2]
