"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """A mistake in the input: shown as one line, exit code 2, no traceback unless ``--debug``.

    The message names the key, the value and what to type instead.
    """


def require(key: str, value: object, possible: bool, instead: str) -> None:
    """Raises a `UserError` for ``key=value`` unless it is possible.

    Args:
        key: as typed on the command line.
        value: that was given.
        possible: the check; write it so that NaN fails.
        instead: what to type.
    """
    if not possible:
        raise UserError(f"{key}={value} is not possible; type {instead}")
