"""A federation in one process: the real engine, and sites behind a link of function calls."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import federation_parts as parts
import torch
from helpers import Watching, silent

from fedx_pl.cli.sites import coordinator_run
from fedx_pl.config.compose import compose
from fedx_pl.engines import Lost
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.sites import wire
from fedx_pl.sites.engine import FlowerEngine
from fedx_pl.sites.link import Connected
from fedx_pl.sites.records import Reply
from fedx_pl.sites.site import offer
from fedx_pl.sites.wire import Content
from fedx_pl.trainer import FederatedTrainer

Answer = Callable[[str, Content], Content | None]


class MemoryLink:
    """Calls sites instead of sending to them; messages are packed and read as on a wire."""

    def __init__(self) -> None:
        self.here: dict[int, tuple[Connected, Answer]] = {}
        self.sent: list[tuple[int, str, Content]] = []

    def join(self, node: int, answer: Answer, *, key: str = "", since: str = "1") -> None:
        self.here[node] = Connected(node, key, since), answer

    def sites(self) -> list[Connected]:
        return [seen for seen, _ in self.here.values()]

    def send(self, node: int, kind: str, content: Content, seconds: float) -> str:
        self.sent.append((node, kind, wire.unpack(*wire.pack(content))))
        return str(len(self.sent) - 1)

    def receive(self, messages: list[str]) -> Iterator[Reply]:
        for message in messages:
            node, kind, content = self.sent[int(message)]
            if node not in self.here:
                yield Reply(message, None, "Error: Node Unavailable", offline=True)
            elif (found := self.here[node][1](kind, content)) is not None:
                yield Reply(message, wire.unpack(*wire.pack(found)))

    def close(self) -> None:
        self.here.clear()


class Fake:
    """A site that does not train; it returns the weights it got, and other values a test sets."""

    def __init__(self, name: str, **changed: Any) -> None:
        self.name, self.changed, self.deaf = name, changed, False

    def __call__(self, kind: str, content: Content) -> Content | None:
        if self.deaf and kind == wire.TRAIN:
            return None
        if kind == wire.HELLO:
            return Content({"site": self.name, "images": 10}, {})
        if kind == wire.END:
            return Content({"site": self.name}, {})
        counts = {
            "site": self.name,
            "images": 10,
            "seen": 10,
            "steps": content.meta["steps"] + 2,
            "remembered": True,
        }
        return Content(
            counts | {"losses": {"total": 1.0, "term": 0.5}, "metrics": {}} | self.changed,
            content.tensors,
        )


def federate(
    folder: Path, sites: Mapping[str, Answer], *words: str, timeout: float = 60.0
) -> tuple[Any, str]:
    """Runs a federation whose sites are functions; returns its trainer and its notes."""
    config = compose(
        [*parts.WORDS, f"federation.clients={len(sites)}", f"run.dir={folder}", *words]
    )
    watching, link = Watching(), MemoryLink()
    for node, (name, answer) in enumerate(sites.items()):
        link.join(node, answer, key=name)

    def engine(trainer: FederatedTrainer) -> FlowerEngine:
        return FlowerEngine(trainer, link, offer(config, 3, 16), wait=60, timeout=timeout)  # type: ignore[arg-type]

    trainer = coordinator_run(config, silent, callbacks=[watching], engine=engine).fit()
    return trainer, "\n".join(watching.notes)


class Trial:
    """An engine with its link, what it noted, and a round to run."""

    def __init__(self, folder: Path, *words: str, wait: float = 0.02, timeout: float = 5.0) -> None:
        config = compose(
            [
                *parts.WORDS,
                "federation.clients=3",
                "federation.rounds=4",
                f"run.dir={folder}",
                *words,
            ]
        )
        self.watching, self.link = Watching(), MemoryLink()
        self.trainer = coordinator_run(config, silent, callbacks=[self.watching]).trainer
        self.engine = FlowerEngine(
            self.trainer, self.link, offer(config, 3, 16), wait=wait, timeout=timeout
        )  # type: ignore[arg-type]

    @property
    def notes(self) -> str:
        return "\n".join(self.watching.notes)

    def run(
        self, clients: list[int], memory: ClientMemory | None = None, round: int = 1
    ) -> list[Update | Lost]:
        context = RoundContext(
            round=round,
            rounds=4,
            epochs=1,
            seed=0,
            global_state=GlobalState(weights={"w": torch.arange(3.0)}),
            batchnorm="average",
        )
        return list(self.engine.run(context, clients, lambda client: memory))
