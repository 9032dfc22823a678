"""``python -m fedx_pl`` is the command ``fedx-pl``."""

from fedx_pl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
