"""Completion scripts for bash, zsh and fish: ``fedx-pl completion SHELL`` prints one.

A script holds all words, taken from the commands and the schema when it is made: a TAB that starts
Python and imports the schema would take seconds. The word at the cursor decides what is offered::

    -...        the options of the command
    data=ci     choices of a group, true and false; files for any other key
    federation. the keys of a section
    anything    commands, groups and sections; files where a command takes some
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from string import Template
from types import SimpleNamespace

import click

from fedx_pl import __version__, methods
from fedx_pl.cli.commands import SHELLS, fedx_pl
from fedx_pl.config import compose as configuration
from fedx_pl.config.schema import all_keys
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.experiments.definition import definitions_folder
from fedx_pl.methods.parameters import hyper_parameters
from fedx_pl.mixins import MIXINS

# The sections whose keys a command takes: empty for all.
SECTIONS: dict[str, tuple[str, ...]] = {
    "train": (),
    "federate server": (),
    "data": ("data",),
    "evaluate": ("evaluation", "run"),
    "sweep": ("data", "run"),
    "federate client": ("data", "run", "privacy", "site"),
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """The completions of a command."""

    path: str  # such as "train" or "federate server"; empty for fedx-pl itself
    help: str
    options: dict[str, str]  # with their help
    valued: list[str]  # options that are followed by a value
    words: list[str] = field(default_factory=list)  # what else may be typed
    files: int = 0  # how many files or folders come first


def run(options: SimpleNamespace) -> None:
    """Prints a completion script."""
    print(script(options.shell), end="")


def script(shell: str) -> str:
    """The script for a shell.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.
    """
    made = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()
    first = "#compdef fedx-pl\n" if shell == "zsh" else ""
    title = (
        f"# Completion of fedx-pl {__version__} for {shell}; made by: fedx-pl completion {shell}"
    )
    return f"{first}{title}\n{made}"


def keys() -> dict[str, str]:
    """All keys with their help, including those of the methods."""
    found = {key: text for key, _, text in all_keys()}
    for method in methods.BUILT_IN.values():
        found |= {f"method.{key}": text for key, (_, _, text) in hyper_parameters(method).items()}
    return found


def values() -> list[str]:
    """All ``group=choice``, and ``key=true`` and ``key=false`` of keys that are one of the two."""
    choices = {group: configuration.choices(group) for group in configuration.GROUPS}
    found = [f"{group}={choice}" for group, names in choices.items() for choice in names]
    found.append("profile=auto")
    for data in choices["data"]:
        for method in choices["method"]:
            found += [f"experiment={data}-{method}", f"experiment={data}-{method}-fedx"]
    switches = [*MIXINS, *(key for key, default, _ in all_keys() if isinstance(default, bool))]
    return found + [f"{key}={value}" for key in switches for value in ("true", "false")]


def commands(command: click.Command = fedx_pl, path: str = "") -> Iterator[Command]:
    """`fedx-pl` itself, then each command, followed by its own commands."""
    parameters = command.get_params(click.Context(command, help_option_names=["-h", "--help"]))
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    below = command.commands if isinstance(command, click.Group) else {}
    yield Command(
        path=path,
        help=command.get_short_help_str(limit=100),
        options={flag: option.help or "" for option in options for flag in option.opts},
        valued=[flag for option in options if not option.is_flag for flag in option.opts],
        words=list(below) or _words(path),
        files=sum(
            isinstance(parameter, click.Argument) and isinstance(parameter.type, click.Path)
            for parameter in parameters
        ),
    )
    for name, child in below.items():
        yield from commands(child, f"{path} {name}".strip())


def _words(path: str) -> list[str]:
    """The words that a command takes besides options and files."""
    names = {
        "data": configuration.choices("data"),
        "evaluate": list(EVALUATIONS),
        "sweep": ["profile=", *sorted(file.stem for file in definitions_folder().glob("*.yaml"))],
        "completion": list(SHELLS),
        "embed": ["data.cache="],
        "neighbors": ["data.cache="],
    }.get(path, [])
    if path not in SECTIONS:
        return names
    starts = [f"{name}=" for name in ("experiment", *configuration.GROUPS, *MIXINS)]
    for key in keys():
        section, dot, _ = key.partition(".")
        starts.append(section + (dot or "="))
    wanted = [f"{section}." for section in SECTIONS[path]]
    return [*names, *(start for start in dict.fromkeys(starts) if not wanted or start in wanted)]


def _bash() -> str:
    return _filled(BASH, "words", '"{}"')


def _zsh() -> str:
    return _filled(ZSH, "expected", "({})")  # There, `words` is what has been typed.


def _fish() -> str:
    lines = []
    kinds = {
        "": "__fish_use_subcommand",
        "federate": "not __fish_seen_subcommand_from keys server client",
    }
    for command in commands():
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.path.split()]
        when = "; and ".join([*seen, *([kinds[command.path]] if command.path in kinds else [])])
        start = f"complete -c fedx-pl -n '{when}'"
        if command.path:
            above, _, name = command.path.rpartition(" ")
            inside = f"__fish_seen_subcommand_from {above}; and " if above else ""
            where = f"{inside}{kinds[above]}"
            lines.append(
                f"complete -c fedx-pl -f -n '{where}' -a {name} -d {_quoted(command.help)}"
            )
        for flag, text in command.options.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            value = " -r" if flag in command.valued else ""
            lines.append(f"{start} {kind}{value} -d {_quoted(text)}")
        whole = [word for word in command.words if not word.endswith((".", "="))]
        if whole and command.path not in kinds:
            lines.append(f"{start} -a '{' '.join(whole)}'")
    some = " ".join(dict.fromkeys(path.split()[-1] for path in SECTIONS))
    start = f"complete -c fedx-pl -n '__fish_seen_subcommand_from {some}'"
    lines += [f"{start} -a {value}" for value in values()]
    lines += [f"{start} -a {key}= -d {_quoted(text)}" for key, text in keys().items()]
    return "\n".join(lines) + "\n"


def _filled(template: str, expected: str, array: str) -> str:
    """A script with all words.

    Args:
        template: the script.
        expected: its variable for the words that may follow a command.
        array: how the shell writes several words.
    """
    cases = []
    # The longest first; the words after ``fedx-pl`` are each followed by a blank.
    for command in sorted(commands(), key=lambda command: -len(command.path.split())):
        begins = f"{command.path} " if command.path else ""
        lists = {expected: command.words, "options": command.options, "valued": command.valued}
        numbers = {"files": command.files, "skip": len(command.path.split()) + 1}
        parts = [f"{name}={array.format(' '.join(words))}" for name, words in lists.items()]
        parts += [f"{name}={number}" for name, number in numbers.items()]
        cases.append(f'        "{begins}"*) {"; ".join(parts)} ;;\n')
    all_of_them = "\n".join(f"{key}=" for key in keys())
    return Template(template).substitute(
        keys=all_of_them, values="\n".join(values()), cases="".join(cases)
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


BASH = """\
_fedx_pl_keys="$keys"
_fedx_pl_values="$values"

