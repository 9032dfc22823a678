"""Completion in real shells: what they offer, and what a command gets after a TAB."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fedx_pl.cli import completion

KEYS = (
    "federation.clients=",
    "federation.rounds=",
    "federation.epochs=",
    "federation.fraction=",
    "federation.min_clients=",
    "federation.batchnorm=",
)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each shell, and a run folder to complete."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        (folder / f"script.{shell}").write_text(completion.script(shell))
    (folder / "runs" / "one").mkdir(parents=True)
    return folder


def offered(scripts: Path, line: str, breaks: str = "\t\n\"'><=;|&(:") -> list[str]:
    """What the bash function offers for a TAB at the end of a line."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash: apt-get install bash")
    words = '''source script.bash
        COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDBREAKS=$2
        _fedx_pl
        printf "%s\\n" "${COMPREPLY[@]}"'''
    command = ["bash", "--norc", "-c", words, "bash", line, breaks]
    done = subprocess.run(
        command, cwd=scripts, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedx-pl ex", {"export"}),
        ("fedx-pl train data=ci", {"cifar10", "cifar100"}),
        ("fedx-pl train data=", {"cifar10", "cifar100", "fmnist", "folder", "imagenet10", "svhn"}),
        ("fedx-pl train method=", {"simclr", "moco", "byol", "protocl", "fedu"}),
        ("fedx-pl train recipe=", {"paper", "strong"}),
        ("fedx-pl train profile=", {"paper", "mini", "cpu", "auto"}),
        ("fedx-pl train data=svhn fedx=", {"true", "false"}),
        ("fedx-pl train run.compile=", {"true", "false"}),
        ("fedx-pl train experiment=svhn-b", {"svhn-byol", "svhn-byol-fedx"}),
        ("fedx-pl train --dry-run fede", {"federation."}),
        ("fedx-pl train federation.", set(KEYS)),
        ("fedx-pl train method.mu", {"method.mu="}),
        ("fedx-pl train --d", {"--dry-run", "--debug"}),
        ("fedx-pl federate ", {"keys", "server", "client"}),
        ("fedx-pl federate client pri", {"privacy."}),
        ("fedx-pl evaluate runs/one --round 3 k", {"knn"}),
        ("fedx-pl sweep table", {"table1"}),
        ("fedx-pl completion ", {"bash", "zsh", "fish"}),
        # No words to offer: bash completes files.
        ("fedx-pl evaluate ru", set()),
        ("fedx-pl evaluate --round 3 ru", set()),
        ("fedx-pl train --fork ru", set()),
        ("fedx-pl train data.root=ru", set()),
    ],
)
def test_bash_offers_what_may_be_typed(scripts: Path, line: str, expected: set[str]) -> None:
    assert set(offered(scripts, line)) == expected


def test_bash_gets_whole_words_if_it_does_not_break_words_at_equals_signs(scripts: Path) -> None:
    assert offered(scripts, "fedx-pl train data=sv", breaks=" \t\n") == ["data=svhn"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            {
                "fedx-pl tra": "train ",
                "data=sv": "svhn ",
                "fedx=t": "true ",
                "feder": "federation.",
                "ro": "rounds=",
                "20": "",
            },
            "train data=svhn fedx=true federation.rounds=20",
        ),
        (
            {"fedx-pl eva": "evaluate ", "ru": "runs/", "on": "one/", " li": "linear "},
            "evaluate runs/one linear",
        ),
        ({"fedx-pl train data.root=ru": "runs/", "on": "one/"}, "train data.root=runs/one"),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_completes_on_a_terminal(
    scripts: Path, shell: str, typed: dict[str, str], expected: str
) -> None:
    """Types a text before each TAB and checks what the terminal shows after it."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    start = "" if shell == "bash" else "autoload -U compinit; compinit -D -u\n"
    (scripts / f"start.{shell}").write_text(
        f"{start}source script.{shell}\nfedx-pl() {{ printf '<<%s>>\\n' \"$*\"; }}\nPS1='ready> '\n"
    )
    plain = ["--norc", "--noprofile", "-i"] if shell == "bash" else ["-f", "-i"]
    terminal, inside = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "HOME": str(scripts)}
    process = subprocess.Popen(
        [shell, *plain],
        cwd=scripts,
        env=environment,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    try:
        os.write(terminal, f"source ./start.{shell}\n".encode())
        read_until(terminal, "ready> ")
        for part, completed in typed.items():
            os.write(terminal, (part + "\t" * bool(completed)).encode())
            # Wait as people do: some shells drop what is typed while they complete. A shell may
            # also draw the word in another way, hence the limit.
            read_until(terminal, completed, seconds=3.0)
        os.write(terminal, b"\n")
        got = read_until(terminal, ">>").partition("<<")[2].partition(">>")[0]
    finally:
        process.kill()
        process.wait()
        os.close(inside)
        os.close(terminal)
    # zsh removes the last slash again.
    assert [word.removesuffix("/") for word in got.split()] == expected.split()


def read_until(terminal: int, text: str, seconds: float = 120.0) -> str:
    """Reads what a terminal shows until it shows a text, or until some time has passed."""
    shown = ""
    end = time.monotonic() + seconds
    while time.monotonic() < end and text not in shown:
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


def test_fish_offers_what_may_be_typed(scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs fish: apt-get install fish")
    for line, expected in (
        ("fedx-pl tra", "train"),
        ("fedx-pl train data=sv", "data=svhn"),
        ("fedx-pl train federation.ro", "federation.rounds="),
        ("fedx-pl evaluate runs/one li", "linear"),
    ):
        command = ["fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'"]
        done = subprocess.run(
            command, cwd=scripts, capture_output=True, text=True, timeout=300, check=True
        )
        assert [found.split("\t")[0] for found in done.stdout.splitlines()] == [expected]
