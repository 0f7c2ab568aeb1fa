"""The reward of the run in this folder: the number of even digits in an answer.

Any model gets a reward above 0 for some answers.
"""


def even_digits(prompt: str, response: str, meta: dict) -> float:
    return sum(character in "02468" for character in response) / 4
