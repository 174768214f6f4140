"""Run with `pytest`, or `python test_rewards.py`."""

from types import SimpleNamespace

from rewards import score


def test_only_the_number_alone_is_right():
    example = SimpleNamespace(answer="7")
    assert score(example, " 7\n") == 1.0
    assert score(example, "it is 7") == 0.0
    assert score(example, "8") == 0.0
    assert score(example, "") == 0.0


if __name__ == "__main__":
    test_only_the_number_alone_is_right()
