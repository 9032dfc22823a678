"""The engine whose clients are real sites, which keep their images and private state.

`fedx-pl federate server` makes this engine. `fedx-pl train` has no `engine=flower`, since its
images are on this machine.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedx_pl.callbacks.dashboard import BUILT_IN, BUILT_IN_PREFIXES, HEALTH
from fedx_pl.engines.base import Engine, MemoryOf
from fedx_pl.errors import UserError
from fedx_pl.federation.round import ClientMemory, GlobalState, Lost, RoundContext, Update
from fedx_pl.sites import wire
from fedx_pl.sites.book import SiteBook
from fedx_pl.sites.wire import BadMessage, Content

if TYPE_CHECKING:  # Flower is not needed to read this module.
    from fedx_pl.sites.link import Link
    from fedx_pl.sites.records import Reply
    from fedx_pl.trainer import FederatedTrainer

POLL_SECONDS = 0.3
GRACE_SECONDS = 5.0  # for a site that is gone: one that connects anew is not there for a moment
MOST_NAMES = 100  # of a site's metrics: each becomes a column and a curve
# The possible values of metrics. Values that exceed them by rounding are clipped.
RANGES = {
    "rankme": (1.0, wire.MAX_NUMBER),
    "uniformity": (-8.0, 0.0),  # -4 of many images, -8 of two
    "feature_std": (0.0, 2.0),
    "alignment": (0.0, 4.0),
    "angle": (0.0, 180.0),
    **dict.fromkeys(("lr", "loss_scale", "update_norm"), (0.0, wire.MAX_NUMBER)),
}
ROUNDING = 1e-3
# For sites to fetch the last message; one that looks for the coordinator tries every two seconds.
END_SECONDS = 5.0
HELLO_SECONDS = 86400.0  # A site may have to decode its images first.


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A connected site that has answered HELLO."""

    node: int
    since: str
    name: str
    images: int


@dataclass(kw_only=True)
class Asked:
    """A site that is training."""

    client: int
    message: str
    content: Content
    guest: Guest
    memory: ClientMemory | None
    since: float
    until: float
    gone: float = 0.0  # since when it has not been there


