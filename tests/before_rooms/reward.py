"""The reward of the run in this folder: how many of an answer's characters are even digits. Any
model earns some.
"""


def even_digits(prompt: str, response: str, meta: dict) -> float:
    return sum(character in "02468" for character in response) / 4
