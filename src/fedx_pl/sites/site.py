"""What a site does: it trains on its own images when the coordinator asks, and keeps its private state on its own disk.

    STATE/ledger.json                      every answer that has left this site, see `Ledger`
    STATE/.decoded-images/                 decoded copies of its images, if they are deleted at the end
    STATE/RUN/round_00012.safetensors      private tensors after this site's training in round 12
    STATE/RUN/memory.json                  its counters and checksums, by round
    STATE/RUN/encoder/                     a run folder with the last weights, if the coordinator leaves them here

Which state a round starts from is the coordinator's to say: the one of the last round in which it took this site's
update. So a round that is repeated, or an update that was lost or dropped, leaves no trace.
"""

import json
import re
import shlex
import shutil
import time
import traceback
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
from fedx_pl.federation.privacy import PrivacyOptions
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.federation.run_state import RunState
from fedx_pl.files import UNFINISHED, make_private, private_file, write_atomically
from fedx_pl.files.store import load_tensors, save_tensors
from fedx_pl.methods.base import State
from fedx_pl.provenance.foreign_code import write_record
from fedx_pl.seeding import derive
from fedx_pl.sites import limits, wire
from fedx_pl.sites.ledger import Ledger
from fedx_pl.sites.wire import BadMessage, Content

# What a coordinator decides; where images lie and what they run on is the site's own.
SHARED = (
    "seed", "augment", "backbone", "method", "mixins", "fedx", "moon", "regularizer", "optim", "federation", "privacy",
)  # fmt: skip
HEALTH_IMAGES = 512
KEPT_ROUNDS = 3
OURS = ".fedx-pl"  # in a folder that may be deleted
MAX_LOG = 1_000_000  # bytes of tracebacks that a coordinator can make a site keep; then the log begins anew


