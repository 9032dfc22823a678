"""The command ``fedx-pl``. Each command has a module of its name with a function `run`.

It is imported only to run it: with torch and Lightning behind it, it takes seconds to load, and ``--help`` should not.
"""

import errno
import importlib
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fedx_pl import __version__
from fedx_pl.cli.parser import EXIT_USER_ERROR, make_parser
from fedx_pl.cli.stopping import Stopped
from fedx_pl.errors import (
    MAX_SHOWN,
    UserError,
    did_you_mean,
    for_terminal,
    has_controls,
    printable,
    short,
)

EXIT_INTERRUPTED = 130
SMALLER = "optim.batch_size, backbone.width, method.hidden_dim, data.image_size, augment.size, augment.pad and data.limit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 2 for a mistake the user can mend."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(arguments)
    if unprintable := next((word for word in arguments if has_controls(word)), ""):
        parser.error(
            f"{short(repr(unprintable))} holds a character that cannot be printed; type it without"
        )
    options, more = parser.parse_known_args(
        arguments
    )  # Overrides may stand before and after flags.
    if options.version:
        print(_versions())
        return 0
    if options.command is None:
        parser.print_help()
        return EXIT_USER_ERROR
    if flags := [word for word in more if word.startswith("-")]:
        known = [flag for action in options.parser._actions for flag in action.option_strings]
        options.parser.error(f"there is no option {flags[0]}{did_you_mean(flags[0], known)}")
    if more and not any(action.dest == "overrides" for action in options.parser._actions):
        options.parser.error(f"{more[0]!r} is one word too many")
    options.overrides += more
    try:
        command = importlib.import_module(f"fedx_pl.cli.{options.command}")
        return int(command.run(options) or 0)
    except UserError as error:
        if options.debug:
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (MemoryError, RuntimeError) as error:
        if options.debug or not _lacks_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0][:MAX_SHOWN]
        print(
            f"error: not enough memory ({reason or 'Python'}); {SMALLER} need less if smaller",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    except OSError as error:
        if options.debug:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = (
            "free some space, then run the same command to go on" if full else "--debug shows where"
        )
        print(f"error: {printable(str(error))}; {advice}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(for_terminal(f"\ninterrupted; {_how_to_go_on(arguments)}"), file=sys.stderr)
        return EXIT_INTERRUPTED
    except Stopped as signal:
        print(for_terminal(f"\nstopped by {signal}; {_how_to_go_on(arguments)}"), file=sys.stderr)
        return 0


def _lacks_memory(error: Exception) -> bool:
    """Whether an error is the system's or torch's word for memory that is not there, on the CPU or a GPU."""
    words = (
        "out of memory",
        "can't allocate memory",
        "not enough memory",
        "alloc_cpu",
        "size calculation overflowed",
    )
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _how_to_go_on(arguments: Sequence[str]) -> str:
    words = shlex.join(["fedx-pl", *arguments])
    return f"the same command goes on after the last finished client: {words}"


def _versions() -> str:
    """What a bug report should begin with; read from the packages' metadata, not by importing them."""
    found = [f"fedx-pl {__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "pytorch-lightning"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)
