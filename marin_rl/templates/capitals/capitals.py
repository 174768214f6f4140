"""The share of an answer's letters that are capitals: measured, not rewarded."""


def share(example, completion):
    """Return the share; the configuration gives it the weight 0 in training."""
    letters = [character for character in completion if character.isalpha()]
    return {"capitals": sum(letter.isupper() for letter in letters) / max(1, len(letters))}
