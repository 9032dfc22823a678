"""Completion scripts for bash, zsh and fish: ``fedx-pl completion SHELL`` prints one.

A script holds all words, taken from the parser and the schema when it is made, so that a TAB starts no Python. What is
typed last decides what is offered::

    -...        the options of the command
    data=ci     choices of a group, true and false; files for any other key
    federation. the keys of a section
    anything    commands, groups and sections; files where a command wants some
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from fedx_pl import __version__, methods
from fedx_pl.cli.parser import SHELLS, make_parser
from fedx_pl.config import compose as configuration
from fedx_pl.config.schema import all_keys
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.experiments.definition import definitions_folder
from fedx_pl.methods.parameters import hyper_parameters
from fedx_pl.mixins import MIXINS

# The sections whose keys a command takes: empty for all.
SECTIONS: dict[str, tuple[str, ...]] = {
    "train": (), "federate server": (), "data": ("data",), "evaluate": ("evaluation", "run"), "sweep": ("data", "run"),
    "federate client": ("data", "run", "privacy", "site"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Command:
    """What may follow a command."""

    path: str  # e.g. "train", "federate server"; empty: fedx-pl itself
    help: str
    options: dict[str, str]  # with their help
    valued: list[str]  # options that are followed by a value
    words: list[str] = field(default_factory=list)  # what else may be typed
    files: int = 0  # files or folders that come first


def run(options: argparse.Namespace) -> None:
    """Prints a completion script."""
    print(script(options.shell), end="")


def script(shell: str) -> str:
    """The script for a shell.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.
    """
    made = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()
    first = "#compdef fedx-pl\n" if shell == "zsh" else ""
    return f"{first}# Completion of fedx-pl {__version__} for {shell}; made by: fedx-pl completion {shell}\n{made}"


def keys() -> dict[str, str]:
    """All keys with their help; methods' own ones, too."""
    found = {key: text for key, _, text in all_keys()}
    for method in methods.BUILT_IN.values():
        found |= {f"method.{key}": text for key, (_, _, text) in hyper_parameters(method).items()}
    return found


def values() -> list[str]:
    """All ``group=choice``, and ``key=true`` and ``key=false`` of what is one of the two."""
    found = [
        f"{group}={choice}"
        for group in configuration.GROUPS
        for choice in configuration.choices(group)
    ]
    pairs = [
        (data, method)
        for data in configuration.choices("data")
        for method in configuration.choices("method")
    ]
    found += [
        "profile=auto",
        *(f"experiment={d}-{m}{fedx}" for d, m in pairs for fedx in ("", "-fedx")),
    ]
    switches = [*MIXINS, *(key for key, default, _ in all_keys() if isinstance(default, bool))]
    return found + [f"{key}={value}" for key in switches for value in ("true", "false")]