class FlowerEngine(Engine):
    """Waits for sites, asks them to train and collects their updates."""

    def __init__(
        self,
        trainer: "FederatedTrainer",
        link: "Link",
        config: dict[str, Any],
        *,
        wait: float,
        timeout: float,
        leave_encoder: bool = True,
    ) -> None:
        """Connects a trainer with its sites.

        Args:
            trainer: has no clients of its own; its data module says how many sites there are.
            link: the connection to the sites.
            config: the configuration that sites receive, made by `sites.site.offer`.
            wait: seconds that the first round waits for all sites; after that, it starts with
                `federation.min_clients`.
            timeout: seconds that a round waits for a connected site that does not answer.
            leave_encoder: whether sites receive the last weights, to keep.
        """
        super().__init__(trainer)
        self.leave_encoder = leave_encoder
        self.link = link
        self.offer = config
        self.wait = wait
        self.timeout = timeout
        self.book = SiteBook(trainer.folder / "federation.json")
        self.guests: dict[str, Guest] = {}  # by name
        # (node, since) -> message; "" once answered or refused
        self._greeted: dict[tuple[int, str], str] = {}
        self._answered: dict[tuple[int, str], Guest] = {}  # in the order they came
        # by client, the names of its losses and metrics beyond the usual ones
        self._told: dict[int, set[str]] = {}
        self._started = False
        self.expected = trainer.datamodule.num_clients  # sites that the first round waits for

    def name_of(self, client: int) -> str:
        """The name of a client's site."""
        return f"site {self.book.name_of(client)}"

    # --- connected sites ------------------------------------------------------------------------

    def choose(self, round_number: int, away: Sequence[int] = ()) -> list[int]:
        """Waits for enough sites, and chooses all of them or a sample of `federation.fraction`."""
        least = self.trainer.min_clients
        wanted = least if self._started else max(least, self.expected)
        give_up = time.monotonic() + self.wait
        told = -1
        while True:
            self._greet()
            able = sorted(self.guests.keys() - {self.book.name_of(client) for client in away})
            there = len(able)
            enough = there >= wanted or (time.monotonic() > give_up and there >= least)
            if enough:
                break
            if there != told:
                names = ", ".join(able) or "none"
                self.trainer.note(
                    f"round {round_number} waits for {wanted} sites; there now: {names}"
                )
                told = there
            time.sleep(POLL_SECONDS)
        self._started = True
        # Numbered by name, not by arrival: the same sites are the same clients in another run.
        return self.trainer.choose_clients(
            round_number, sorted([self.book.client_of(name) for name in able])
        )

    def _greet(self) -> None:
        """Sends HELLO to new sites, reads their answers, and forgets sites that left."""
        online = {(site.node, site.since): site for site in self.link.sites()}
        self._greeted = {key: message for key, message in self._greeted.items() if key in online}
        self._answered = {key: guest for key, guest in self._answered.items() if key in online}
        hello = Content({"run": self.book.run, "config": self.offer}, {})
        for node, since in online.keys() - self._greeted.keys():
            self._greeted[node, since] = self.link.send(
                node, wire.HELLO, hello, seconds=HELLO_SECONDS
            )
        waiting = {message: key for key, message in self._greeted.items() if message}
        for reply in self.link.receive(list(waiting)) if waiting else []:
            key = waiting[reply.message]
            if reply.offline:  # It has left, or took too long: who is there is greeted again.
                del self._greeted[key]
                continue
            self._greeted[key] = ""
            try:
                if reply.content is None or "error" in reply.content.meta:
                    raise BadMessage(
                        wire.text(reply.content.meta, "error") if reply.content else reply.error
                    )
                name = wire.text(reply.content.meta, "site")
                images = wire.whole(reply.content.meta, "images", 1)
                if online[key].name and online[key].name != name:
                    raise BadMessage(
                        f"its key is that of site {online[key].name}, but it calls itself {name}"
                    )
            except BadMessage as reason:
                self.trainer.note(f"site {online[key].name or key[0]} cannot take part: {reason}")
                refusal = {
                    "run": self.book.run,
                    "outcome": wire.REFUSED,
                    "reason": wire.plain(reason),
                }
                self.link.send(key[0], wire.END, Content(refusal, {}), seconds=HELLO_SECONDS)
            else:
                if name in {guest.name for guest in self._answered.values()}:
                    self.trainer.note(
                        f"a second site {name} is here; only the first takes part while it is there"
                    )
                self._answered[key] = Guest(node=key[0], since=key[1], name=name, images=images)
        before = self.guests
        self.guests = {}
        for guest in self._answered.values():
            self.guests.setdefault(guest.name, guest)
        for name in sorted(
            name for name, guest in self.guests.items() if before.get(name) != guest
        ):
            self.trainer.note(f"site {name} is here with {self.guests[name].images:,} images")

    # --- a round --------------------------------------------------------------------------------

    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update | Lost]:
        """Asks all clients at once and yields their updates as they come."""
        asked = {}
        for client in clients:
            one = self._ask(context, client, memory_of(client))
            asked[one.message] = one
            self.trainer.working(self.name_of(client), client)
        while asked:
            for reply in self.link.receive(list(asked)):
                if reply.offline:
                    asked[reply.message].gone = asked[reply.message].gone or time.monotonic()
                    continue
                one = asked.pop(reply.message)
                self.trainer.working(self.name_of(one.client), None)
                yield self._outcome(one, reply)
            yield from self._look_after(asked)
            time.sleep(POLL_SECONDS if asked else 0)

    def _ask(self, context: RoundContext, client: int, memory: ClientMemory | None) -> Asked:
        before = memory or ClientMemory()
        guest = self.guests[self.book.name_of(client)]
        meta = {
            "run": self.book.run,
            "round": context.round,
            "client": client,
            "last_round": before.last_round,
            "steps": before.steps,
            "epochs": before.epochs,
            "health": not self.trainer.evaluator.possible,
        }
        content = Content(meta, context.global_state.tensors())
        message = self.link.send(guest.node, wire.TRAIN, content, seconds=self.timeout)
        now = time.monotonic()
        return Asked(
            client=client,
            message=message,
            content=content,
            guest=guest,
            memory=memory,
            since=now,
            until=now + self.timeout,
        )

    def _look_after(self, asked: dict[str, Asked]) -> Iterator[Lost]:
        """Asks reconnected sites again, and gives up sites that are gone or silent for too long."""
        online = {site.node: site.since for site in self.link.sites()}
        for message, one in list(asked.items()):
            since = online.get(one.guest.node)
            now = time.monotonic()
            if now > one.until:
                yield self._lose(
                    asked, message, f"no answer within {self.timeout:.0f} s", fault=True
                )
            elif since is None or (one.gone and since == one.guest.since):
                one.gone = one.gone or now
                if now > one.gone + GRACE_SECONDS and since is None:
                    yield self._lose(asked, message, wire.GONE)
                elif now > one.gone + GRACE_SECONDS:  # It never left: that is its own doing.
                    yield self._lose(asked, message, "its answer never came whole", fault=True)
            elif since != one.guest.since:
                self._greet()  # It has restarted, and must be told the run again.
                if (guest := self.guests.get(one.guest.name)) is not None:
                    del asked[message]
                    again = self.link.send(
                        guest.node, wire.TRAIN, one.content, seconds=self.timeout
                    )
                    asked[again] = replace(one, message=again, guest=guest, gone=0.0)
                    self.trainer.note(f"{self.name_of(one.client)} was away and is asked again")

    def _lose(
        self, asked: dict[str, Asked], message: str, reason: str, *, fault: bool = False
    ) -> Lost:
        one = asked.pop(message)
        self.trainer.working(self.name_of(one.client), None)
        return Lost(one.client, reason, fault=fault)

    def _outcome(self, one: Asked, reply: "Reply") -> Update | Lost:
        if reply.content is None:
            return Lost(one.client, reply.error, fault=True)
        meta = reply.content.meta
        try:
            if "error" in meta:
                raise BadMessage(wire.text(meta, "error"))
            before = one.memory or ClientMemory()
            epochs = self.trainer.local_epochs
            images = wire.whole(meta, "images", 1)
            seen = wire.whole(meta, "seen", 0, images * epochs)
            # A site that lost its private state counts from 0 again.
            counted = 0 if meta.get("remembered") is False else before.steps
            new_steps = wire.whole(meta, "steps", counted, counted + images * epochs) - counted
            losses = wire.numbers(meta, "losses")
            if "total" not in losses:
                raise BadMessage("it tells no loss")
            names = ("total", *(name for name in losses if name != "total"))
            table = torch.tensor([[losses[name] for name in names]])
            state = GlobalState.from_tensors(reply.content.tensors).to(self.trainer.device)
            metrics = _possible(wire.numbers(meta, "metrics"))
            # A site that told what is the coordinator's would overwrite it.
            asked = () if one.content.meta["health"] else (*HEALTH, "alignment")
            own = [
                name
                for name in metrics
                if name in (*BUILT_IN, *asked) or name.startswith(BUILT_IN_PREFIXES)
            ]
            if own := [name for name in own if name not in ("loss_scale", "lr")]:
                raise BadMessage(f"it tells {own[0]}, which is the coordinator's to tell")
            told = self._told.get(one.client, set()) | losses.keys() | metrics.keys()
            told -= {"total", *RANGES}
            if len(told) > MOST_NAMES:
                raise BadMessage("it tells too many different numbers")
            self._told[one.client] = told
        except BadMessage as reason:
            return Lost(one.client, str(reason), fault=True)
        if meta.get("remembered") is False:
            self.trainer.note(
                f"{self.name_of(one.client)} had lost its private state and started anew"
            )
        seconds = time.monotonic() - one.since
        memory = ClientMemory(
            last_round=one.content.meta["round"],
            steps=before.steps + new_steps,
            epochs=before.epochs + epochs,
        )
        return Update(
            client=one.client,
            num_images=images,
            state=state,
            memory=memory,
            losses=table,
            loss_names=names,
            images_seen=seen,
            metrics=metrics,
            seconds=seconds,
        )

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Tells sites how the federation ended, and closes the link."""
        try:
            with suppress(UserError):  # A SuperLink that is gone cannot tell anyone.
                self._say_goodbye()
        finally:
            self.link.close()

    def _say_goodbye(self) -> None:
        """Sends the last message, and waits a little for sites to fetch it.

        It cannot be fetched any more when the SuperLink has ended.
        """
        trainer = self.trainer
        finished = trainer.should_stop or trainer.current_round >= trainer.max_rounds
        outcome = wire.FINISHED if finished else wire.STOPPED
        meta = {"run": self.book.run, "outcome": outcome, "round": trainer.current_round}
        if finished and self.leave_encoder:  # A site that was just started has not been greeted.
            meta["config"] = self.offer
        content = Content(
            meta, trainer.global_state.tensors() if finished and self.leave_encoder else {}
        )
        # A site that was away for a moment would otherwise wait forever.
        expected = trainer.datamodule.num_clients if finished else 0
        told: set[tuple[int, str]] = set()
        waiting: list[str] = []
        give_up = time.monotonic() + END_SECONDS
        while time.monotonic() < give_up:
            for site in self.link.sites():
                if (site.node, site.since) not in told:
                    told.add((site.node, site.since))
                    waiting.append(
                        self.link.send(site.node, wire.END, content, seconds=END_SECONDS)
                    )
            for reply in self.link.receive(list(waiting)) if waiting else []:
                waiting.remove(reply.message)
            if not waiting and len(told) >= expected:
                return
            time.sleep(POLL_SECONDS)


def _possible(metrics: dict[str, float]) -> dict[str, float]:
    """A site's metrics without NaN; raises `BadMessage` for an impossible value."""
    found = {name: value for name, value in metrics.items() if not math.isnan(value)}
    for name in found.keys() & RANGES.keys():
        least, most = RANGES[name]
        value = found[name]
        found[name] = min(max(value, least), most)
        if abs(found[name] - value) > ROUNDING:
            raise BadMessage(f"it tells {name}={value:g}, possible are {least:g} to {most:g}")
    return found