_fedx_pl() {
    local line=$${COMP_LINE:0:COMP_POINT} words options valued files skip candidates argument last=-
    local word=$${line##*[[:space:]]}  # Whole: bash cuts COMP_WORDS at each '='.
    local -a before
    read -ra before <<< "$${line%"$$word"}"
    case "$${before[*]:1} " in
$cases    esac
    COMPREPLY=()
    for argument in "$${before[@]:skip}"; do
        [[ $$argument == -* || " $$valued " == *" $$last "* ]] || ((files--))
        last=$$argument
    done
    # Without candidates bash offers files, also after '='.
    [[ " $$valued " == *" $$last "* ]] && return
    case $$word in
        -*) candidates=$$options ;;
        *=*) candidates=$$_fedx_pl_values ;;
        *)
            ((files > 0)) && return
            [[ $$word == *.* ]] && candidates=$$_fedx_pl_keys || candidates=$$words
            ;;
    esac
    COMPREPLY=($$(compgen -W "$$candidates" -- "$$word"))
    if [[ $$word == *=* && $$COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("$${COMPREPLY[@]#*=}")  # What is before '=' is another word to bash and stays.
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

# A file _fedx-pl in $$fpath is called; otherwise this was sourced.
if [[ $$funcstack[1] == _fedx-pl ]]; then _fedx_pl "$$@"; else compdef _fedx_pl fedx-pl; fi
"""
