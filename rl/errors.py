"""Errors that a user is meant to read: shown without a traceback by the command line."""


class UserError(ValueError):
    """Something the user can set right: the message gives the value, what was expected, and the remedy."""


class UnusedSetting(ValueError):
    """A setting was given that has no effect beside the others. `name`: which."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


class FailedElsewhere(Exception):
    """Another rank could not do its part: this one leaves off as well. Never shown: the other rank's error is."""


class RankLost(RuntimeError):
    """Another rank ended, hangs, or fell out of step: this run cannot go on. The message names the rank, its host and process."""
