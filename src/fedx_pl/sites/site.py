"""A site: trains on its own images when the coordinator asks, and keeps its private state.

STATE/ledger.json, answers     every answer that has left this site, see `Ledger`
STATE/errors.log               tracebacks
STATE/.decoded-images/         decoded copies of its images, if they are deleted at the end
STATE/RUN/                     private state of one run, see `Memories`
STATE/RUN/encoder/             a run folder with the last weights, if the coordinator leaves them
"""

import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedx_pl.config import compose as configuration
from fedx_pl.config.build import build, load_images
from fedx_pl.config.schema import Config
from fedx_pl.data.images import NO_CACHE, DataOptions
from fedx_pl.data.partition import Elsewhere
from fedx_pl.errors import UserError
from fedx_pl.evaluation import geometry
from fedx_pl.evaluation.features import drawn_rows, extract
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.identity import code_record
from fedx_pl.federation.options import PrivacyOptions
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.federation.run_state import RunState
from fedx_pl.files import make_private, write_atomically
from fedx_pl.methods.base import State
from fedx_pl.provenance.foreign_code import write_record
from fedx_pl.seeding import derive
from fedx_pl.sites import limits, wire
from fedx_pl.sites.fault_log import log_fault
from fedx_pl.sites.ledger import Ledger
from fedx_pl.sites.memories import Memories
from fedx_pl.sites.wire import BadMessage, Content

# What a coordinator decides. Where the images are and on what the site trains is the site's own
# decision.
SHARED = (
    "seed",
    "augment",
    "backbone",
    "method",
    "mixins",
    "fedx",
    "moon",
    "regularizer",
    "optim",
    "federation",
    "privacy",
)
HEALTH_IMAGES = 512
OURS = ".fedx-pl"  # marks a folder that may be deleted


def offer(
    config: Config, channels: int, side: int, value_range: Sequence[float] | None = None
) -> dict[str, Any]:
    """The part of a configuration that a coordinator sends to its sites.

    Args:
        config: the configuration of the run.
        channels: the number of channels of an image.
        side: the pixels on a side of an image.
        value_range: that of the coordinator's own images, if they have more than 8 bits per value.
    """
    whole = asdict(config)
    data = {
        "image_size": side,
        "grayscale": channels == 1,
        "mean": whole["data"]["mean"],
        "std": whole["data"]["std"],
    }
    if bounds := list(value_range or config.data.value_range):
        data["value_range"] = bounds
    # Older sites do not know the key `mixins`.
    shared = {key: whole[key] for key in SHARED if key != "mixins" or config.mixins}
    return shared | {"data": data}


class NotGreeted(BadMessage):
    """A request to train from a coordinator that has not noticed that this site was away."""


class Unusable(UserError):
    """This site's images cannot be used. The reason may name files and labels, and is not sent."""


