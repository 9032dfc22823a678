"""Classes without a file count by what they do: every edit shows, and nothing else does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import notebook
from test_trainer import run

from fedx_pl import SSLMethod
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.provenance.foreign_code import code_of

CELL = """
import collections, dataclasses, enum, functools, json, operator, re, threading, types, weakref
from pathlib import Path
import numpy as np
import torch
from torch import nn
from fedx_pl import Loss, SSLMethod
from maker import decorated, scaled_by

TAU = 0.1
def scaled(x):
    return x / TAU if x.dim() in {0, 1} else {"a", "b", "c"}

class Crit:
    __slots__ = "weight", "sign"
    def __init__(self, weight):
        self.weight, self.sign = weight, 21
    def __call__(self, x):
        return self.weight * x ** 22

@dataclasses.dataclass(frozen=True)
class Point:
    name: str = "23"
    def where(self):
        return self.name * 24

class Color(enum.Enum):
    RED = 25

class Options(dict):
    def get(self, key):
        return 26

Pair = collections.namedtuple("Pair", "a b")

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * 31
    return wrapper

def bare(function):
    return lambda *args: function(*args) * 32

@logged
@bare
def layered(x):
    return x * 33

@functools.singledispatch
def chosen(x):
    return 34
@chosen.register
def _(x: int):
    return 35

steps = (scaled, "40")
crit = Crit(weight=41)
crits = [Crit(1), {"deep": (Crit(42), [scaled])}]
CFG = {"tau": 43, "list": [44, {45}], "functions": (scaled, lambda x: 46, lambda x: 47)}
CFG["itself"] = CFG
points = {Point("48"), Point("b"), Point("c"), ("x", frozenset({"y", "z", "49"})),
          lambda x: 50, lambda x: 51}
table = np.arange(52)
names = np.array([scaled, "53", ("a", "b")], dtype=object)
weights = torch.ones(54)
half = torch.full((3,), 55.0, dtype=torch.bfloat16)
number = np.float32(56)
power = functools.partial(pow, 57)
net = nn.Sequential(nn.Flatten(), nn.Dropout(0.58))
library = nn.CosineSimilarity(eps=0.59)
space = types.SimpleNamespace(a=[60])
pattern = re.compile("61")
options = Options(a=62)
default = collections.defaultdict(lambda: 63, a=64)
pair = Pair(1, 65)
getter = operator.itemgetter(66)
made = scaled_by(67)
red = Color.RED
dtype = torch.float16
size = torch.Size([3, 68])
lock = threading.Lock()
bound = crit.__call__
path = Path("69")
view = memoryview(b"not to be pickled")
weak = weakref.WeakSet([scaled, Crit])

class Mine(SSLMethod):
    online_views = 2
    table = {"a": 71}
    power = functools.partialmethod(getattr, "72")
    class Inner:
        scale = 73
        def method(self):
            return 74
    @torch.no_grad()
    def on_round_start(self):
        self.margin = 75
    @functools.lru_cache(maxsize=None)
    def cached(self):
        return 76
    @property
    def place(self):
        return 77
    @place.setter
    def place(self, value):
        self.margin = 78
    @functools.cached_property
    def later(self):
        return 79
    @classmethod
    def make(cls):
        return 80
    @staticmethod
    def text():
        return 81
    @decorated
    def shown(self):
        return 82
    def __len__(self):
        return 83
    def loss(self, batch, z, margin=0.84, *, other=0.85):
        import late
        (steps, crit, crits, CFG, points, table, names, weights, half, number, power, net,
         library, space, pattern, options, default, pair, getter, made, red, dtype, size, lock,
         bound, path, view, weak, layered, chosen, Point)
        return Loss(a=scaled(((z.first - z.second) ** 2).mean()) + margin)
"""
MAKER = """
def scaled_by(tau):
    return lambda x: x * tau
def decorated(function):
    return lambda *args: function(*args)
