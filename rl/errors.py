"""Errors that a user is meant to read: shown without a traceback by the command line."""


class UserError(ValueError):
    """Something the user can set right: the message gives the value, what was expected, and the remedy."""