class Site:
    """Answers the coordinator's messages."""

    def __init__(
        self,
        name: str,
        state: Path,
        own: Sequence[str],
        report: Callable[[str], None],
        *,
        allow_code: bool = False,
    ) -> None:
        """Prepares nothing yet: what to train comes with the first message.

        Args:
            name: the name of this site.
            state: the folder for its private state.
            own: the site's own overrides: ``data.root=...``, ``run.device=...``. With
                ``data.cache=FOLDER`` decoded copies of its images are kept, else `close` deletes
                them.
            report: called with each line of output.
            allow_code: a method may be named by ``module:Class``; Python then imports the module.
        """
        self.name = name
        self.state = state
        self.report = report
        self.allow_code = allow_code
        # Not `auto`: without a GPU it would train on some of the site's images only, by the
        # profile's data.limit.
        typed = configuration.compose(["data=folder", "profile=paper", *own])
        self.copies: Path | None = None
        if typed.data.cache in ("", NO_CACHE):
            self.copies = state / ".decoded-images"
            typed = replace(typed, data=replace(typed.data, cache=str(self.copies)))
        self.own = typed
        self.close()  # A site that was killed may have left copies.
        self._decoded: DataOptions | None = None
        self.ledger = Ledger(state)
        self.ended = ""  # how the federation ended: the outcome in a message `wire.END`
        self.refusal = ""  # why the coordinator refuses this site
        self._ready: tuple[str, dict[str, Any]] | None = None

    def close(self) -> None:
        """Deletes decoded copies of images, unless the site's overrides say where to keep them."""
        if self.copies is not None and (self.copies / OURS).exists():
            shutil.rmtree(self.copies, ignore_errors=True)

    def answer(self, kind: str, content: Content) -> Content | None:
        """The reply to a message. Errors are replies, too.

        None for a request to train before a greeting. The coordinator will notice that this site
        has connected again, greet it and repeat the request; an error would count against the site.
        """
        try:
            if kind == wire.HELLO:
                return Content(self._hello(content.meta), {})
            if kind == wire.TRAIN:
                return self._train(content)
            if kind == wire.END:
                self._end(content)
                return Content({"site": self.name}, {})
            raise BadMessage(f"a message of kind {kind!r}")
        except NotGreeted:
            return None
        except (UserError, BadMessage) as error:
            reason = wire.plain(error)
            advice = "; when it is fixed, start this site again" if kind == wire.HELLO else ""
            self.report(f"cannot do what the coordinator asks for: {reason}{advice}")
            if isinstance(error, Unusable):
                reason = "its images cannot be used; the site's own terminal tells more"
        except (KeyboardInterrupt, SystemExit):
            raise  # from the site's own user
        # After a full disk or a GPU out of memory, another round may go well. A panic of native
        # code is no `Exception`.
        except BaseException as error:
            reason = f"{type(error).__name__}; the site's own terminal tells more"
            self.report_fault("failed at what the coordinator asks for", error)
        return Content({"site": self.name, "error": reason}, {})

    def report_fault(self, what: str, error: BaseException) -> None:
        """Reports an error in one line, and writes its traceback to the site's log.

        Args:
            what: what happened.
            error: why.
        """
        where = log_fault(self.state / "errors.log", error)
        self.report(f"{what} ({type(error).__name__}: {wire.plain(error)}); {where}")

    def _hello(self, meta: dict[str, Any]) -> dict[str, Any]:
        run = wire.text(meta, "run")
        tree = meta.get("config")
        if not re.fullmatch(r"[0-9a-f]{8,64}", run) or not isinstance(tree, dict):
            raise BadMessage("a greeting without run or config")
        if self._ready != (run, tree):
            self._prepare(run, tree)
        return {"site": self.name, "images": len(self.rows)}

    def _prepare(self, run: str, tree: dict[str, Any]) -> None:
        """Gets ready to train for a run: loads the images and builds the model."""
        self._ready = None  # What follows may fail halfway.
        config = self._config(tree)
        if config.data != self._decoded:  # Else copies would pile up, one for each image size.
            self.close()
            self._decoded = None
        limits.require_within(self.own.site, config, tree, self.state)
        if self.copies is not None:
            write_atomically(self.copies / OURS, b"", private=True)
        self._decoded = config.data
        try:
            data = load_images(config, self.report)
        except UserError as error:
            raise Unusable(str(error)) from error
        if data.value_range and not config.data.value_range:
            # With a range of its own at each site, one value would mean different things.
            raise UserError(
                "this site has images of more than 8 bits per value, and the coordinator has not "
                "said which values are black and white; type data.value_range=[LOW,HIGH], e.g. "
                "[0,4095], at the coordinator, or here"
            )
        shape = data.train.images.shape[1:]
        wanted = config.data.image_size, 1 if config.data.grayscale else 3
        if (shape[0], shape[2]) != wanted:
            raise UserError(
                f"data={config.data.name} gives this site images of {shape[0]} pixels and "
                f"{shape[2]} channels, the coordinator's have {wanted[0]} and {wanted[1]}; it is "
                "asked for data.image_size and data.grayscale"
            )
        self.rows = np.arange(len(data.train.images))
        self.run = build(
            config, self.report, images=data, partition=Elsewhere(clients=config.federation.clients)
        )
        settings = self.run.trainer.local_settings()
        device = self.run.trainer.device
        self.local = LocalTrainer(
            self.run.model, device=device, secret_noise=True, tick=self._tick, **settings
        )
        self.memories = Memories(self.state / run)
        self._ready = run, tree
        method = config.method.name + (" with FedX" if config.fedx.enabled else "")
        self.report(f"joined run {run}: {method} on {len(self.rows):,} images of this site")
        if limit := self.own.privacy.max_epsilon:
            spent = self.ledger.spent(self.own.privacy.delta)
            self.report(
                f"privacy: epsilon={spent:.2f} of privacy.max_epsilon={limit:g} spent, over all "
                "runs so far"
            )

    def _config(self, tree: dict[str, Any]) -> Config:
        if unknown := tree.keys() - {*SHARED, "data"}:
            raise BadMessage(
                f"keys that are not the coordinator's to set: {', '.join(sorted(unknown)[:5])}"
            )
        method = tree.get("method")
        name = method.get("name") if isinstance(method, dict) else None
        foreign = sorted(configuration.code_words(tree))
        if not isinstance(name, str) or (foreign and not self.allow_code):
            raise UserError(
                f"{foreign[0] if foreign else 'method'} is code of the coordinator's choice; if "
                "this site has that module and trusts it, start it with --allow-code"
            )
        # OmegaConf would resolve references, e.g. to environment variables.
        if "${" in json.dumps(tree):
            raise BadMessage("a configuration with references")
        asked = configuration.from_tree(tree, "the coordinator's configuration")
        self._require_privacy(asked.privacy)
        data = {key: getattr(asked.data, key) for key in ("image_size", "grayscale", "mean", "std")}
        data["value_range"] = asked.data.value_range or self.own.data.value_range
        return replace(
            asked, data=replace(self.own.data, **data), run=self.own.run, site=self.own.site
        )

    def _require_privacy(self, asked: PrivacyOptions) -> None:
        """Checks that the coordinator does not ask for less protection than this site wants."""
        own = self.own.privacy
        if (own.clip and not 0 < asked.clip <= own.clip) or asked.noise < own.noise:
            raise UserError(
                f"this site wants privacy.clip={own.clip:g} privacy.noise={own.noise:g} or more "
                f"protection, the coordinator has privacy.clip={asked.clip:g} "
                f"privacy.noise={asked.noise:g}"
            )

    def _train(self, content: Content) -> Content:
        meta = content.meta
        if self._ready is None or self._ready[0] != meta.get("run"):
            raise NotGreeted
        number = wire.whole(meta, "round", 1)
        client = wire.whole(meta, "client")
        config = self.run.config
        context = RoundContext(
            round=number,
            rounds=config.federation.rounds,
            epochs=config.federation.epochs,
            seed=config.seed,
            global_state=GlobalState.from_tensors(content.tensors),
            batchnorm=config.federation.batchnorm,
        )
        _require_same(content.tensors, self.run.trainer.first_state().tensors())
        self.ledger.require_budget(self.own.privacy, config.privacy.noise)
        memory, found = self._memory(meta)
        seed = derive(config.seed, "data", number, client)
        data = self.run.data.batches(
            self.rows, seed, model=self.run.model, device=self.local.device
        )
        self.report(f"round {number}: training")
        self._until = time.monotonic() + self.own.site.max_seconds
        update = self.local.run(context, client=client, data=data, memory=memory)
        # First of all: the ledger may count too much, never too little.
        self.ledger.add(config.privacy.noise)
        self.memories.save(update.memory)
        metrics = update.metrics | (self._health() if meta.get("health") is True else {})
        self.report(
            f"round {number}: loss {float(update.loss().mean()):.3f}, {update.images_seen:,} "
            "images seen"
        )
        return Content(self._about(update, metrics, found), update.state.tensors())

    def _tick(self) -> None:
        if time.monotonic() > self._until:
            raise UserError(
                "the round takes longer than this site allows, "
                f"site.max_seconds={self.own.site.max_seconds:g}"
            )

    def _end(self, content: Content) -> None:
        """Handles the coordinator's last message. A failure does not keep a site from ending."""
        outcome = wire.text(content.meta, "outcome")
        if outcome == wire.REFUSED:
            self.refusal = wire.text(content.meta, "reason")
        elif outcome == wire.STOPPED:
            self.report("the coordinator has stopped, and may resume later; Ctrl-C ends this site")
        elif outcome != wire.FINISHED:
            raise BadMessage(f"outcome={outcome}")
        self.ended = outcome
        if outcome == wire.FINISHED:
            number = wire.whole(content.meta, "round")
            self.report(f"the federation has finished, after round {number}")
            self._keep_encoder(content, number)

    def _keep_encoder(self, content: Content, number: int) -> None:
        """Saves the last weights as a run folder, which all commands that use an encoder take."""
        if not content.tensors:
            self.report("the coordinator leaves no encoder here")
            return
        # A site that was started after the last round has not been greeted.
        if "config" in content.meta:
            self._hello(content.meta)
        if self._ready is None or self._ready[0] != content.meta.get("run"):
            self.report("this site has taken no part since it was started, so it keeps no encoder")
            return
        _require_same(content.tensors, self.run.trainer.first_state().tensors())
        folder = self.memories.folder / "encoder"
        config = self.run.config
        make_private(folder)
        write_record(folder, code_record(self.run.trainer, self.run.model, self.run.data))
        write_atomically(folder / "config.yaml", config.to_yaml().encode(), private=True)
        state = RunState(round=number, config=config.hash)
        Checkpoints(folder, keep=1).commit(state, GlobalState.from_tensors(content.tensors))
        self.report(f"the encoder is in {folder}")
        self.report(f"next: {shlex.join(['fedx-pl', 'embed', str(folder), config.data.root])}")

    def _memory(self, meta: dict[str, Any]) -> tuple[ClientMemory | None, bool]:
        """The private state of the round that the coordinator names, and whether it was found."""
        last = wire.whole(meta, "last_round")
        if not last:
            return None, True
        tensors = self.memories.load(last)
        if tensors is None:
            self.report(f"the private state of round {last} is not here; starting anew")
            return None, False
        steps = wire.whole(meta, "steps")
        epochs = wire.whole(meta, "epochs")
        return ClientMemory.from_tensors(tensors, last_round=last, steps=steps, epochs=epochs), True

    def _health(self) -> dict[str, float]:
        """Measures of the encoder on some of this site's images, without labels."""
        data = self.run.data
        backbone = self.run.model.backbone
        drawn = drawn_rows(len(self.rows), HEALTH_IMAGES, derive(self.run.config.seed, "health"))
        images = data.images.train.images[drawn]
        generator = torch.Generator(self.local.device).manual_seed(0)
        first, second = (
            extract(backbone, images, lambda batch: data.augment(batch, generator))
            for _ in range(2)
        )
        plain = extract(backbone, images, data.augment.plain)
        return geometry.health(plain) | {"alignment": geometry.alignment(first, second)}

    def _about(self, update: Update, metrics: dict[str, float], found: bool) -> dict[str, Any]:
        """The numbers that are sent with an update; of the losses, their means over the round."""
        means = update.losses.mean(dim=0).tolist()
        return {
            "site": self.name,
            "images": update.num_images,
            "seen": update.images_seen,
            "last_round": update.memory.last_round,
            "steps": update.memory.steps,
            "epochs": update.memory.epochs,
            "losses": dict(zip(update.loss_names, means, strict=True)),
            "metrics": metrics,
            "remembered": found,
        }


def _require_same(state: State, reference: State) -> None:
    """Raises `BadMessage` if the coordinator's weights do not fit this site's network."""
    if state.keys() != reference.keys():
        raise BadMessage(
            f"weights of another network: {min(state.keys() ^ reference.keys())} is only on one "
            "side"
        )
    for name, tensor in reference.items():
        if (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
            raise BadMessage(f"{name} has shape {tuple(state[name].shape)} and {state[name].dtype}")
