"""Writes the features of many images as a table."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedx_pl.errors import UserError, install_hint
from fedx_pl.files import write_atomically


def write_table(file: Path, paths: Sequence[str], features: Tensor) -> None:
    """Paths and features, as npz (arrays ``path`` and ``embedding``) or as parquet (columns of the same names)."""
    array, stream = features.cpu().numpy(), io.BytesIO()
    if file.suffix == ".npz":
        np.savez(stream, path=np.array(paths), embedding=array)
        write_atomically(file, stream.getvalue())
        return
    if file.suffix != ".parquet":
        raise UserError(f"-o {file}: type a name that ends in .npz or .parquet")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        needed = install_hint("tables")
        raise UserError(f"-o {file} needs pyarrow; type -o {file.with_suffix('.npz')}, or first {needed}") from error
    flat = pyarrow.array(array.reshape(-1))
    table = {"path": list(paths), "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])}
    pyarrow.parquet.write_table(pyarrow.table(table), stream)
    write_atomically(file, stream.getvalue())
