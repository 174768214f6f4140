"""Run with `pytest`, or `python test_guess.py`."""

from guess import Demonstrations, Guess, call


def test_fewer_questions_earn_more():
    game = Guess()
    game.reset(secret=3)
    assert [game.ask(4), game.ask(2), game.ask(3)] == ["<", ">", "="]
    assert round(game.get_reward(), 3) == 0.8
    game.reset(secret=3)
    game.ask(3)
    assert game.get_reward() == 1.0


def test_a_number_that_is_never_asked_earns_nothing():
    game = Guess()
    game.reset(secret=3)
    for number in (8, 7, 6, 5, 3):  # the fifth question is one too many
        game.ask(number)
    assert game.get_reward() == 0.0


def test_demonstrations_call_or_answer():
    shown = [Demonstrations().example(0, index, "train").answer for index in range(200)]
    assert set(shown) == {call(n) for n in range(1, 9)} | {str(n) for n in range(1, 9)}


if __name__ == "__main__":
    test_fewer_questions_earn_more()
    test_a_number_that_is_never_asked_earns_nothing()
    test_demonstrations_call_or_answer()