def offer(
    config: Config, channels: int, side: int, value_range: Sequence[float] | None = None
) -> dict[str, Any]:
    """The part of a configuration that a coordinator tells its sites.

    Args:
        config: of the run.
        channels: of an image.
        side: of an image.
        value_range: of the coordinator's own images, if they have more than 8 bits per value.
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
    told = {
        key: whole[key] for key in SHARED if key != "mixins" or config.mixins
    }  # Older sites do not know that key.
    return told | {"data": data}


class NotGreeted(BadMessage):
    """Asked to train by a coordinator that has not seen that this site was away."""


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
            name: of this site.
            state: folder for its private state.
            own: overrides of the site itself: ``data.root=...``, ``run.device=...``. With ``data.cache=FOLDER``
                decoded copies of its images are kept, else `close` deletes them.
            report: takes lines for people.
            allow_code: a method may be named by ``module:Class``; Python then imports the module.
        """
        self.name, self.state, self.report, self.allow_code = name, state, report, allow_code
        # Not `auto`: without a GPU it would train on some of the site's images only, by the profile's data.limit.
        typed = configuration.compose(["data=folder", "profile=paper", *own])
        self.copies: Path | None = None
        if typed.data.cache in ("", NO_CACHE):
            self.copies = state / ".decoded-images"
            typed = replace(typed, data=replace(typed.data, cache=str(self.copies)))
        self.own = typed
        self.close()  # A site that was killed has left some.
        self._decoded: DataOptions | None = None
        self.ledger = Ledger(state)
        self.ended = ""  # how the federation ended, as of `wire.END`
        self.refusal = ""
        self._ready: tuple[str, dict[str, Any]] | None = None

    def close(self) -> None:
        """Deletes decoded copies of images, unless the site has typed where to keep them."""
        if self.copies is not None and (self.copies / OURS).exists():
            shutil.rmtree(self.copies, ignore_errors=True)

    def answer(self, kind: str, content: Content) -> Content | None:
        """The reply to a message; a mistake that people can mend is a reply, too.

        None for training without a greeting before. The coordinator will see that this site has connected anew, greet
        it and ask again; what it needs of it now is not an error.
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
            mend = "; when it is mended, start this site again" if kind == wire.HELLO else ""
            self.report(f"cannot do what the coordinator asks for: {reason}{mend}")
        except (KeyboardInterrupt, SystemExit):
            raise  # The site's own user.
        # A full disk, a GPU out of memory: another round may go well. A panic of native code is no `Exception`.
        except BaseException as error:
            reason = f"{type(error).__name__}; the site's own terminal tells more"
            self.report_fault("failed at what the coordinator asks for", error)
        return Content({"site": self.name, "error": reason}, {})

    def report_fault(self, what: str, error: BaseException) -> None:
        """One line for people, and the traceback in a log of this site's own.

        Args:
            what: happened.
            error: why.
        """
        log = self.state / "errors.log"
        try:
            make_private(self.state)
            mode = "a" if log.exists() and log.stat().st_size < MAX_LOG else "w"
            with open(log, mode, opener=private_file) as file:
                file.write(time.strftime("%Y-%m-%d %H:%M:%S\n"))
                file.writelines(traceback.format_exception(error))
            where = f"; {log} tells more"
        except OSError as failure:
            where = f"; {log} cannot be written ({failure.strerror})"
        self.report(f"{what} ({type(error).__name__}: {wire.plain(error)}){where}")

    def _hello(self, meta: dict[str, Any]) -> dict[str, Any]:
        run, tree = wire.text(meta, "run"), meta.get("config")
        if not re.fullmatch(r"[0-9a-f]{8,64}", run) or not isinstance(tree, dict):
            raise BadMessage("a greeting without run or config")
        if self._ready != (run, tree):
            self._prepare(run, tree)
        return {"site": self.name, "images": len(self.rows)}

    def _prepare(self, run: str, tree: dict[str, Any]) -> None:
        self._ready = None  # What follows may fail halfway.
        config = self._config(tree)
        limits.require_within(self.own.site, config, tree)
        if (
            config.data != self._decoded
        ):  # Or copies would grow with every size that a coordinator asks for.
            self.close()
        if self.copies is not None:
            write_atomically(self.copies / OURS, b"", private=True)
        self._decoded = config.data
        data = load_images(config, self.report)
        if data.value_range and not config.data.value_range:
            # Left to itself each site would take its own range, and one value would mean different things.
            raise UserError(
                "this site has images of more than 8 bits per value, and the coordinator has not said which values are "
                "black and white; type data.value_range=[LOW,HIGH], e.g. [0,4095], at the coordinator, or here"
            )
        shape, wanted = (
            data.train.images.shape[1:],
            (config.data.image_size, 1 if config.data.grayscale else 3),
        )
        if (shape[0], shape[2]) != wanted:
            raise UserError(
                f"data={config.data.name} gives this site images of {shape[0]} pixels and {shape[2]} channels, the "
                f"coordinator's have {wanted[0]} and {wanted[1]}; it is asked for data.image_size and data.grayscale"
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
                f"privacy: epsilon={spent:.2f} of privacy.max_epsilon={limit:g} spent, over all runs so far"
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
                f"{foreign[0] if foreign else 'method'} is code of the coordinator's choice; if this site has that "
                f"module and trusts it, start it with --allow-code"
            )
        if "${" in json.dumps(
            tree
        ):  # OmegaConf would fill in what is asked for, e.g. environment variables.
            raise BadMessage("a configuration with references")
        told = configuration.from_tree(tree, "the coordinator's configuration")
        self._require_privacy(told.privacy)
        data = {key: getattr(told.data, key) for key in ("image_size", "grayscale", "mean", "std")}
        data["value_range"] = told.data.value_range or self.own.data.value_range
        return replace(
            told, data=replace(self.own.data, **data), run=self.own.run, site=self.own.site
        )

    def _require_privacy(self, told: PrivacyOptions) -> None:
        """The coordinator may ask for more protection than this site wants, but not for less."""
        own = self.own.privacy
        if (own.clip and not 0 < told.clip <= own.clip) or told.noise < own.noise:
            raise UserError(
                f"this site wants privacy.clip={own.clip:g} privacy.noise={own.noise:g} or more protection, the "
                f"coordinator has privacy.clip={told.clip:g} privacy.noise={told.noise:g}"
            )

    def _train(self, content: Content) -> Content:
        meta = content.meta
        if self._ready is None or self._ready[0] != meta.get("run"):
            raise NotGreeted
        number, client = wire.whole(meta, "round", 1), wire.whole(meta, "client")
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
        self.ledger.add(
            config.privacy.noise
        )  # Before anything else is kept: it may count too much, never too little.
        self.memories.save(update.memory)
        metrics = update.metrics | (self._health() if meta.get("health") is True else {})
        self.report(
            f"round {number}: loss {float(update.loss().mean()):.3f}, {update.images_seen:,} images seen"
        )
        return Content(self._about(update, metrics, found), update.state.tensors())

    def _tick(self) -> None:
        if time.monotonic() > self._until:
            raise UserError(
                f"the round takes longer than this site allows, site.max_seconds={self.own.site.max_seconds:g}"
            )

    def _end(self, content: Content) -> None:
        """The coordinator's last word. What fails here does not keep a site from ending."""
        outcome = wire.text(content.meta, "outcome")
        if outcome == wire.REFUSED:
            self.refusal = wire.text(content.meta, "reason")
        elif outcome == wire.STOPPED:
            self.report("the coordinator has stopped, and may go on later; Ctrl-C ends this site")
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
        if self._ready is None or self._ready[0] != content.meta.get("run"):
            self.report("this site has taken no part since it was started, so it keeps no encoder")
            return
        _require_same(content.tensors, self.run.trainer.first_state().tensors())
        folder, config = self.memories.folder / "encoder", self.run.config
        make_private(folder)
        write_record(folder, code_record(self.run.trainer, self.run.model, self.run.data))
        write_atomically(folder / "config.yaml", config.to_yaml().encode(), private=True)
        state = RunState(round=number, config=config.hash)
        Checkpoints(folder, keep=1).commit(state, GlobalState.from_tensors(content.tensors))
        images = shlex.quote(config.data.root)
        self.report(
            f"the encoder is in {folder}; next: fedx-pl embed {shlex.quote(str(folder))} {images}"
        )

    def _memory(self, meta: dict[str, Any]) -> tuple[ClientMemory | None, bool]:
        """What this site remembers of the round that the coordinator names, and whether it has found it."""
        last = wire.whole(meta, "last_round")
        if not last:
            return None, True
        tensors = self.memories.load(last)
        if tensors is None:
            self.report(f"the private state of round {last} is not here; starting anew")
            return None, False
        steps, epochs = wire.whole(meta, "steps"), wire.whole(meta, "epochs")
        return ClientMemory.from_tensors(tensors, last_round=last, steps=steps, epochs=epochs), True

    def _health(self) -> dict[str, float]:
        """Measures that need no labels, of this site's encoder on some of its own images."""
        data, backbone = self.run.data, self.run.model.backbone
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
        """Counts and scalars; of the losses only the means of the round."""
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


