"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """A mistake in the input: shown as one line, exit code 2, no traceback unless ``--debug``.

    The message names the key, the value and what to type instead.
    """
