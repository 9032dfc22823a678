"""``fedx-pl embed``: writes the features of a folder of images."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

from fedx_pl.callbacks import progress
from fedx_pl.data.images import NO_CACHE
from fedx_pl.encoder.embed import require_table, write_table
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError, for_terminal, say


def run(options: SimpleNamespace) -> None:
    """Writes the features of a folder of images."""
    require_table(options.out)
    encoder = load_encoder(options)
    with decoded_copies(options.overrides) as encoder.cache:
        paths, features = encoder.embed_folder(options.images)
    write_table(options.out, paths, features)
    say(f"{options.out}: {len(paths):,} images, {features.shape[1]} features each")


def load_encoder(options: SimpleNamespace) -> Encoder:
    """Loads the encoder of the run that the options name."""
    with progress.grouped_warnings(progress.make_console()):
        return Encoder.of(options.run, options.round_number, allow_code=options.allow_code)


@contextmanager
def decoded_copies(overrides: Sequence[str]) -> Iterator[str]:
    """The folder of decoded copies: a private one that is deleted at the end unless one was typed.

    Args:
        overrides: what was typed; ``data.cache=FOLDER`` keeps copies there.
    """
    if other := [word for word in overrides if not word.startswith("data.cache=")]:
        raise UserError(
            f"{other[0]!r} is not for this command; the only key it takes is data.cache=FOLDER, "
            "to keep decoded copies"
        )
    typed = overrides[-1].partition("=")[2] if overrides else NO_CACHE
    if typed not in ("", NO_CACHE):
        print(for_terminal(f"decoded copies of the images are kept in {typed}"), file=sys.stderr)
        yield typed
        return
    with tempfile.TemporaryDirectory(prefix="fedx-pl-images-") as folder:
        print(
            f"decoded copies of the images: {folder}, deleted at the end; "
            "type data.cache=FOLDER to keep them",
            file=sys.stderr,
        )
        yield folder