def commands(
    parser: argparse.ArgumentParser | None = None, path: str = "", text: str = ""
) -> Iterator[Command]:
    """`fedx-pl` itself, then each command, its own kinds after it."""
    parser = parser or make_parser()
    options = {
        flag: action.help or "" for action in parser._actions for flag in action.option_strings
    }
    valued = [
        flag for action in parser._actions for flag in action.option_strings if action.nargs != 0
    ]
    below = next(
        (one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None
    )
    if below is not None:
        yield Command(
            path=path, help=text, options=options, valued=valued, words=list(below.choices)
        )
        helps = {str(one.dest): one.help or "" for one in below._choices_actions}
        for name, child in below.choices.items():
            yield from commands(child, f"{path} {name}".strip(), helps[name])
        return
    arguments = [action for action in parser._actions if not action.option_strings]
    files = sum(action.type is Path for action in arguments)
    yield Command(
        path=path, help=text, options=options, valued=valued, words=_words(path), files=files
    )


def _words(path: str) -> list[str]:
    """What a command takes beside options and files."""
    own = {
        "data": configuration.choices("data"),
        "evaluate": list(EVALUATIONS),
        "sweep": ["profile=", *sorted(file.stem for file in definitions_folder().glob("*.yaml"))],
        "completion": list(SHELLS),
        "embed": ["data.cache="],
        "neighbours": ["data.cache="],
    }.get(path, [])
    if path not in SECTIONS:
        return own
    everything = [f"{name}=" for name in ("experiment", *configuration.GROUPS, *MIXINS)]
    for key in keys():
        section, dot, _ = key.partition(".")
        everything.append(section + (dot or "="))
    wanted = [f"{section}." for section in SECTIONS[path]]
    return [*own, *(word for word in dict.fromkeys(everything) if not wanted or word in wanted)]


def _bash() -> str:
    return _filled(BASH, "words", '"{}"')


def _zsh() -> str:
    return _filled(ZSH, "expected", "({})")  # There, `words` is what has been typed.


def _fish() -> str:
    lines = []
    for one in commands():
        seen = [f"__fish_seen_subcommand_from {word}" for word in one.path.split()]
        kinds = {
            "": "__fish_use_subcommand",
            "federate": "not __fish_seen_subcommand_from keys server client",
        }
        when = "; and ".join([*seen, *([kinds[one.path]] if one.path in kinds else [])])
        start = f"complete -c fedx-pl -n '{when}'"
        if one.path:
            above, _, name = one.path.rpartition(" ")
            where = (
                f"__fish_seen_subcommand_from {above}; and {kinds[above]}" if above else kinds[""]
            )
            lines.append(f"complete -c fedx-pl -f -n '{where}' -a {name} -d {_quoted(one.help)}")
        for flag, text in one.options.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(f"{start} {kind}{' -r' if flag in one.valued else ''} -d {_quoted(text)}")
        if (
            one.path
            and one.path not in kinds
            and (words := [w for w in one.words if not w.endswith((".", "="))])
        ):
            lines.append(f"{start} -a '{' '.join(words)}'")
    some = " ".join(dict.fromkeys(path.split()[-1] for path in SECTIONS))
    start = f"complete -c fedx-pl -n '__fish_seen_subcommand_from {some}'"
    lines += [f"{start} -a {value}" for value in values()]
    lines += [f"{start} -a {key}= -d {_quoted(text)}" for key, text in keys().items()]
    return "\n".join(lines) + "\n"


def _filled(template: str, expected: str, array: str) -> str:
    """A script with all words.

    Args:
        template: of the script.
        expected: its variable of the words that may follow a command.
        array: how the shell writes several words.
    """
    cases = []
    for one in sorted(commands(), key=lambda one: -len(one.path.split())):  # The longest first.
        begins = (
            f"{one.path} " if one.path else ""
        )  # The words after ``fedx-pl``, each followed by a blank.
        lists = {expected: one.words, "options": one.options, "valued": one.valued}
        numbers = {"files": one.files, "skip": len(one.path.split()) + 1}
        parts = [f"{name}={array.format(' '.join(words))}" for name, words in lists.items()]
        parts += [f"{name}={number}" for name, number in numbers.items()]
        cases.append(f'        "{begins}"*) {"; ".join(parts)} ;;\n')
    known = "\n".join(f"{key}=" for key in keys())
    return Template(template).substitute(
        keys=known, values="\n".join(values()), cases="".join(cases)
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


BASH = """\
_fedx_pl_keys="$keys"
_fedx_pl_values="$values"

_fedx_pl() {
    local line=$${COMP_LINE:0:COMP_POINT} words options valued files skip candidates argument last=-
    local word=$${line##*[[:space:]]}  # As a whole: bash cuts its own COMP_WORDS at each '='.
    local -a before
    read -ra before <<< "$${line%"$$word"}"
    case "$${before[*]:1} " in
$cases    esac
    COMPREPLY=()
    for argument in "$${before[@]:skip}"; do
        [[ $$argument == -* || " $$valued " == *" $$last "* ]] || ((files--))
        last=$$argument
    done
    # No candidates: bash offers files, also behind '='.
    [[ " $$valued " == *" $$last "* ]] && return
    case $$word in
        -*) candidates=$$options ;;
        *=*) candidates=$$_fedx_pl_values ;;
        *) ((files > 0)) && return; [[ $$word == *.* ]] && candidates=$$_fedx_pl_keys || candidates=$$words ;;
    esac
    COMPREPLY=($$(compgen -W "$$candidates" -- "$$word"))
    if [[ $$word == *=* && $$COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("$${COMPREPLY[@]#*=}")  # What stands before '=' is another word to bash and stays.
    fi
    if [[ $${#COMPREPLY[@]} == 1 && $$COMPREPLY == *[=.] ]]; then
        compopt -o nospace 2> /dev/null
    fi
}

complete -o default -F _fedx_pl fedx-pl
"""

ZSH = """\
typeset -ga _fedx_pl_keys=($keys)
typeset -ga _fedx_pl_values=($values)

_fedx_pl() {
    local word=$$words[CURRENT] argument last
    local -a before=("$${(@)words[2,CURRENT-1]}") expected options valued
    local -i files skip
    case "$$before " in
$cases    esac
    for argument in "$${(@)before[skip,-1]}"; do
        [[ $$argument == -* ]] || (( $${valued[(Ie)$$last]} )) || files+=-1
        last=$$argument
    done
    if (( $${valued[(Ie)$$last]} )); then
        _files
        return
    fi
    case $$word in
        -*) compadd -- $$options ;;
        *=*) compadd -- $$_fedx_pl_values || { compset -P '*='; _files } ;;
        *)
            (( files > 0 )) && { _files; return }
            [[ $$word == *.* ]] && compadd -S '' -- $$_fedx_pl_keys && return
            compadd -S '' -- $${(M)expected:#*[=.]}
            compadd -- $${expected:#*[=.]}
            (( $$#expected )) || _files
            ;;
    esac
}

# As a file _fedx-pl of $$fpath it is called, or it was sourced.
if [[ $$funcstack[1] == _fedx-pl ]]; then _fedx_pl "$$@"; else compdef _fedx_pl fedx-pl; fi
"""
