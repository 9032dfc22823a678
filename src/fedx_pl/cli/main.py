"""The command ``fedx-pl``: runs what was typed, and turns errors into one line and an exit code."""

import errno
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from click.exceptions import Exit, NoArgsIsHelpError

from fedx_pl.cli.commands import fedx_pl
from fedx_pl.cli.stopping import Stopped
from fedx_pl.config.renamed import refuse_renamed
from fedx_pl.errors import UserError, first_line, for_terminal, has_controls, printable, short

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
SMALLER = (
    "optim.batch_size, backbone.width, method.hidden_dim, data.image_size, augment.size, "
    "augment.pad or data.limit"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: what was typed after ``fedx-pl``; ``sys.argv`` unless given.

    Returns:
        The exit code: 2 for a mistake that the user can fix, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _announced_torch():
            return _run(arguments)
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        message = _message(error)
        if "--debug" in arguments or not message:
            raise
        print(f"error: {printable(message)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(for_terminal(f"\ninterrupted; {_how_to_resume(arguments)}"), file=sys.stderr)
        return EXIT_INTERRUPTED
    except Stopped as signal:
        print(for_terminal(f"\nstopped by {signal}; {_how_to_resume(arguments)}"), file=sys.stderr)
        return 0


def _run(arguments: list[str]) -> int:
    if unprintable := next((word for word in arguments if has_controls(word)), ""):
        raise UserError(
            f"{short(repr(unprintable))} holds a character that cannot be printed; type it without"
        )
    try:
        with fedx_pl.make_context("fedx-pl", list(arguments), obj=arguments) as context:
            return int(fedx_pl.invoke(context) or 0)
    except NoArgsIsHelpError as error:
        print(error.format_message())
        return EXIT_USER_ERROR
    except click.UsageError as error:
        raise _explained(error) from error
    except Exit as end:
        return end.exit_code


class _Announcement:
    """Says that torch is being loaded when something imports it, since it takes seconds."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "torch":
            print("loading PyTorch ...", file=sys.stderr, flush=True)


@contextmanager
def _announced_torch() -> Iterator[None]:
    finder = _Announcement()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _explained(error: click.UsageError) -> UserError:
    """The message of click with where to look, or with the new name of an old word."""
    command = error.ctx.command_path if error.ctx else "fedx-pl"
    if isinstance(error, click.NoSuchCommand):
        refuse_renamed(f"{command} {error.command_name}")
    if isinstance(error, click.NoSuchOption):
        refuse_renamed(f"{command} {error.option_name}")
    message = " ".join(error.format_message().split()).rstrip(".")
    see = f"{' See' if message.endswith('?') else '; see'} {command} --help"
    return UserError(f"{message[:1].lower()}{message[1:]}{see}")


def _message(error: Exception) -> str:
    """The message for an error that the user can fix; empty for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space, then run the same command to resume"
        return f"{error}; {advice if full else '--debug shows where'}"
    if not _lacks_memory(error):
        return ""
    reason = short(first_line(error))
    return f"not enough memory ({reason}); a smaller {SMALLER} needs less"


def _lacks_memory(error: Exception) -> bool:
    """Whether the system or torch found too little memory, on the CPU or a GPU."""
    words = (
        "out of memory",
        "can't allocate memory",
        "not enough memory",
        "alloc_cpu",
        "size calculation overflowed",
    )
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _how_to_resume(arguments: Sequence[str]) -> str:
    return f"run the same command again to resume: {shlex.join(['fedx-pl', *arguments])}"
