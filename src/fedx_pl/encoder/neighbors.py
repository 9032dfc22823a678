"""Finds the images that are most like one, and shows them on one HTML page."""

import base64
import html
import io
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from fedx_pl import palette
from fedx_pl.data.images import ValueRange
from fedx_pl.data.sources.folder import list_files
from fedx_pl.data.sources.image_files import decode_file
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError, readable, say
from fedx_pl.files import write_atomically

_THUMBNAIL = 160  # pixels
_STYLE = f"""
body {{font: 16px sans-serif; margin: 2em; max-width: 1100px}}
figure {{display: inline-block; margin: 8px; width: 168px; vertical-align: top}}
img {{width: 160px; height: 160px; object-fit: cover; border-radius: 4px}}
figcaption {{font-size: 12px; overflow-wrap: anywhere; color: {palette.GRAY}}}
.query img {{outline: 4px solid {palette.BLUE}}}
"""


def find(encoder: Encoder, query: Path, folder: Path, count: int = 12) -> list[tuple[str, float]]:
    """Finds the images of a folder that are most like one, the most similar first.

    Args:
        encoder: that compares them.
        query: an image.
        folder: where to look.
        count: how many.

    Returns:
        Paths relative to the folder and cosine similarities.
    """
    if encoder.value_range is None:
        encoder.settle_range([(folder, list_files(folder, say)), (query.parent, [query.name])])
    try:
        pixels = decode_file(
            str(query), encoder.side, encoder.channels == 1, value_range=encoder.value_range or ()
        )
    except Exception as error:  # Decoders fed with foreign bytes fail in any way they like.
        raise UserError(f"{query} cannot be read as an image ({error})") from error
    paths, features = encoder.embed_folder(folder)
    like = F.cosine_similarity(encoder.embed(pixels[None]), features)
    best = torch.topk(like, min(count, len(paths)))
    return [
        (paths[i], value)
        for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def contact_sheet(
    file: Path,
    query: Path,
    folder: Path,
    found: list[tuple[str, float]],
    value_range: ValueRange | None = None,
) -> None:
    """Writes a page with the query and its neighbors, the pictures inside it.

    Args:
        file: the page.
        query: the image that was looked for.
        folder: where it was looked for.
        found: what `find` returned.
        value_range: of the encoder.
    """
    cells = [_figure(query, str(query), value_range, kind="query")]
    cells += [_figure(folder / path, f"{value:.3f} {path}", value_range) for path, value in found]
    title = f"neighbors of {html.escape(readable(query.name))}"
    page = (
        f"<!doctype html><html lang='en'><meta "
        f"charset='utf-8'><title>{title}</title><style>{_STYLE}</style><h1>Nearest "
        f"neighbors</h1><p>Cosine similarity of the encoder's "
        f"features.</p>{''.join(cells)}</html>"
    )
    write_atomically(file, page.encode())


def _figure(image: Path, caption: str, value_range: ValueRange | None, kind: str = "") -> str:
    small = decode_file(str(image), _THUMBNAIL, grayscale=False, value_range=value_range or ())
    stream = io.BytesIO()
    Image.fromarray(small).save(stream, "JPEG", quality=85)
    source = base64.b64encode(stream.getvalue()).decode()
    return (
        f"<figure class='{kind}'><img alt='' src='data:image/jpeg;base64,{source}'>"
        f"<figcaption>{html.escape(readable(caption))}</figcaption></figure>"
    )