"""
LOOK = (
    "\nfrom fedx_pl.provenance.foreign_code import code_of\nprint(sorted(code_of(Mine).items()))\n"
)
NUMBERS = [*range(21, 27), *range(31, 36), *range(40, 70), *range(71, 86)]


@pytest.fixture(autouse=True)
def maker(modules: Path) -> None:
    (modules / "maker.py").write_text(MAKER)
    (modules / "late.py").write_text("")


def edited(old: str, new: str) -> str:
    assert CELL.count(old) == 1, old
    return CELL.replace(old, new)


def renumbered(number: int) -> str:
    text, count = re.subn(rf"\b{number}\b", str(number + 900), CELL)
    assert count == 1, number
    return text


def test_the_same_text_has_the_same_code_and_comments_do_not_count() -> None:
    first = code_of(notebook(CELL))
    assert first == code_of(notebook(f"# another line\n{CELL}"))
    assert {
        "maker",
        "late",
        "no_file.Mine",
        "no_file.Mine.loss",
        "no_file.scaled",
        "no_file.Crit",
    } <= set(first)


def test_every_edit_shows() -> None:
    """Each number of the cell stands for a separate edit."""
    first = code_of(notebook(CELL))
    missed = [number for number in NUMBERS if code_of(notebook(renumbered(number))) == first]
    assert missed == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first - z.second", "first + z.second"),
        ("TAU = 0.1", "TAU = 0.2"),
        ("x / TAU", "x * TAU"),
        ("online_views = 2", "online_views = 1"),
        ("torch.float16", "torch.float32"),
        ("@logged", "@functools.lru_cache"),
        ("(self, batch, z, margin=0.84, *,", "(self, batch, z, margin=0.84,"),
        ("(scaled, lambda x: 46, lambda x: 47)", "(scaled, lambda x: 47, lambda x: 46)"),
        ("    def __len__(self):\n        return 83\n", ""),
    ],
)
def test_other_edits_show(old: str, new: str) -> None:
    assert code_of(notebook(CELL)) != code_of(notebook(edited(old, new)))


def test_what_a_class_does_not_read_does_not_count() -> None:
    """A global with the name of an attribute is something else, and may hold results."""
    first = code_of(notebook(CELL))
    assert code_of(notebook(f"{CELL}\nfirst = mean = a = [1]\nunused = {{}}\n")) == first


def test_huge_and_endless_things_are_no_trouble() -> None:
    cell = """
    import torch
    from fedx_pl import Loss, SSLMethod
    class Node:
        pass
    node = first = Node()
    for _ in range(5000):
        node.next = Node()
        node = node.next
    node.next = first
    DATA = list(range(30_000))
    images = torch.zeros(5_000_000, dtype=torch.uint8)
    zeta = {"tau": 0.1, "long": 10**5000}
    class Mine(SSLMethod):
        def loss(self, batch, z):
            return Loss(a=(DATA, images, first, zeta))
    """
    before = code_of(notebook(cell))
    assert before == code_of(notebook(cell))
    for old, new in [
        ("0.1", "0.2"),
        ("30_000", "30_001"),
        ("5000", "5001"),
        ("torch.zeros", "torch.ones"),
    ]:
        assert before != code_of(notebook(cell.replace(old, new)))


def test_a_class_that_cannot_be_pickled_counts_by_its_attributes() -> None:
    cell = """
    from fedx_pl import Loss, SSLMethod
    class Stubborn:
        def __init__(self):
            self.tau = 0.1
        def __reduce_ex__(self, protocol):
            raise RuntimeError("no")
    stubborn = Stubborn()
    class Mine(SSLMethod):
        def loss(self, batch, z):
            return Loss(a=stubborn.tau)
    """
    assert code_of(notebook(cell)) == code_of(notebook(cell))
    assert code_of(notebook(cell)) != code_of(notebook(cell.replace("0.1", "0.2")))


@pytest.mark.slow
def test_of_a_script_only_the_class_counts(modules: Path) -> None:
    """A script, a longer one, and the same from standard input, with different hash seeds."""
    (modules / "script.py").write_text(CELL + LOOK)
    (modules / "longer.py").write_text(f"{CELL}{LOOK}\nprint('the rest of a script may change')\n")

    def process(seed: int, *command: str, text: str = "") -> str:
        environment = {"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)}
        return subprocess.run(
            [sys.executable, *command],
            input=text,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    script = process(1, str(modules / "script.py"))
    assert "__main__.Mine" in script
    assert process(2, str(modules / "longer.py")).startswith(script)
    assert process(3, text=CELL + LOOK) == script


def test_a_notebook_resumes_its_run_but_not_after_an_edit(quick: list[str]) -> None:
    """Training itself changes nothing that counts."""
    words = [*quick, "method=no_file:Mine", "federation.rounds=1", "fedx=true"]
    method: type[SSLMethod] = notebook(CELL)
    before = code_of(method)
    folder = run(compose(words)).folder
    assert code_of(method) == before
    notebook(CELL)
    assert run(compose(words)).folder == folder
    notebook(edited('{"tau": 43', '{"tau": 44'))
    with pytest.raises(
        UserError, match=r"was trained with other code: no_file\.Mine\.loss changed since"
    ):
        run(compose(words))
