"""The best play of the game of guessing a number."""


def optimal_mean_guesses(size: int) -> float:
    """Mean number of guesses of binary search over all secrets from 1 to `size`."""
    # level d of the search tree has 2**(d - 1) numbers, each of which takes d guesses
    return sum((number + 1).bit_length() for number in range(size)) / size
