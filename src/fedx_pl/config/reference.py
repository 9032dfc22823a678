"""All groups and keys with their help: what ``fedx-pl train --help`` lists."""

from collections.abc import Iterator

from fedx_pl.config import compose as configuration
from fedx_pl.config.schema import all_keys, method_parameters
from fedx_pl.methods import BUILT_IN

Rows = list[tuple[str, str]]  # ``key=default`` and its help


def key_reference(method_name: str = "") -> Iterator[tuple[str, Rows]]:
    """Lists all groups, choices and keys with defaults and help, from the schema.

    Args:
        method_name: a method whose keys to list as well, if it is not built in.

    Yields:
        Titles, each with its rows.

    Raises:
        UserError: there is no such method.
    """
    names = dict.fromkeys([*BUILT_IN, *([method_name] if method_name else [])])
    parameters = {name: method_parameters(name).items() for name in names}
    more = {"method": ", or package.module:Class", "profile": ", auto"}
    groups = [
        (f"{group}={' | '.join(configuration.choices(group))}{more.get(group, '')}", "")
        for group in configuration.GROUPS
    ]
    yield "groups (group=choice)", [*groups, ("fedx=true | false", "")]
    keys = [_row(key, default, text) for key, default, text in all_keys()]
    yield "keys (key=value) and the paper's defaults; profile=cpu has others", keys
    for name, items in parameters.items():
        rows = [_row(f"method.{key}", default, text) for key, (_, default, text) in items]
        yield f"keys of method={name}", rows


def _row(key: str, default: object, text: str) -> tuple[str, str]:
    value = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{key}={value}", text
