"""The reward: 1 for the right number alone, 0 for anything else."""


def score(example, completion):
    """Return the reward of a completion; `example` has `answer`, `messages` and `metadata`."""
    return float(completion.strip() == example.answer)
