"""Writes the features of many images as a table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedx_pl.errors import UserError, install_hint, readable
from fedx_pl.files import replacing, require_file


def require_table(file: Path) -> None:
    """Refuses a name that `write_table` cannot write to.

    Raises:
        UserError: it is not the name of a file, has another ending, or pyarrow is missing.
    """
    require_file(file)
    if file.suffix not in (".npz", ".parquet"):
        raise UserError(f"-o {file}: type a name that ends in .npz or .parquet")
    if file.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            instead = f"type -o {file.with_suffix('.npz')}, or first {install_hint('tables')}"
            raise UserError(f"-o {file} needs pyarrow; {instead}") from error


def write_table(file: Path, paths: Sequence[str], features: Tensor) -> None:
    """Writes ``path`` and ``embedding``, as arrays of an npz or columns of a parquet file.

    An earlier file is replaced when the new one is complete.
    """
    require_table(file)
    array = features.cpu().numpy()
    names = [readable(path) for path in paths]
    with replacing(file) as stream:
        if file.suffix == ".npz":
            np.savez(stream, path=np.array(names), embedding=array)
            return
        import pyarrow
        import pyarrow.parquet

        flat = pyarrow.array(array.reshape(-1))
        table = {
            "path": names,
            "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1]),
        }
        pyarrow.parquet.write_table(pyarrow.table(table), stream)
