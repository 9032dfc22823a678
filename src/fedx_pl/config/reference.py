"""All keys in words: what ``fedx-pl train --help`` lists."""

from fedx_pl import methods
from fedx_pl.config import compose as configuration
from fedx_pl.config.registry import METHOD, find
from fedx_pl.config.schema import all_keys
from fedx_pl.errors import UserError
from fedx_pl.methods.parameters import hyper_parameters


def key_reference(method_name: str = "") -> str:
    """All groups, choices and keys with defaults and help, from the schema.

    Args:
        method_name: a method whose keys to list as well, if it is not built in.
    """
    lines = ["groups (group=choice):"]
    for group in configuration.GROUPS:
        own = ", or package.module:Class" if group == "method" else ""
        auto = ", auto" if group == "profile" else ""
        lines.append(f"  {group}={' | '.join(configuration.choices(group))}{auto}{own}")
    lines += ["  fedx=true | false", ""]
    lines += ["keys (key=value) and the paper's defaults; without a GPU, profile=cpu has others:"]
    lines += [_key_line(key, default, text) for key, default, text in all_keys()]
    listed = dict(methods.BUILT_IN)
    try:
        listed |= {method_name: find(METHOD, method_name)} if method_name else {}
    except UserError as error:  # The rest of the help is still worth reading.
        lines += ["", f"error: {error}"]
    for name, method in listed.items():
        lines += ["", f"keys of method={name}:"]
        for key, (_, default, text) in hyper_parameters(method).items():
            lines.append(_key_line(f"method.{key}", default, text))
    return "\n".join(lines)


def _key_line(key: str, default: object, text: str) -> str:
    value = str(default).lower() if isinstance(default, bool) else str(default)
    return f"  {f'{key}={value}':<32} {text}"
