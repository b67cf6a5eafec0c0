"""Errors that are meant for users."""


class UserError(Exception):
    """A mistake that the user can mend: printed as one line, exit status 1, no traceback."""