class Memories:
    """A site's private state after its last rounds in one run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / "memory.json"
        for half in folder.glob(f".*{UNFINISHED}"):  # Of a site that was killed while it wrote.
            half.unlink()

    def load(self, round_number: int) -> State | None:
        """The private tensors after a round, or None if they are not here; forgets much older ones.

        A coordinator whose newest checkpoint is damaged goes back by a round or two.
        """
        records = self._records()
        for old in [number for number in records if number < round_number - KEPT_ROUNDS]:
            (self.folder / _file_name(old)).unlink(missing_ok=True)
            del records[old]
        file = self.folder / _file_name(round_number)
        if round_number not in records or not file.exists():
            return None
        try:
            return load_tensors(file, records[round_number])
        except ValueError:
            return None

    def save(self, memory: ClientMemory) -> None:
        """Keeps a client's private tensors."""
        file = self.folder / _file_name(memory.last_round)
        sha256 = save_tensors(file, memory.tensors(), private=True)
        records = self._records() | {memory.last_round: sha256}
        kept = {
            str(round_number): sha
            for round_number, sha in records.items()
            if (self.folder / _file_name(round_number)).exists()
        }
        write_atomically(self._file, json.dumps(kept, indent=1).encode(), private=True)

    def _records(self) -> dict[int, str]:
        try:
            return {
                int(round_number): str(sha)
                for round_number, sha in json.loads(self._file.read_text()).items()
            }
        except (OSError, ValueError, AttributeError):
            return {}


def _file_name(round_number: int) -> str:
    return f"round_{round_number:05d}.safetensors"


def _require_same(state: State, reference: State) -> None:
    """The coordinator's weights fit this site's network."""
    if state.keys() != reference.keys():
        raise BadMessage(
            f"weights of another network: {min(state.keys() ^ reference.keys())} is only on one side"
        )
    for name, tensor in reference.items():
        if (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
            raise BadMessage(f"{name} has shape {tuple(state[name].shape)} and {state[name].dtype}")
