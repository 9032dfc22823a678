"""FedProx and SCAFFOLD against steps taken by hand, and with every method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Watching, data_for, fitted, made, make_model, train
from safetensors.torch import load_file
from torch import nn

from fedx_pl import Embeddings, FedXMixin, Loss, SSLMethod, Views
from fedx_pl.cli.main import main
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.federation.aggregate import FedAvg
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.regularizers import FedProx, Regularizer, Scaffold
from fedx_pl.federation.round import GlobalState, Update
from fedx_pl.methods import BUILT_IN, SimCLR
from fedx_pl.methods.optim import OptimOptions
from fedx_pl.mixins import wrap


class Line(SSLMethod):
    """Loss = slope * p: the gradient of p is the slope, whatever the images."""

    slope = 2.0

    def __init__(self, backbone: nn.Module, **base: Any) -> None:
        super().__init__(backbone, **base)
        self.p = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        return Loss(line=self.slope * self.p)


def line(momentum: float = 0.0) -> Line:
    model = make_model(Line, optim=OptimOptions(lr=0.1, momentum=momentum, weight_decay=0.0))
    assert isinstance(model, Line)
    return model


def two_steps(model: SSLMethod, **options: Any) -> Update:
    return train(model, data_for(model, images=16), **options)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, 0.61), (0.9, 0.43)])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_fedprox_pulls_back_towards_the_received_weights(
    momentum: float, expected: float, precision: str
) -> None:
    """With p = 1, slope 2, lr .1, mu .5: the first step has no pull, p = 1 - .1 * 2 = .8.

    Then g = 2 + .5 (.8 - 1) = 1.9.

    Without momentum p = .8 - .19 = .61; with momentum .9 the second step is .9 * 2 + 1.9 = 3.7, p =
    .8 - .37 = .43. In half precision gradients bear the loss scale when the callback sees them, and
    the pull must bear it as well.
    """
    update = two_steps(line(momentum), regularizer=FedProx(0.5), precision=precision)
    assert update.state.weights["p"].item() == pytest.approx(expected, abs=1e-6)


def test_fedprox_without_weight_equals_plain_training_to_the_bit() -> None:
    plain, prox = (
        train(model, data_for(model), epochs=2, regularizer=regularizer)
        for regularizer in (None, FedProx(0.0))
        for model in [make_model(wrap(FedXMixin, SimCLR))]
    )
    expected, found = plain.state.tensors(), prox.state.tensors()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_fedprox_stays_nearer_to_the_global_weights() -> None:
    moved = []
    for mu in (0.0, 10.0):
        model = make_model(SimCLR)
        before = model.shared_state()
        after = train(model, data_for(model), epochs=3, regularizer=FedProx(mu)).state.weights
        moved.append(
            sum((after[n] - before[n]).square().sum() for n, _ in model.named_parameters())
            .sqrt()
            .item()
        )
    assert moved[1] < 0.8 * moved[0]


def fold(
    regularizer: Regularizer, state: GlobalState, updates: list[Update], all_images: int
) -> GlobalState:
    """What the trainer does with the updates of a round."""
    average = FedAvg(state.tensors())
    for update in updates:
        average.add(update.state.tensors(), update.num_images)
    mean = GlobalState.from_tensors(average.result())
    server = regularizer.fold(state.server, mean.server, average.num_images / all_images)
    return GlobalState(weights=mean.weights, server=server)


@pytest.mark.parametrize(("momentum", "c_a"), [(0.0, 2.0), (0.9, 2.9)])
def test_scaffold_makes_clients_with_different_gradients_agree(momentum: float, c_a: float) -> None:
    """Slopes 2 and 4, lr .1, two steps, p = 1, as many images each.

    Round 1 is plain: without momentum client A ends at 1 - .4 = .6, so c_A = (1 - .6) / .2 = 2, B
    at .2 with c_B = 4, and c = 3, p = .4. In round 2 A steps along 2 - 2 + 3 = 3 and B along 4 - 4
    + 3 = 3: both end at .4 - .6 = -.2, and c_A = 2 - 3 + (.4 + .2) / .2 = 2 stays what it is. With
    momentum .9 the two steps of A are 2 and 3.8, c_A = 2.9 is their mean, and both clients end at
    the same place again.
    """
    model, scaffold = line(momentum), Scaffold()
    state = GlobalState(weights=model.shared_state(), server=scaffold.server_state(model))
    assert state.server["p"].item() == 0
    memory: dict[float, Any] = {2.0: None, 4.0: None}
    ends = {}
    for round in (1, 2):
        updates = []
        for slope in (2.0, 4.0):
            model.slope = slope
            updates.append(
                two_steps(
                    model, state=state, memory=memory[slope], round=round, regularizer=scaffold
                )
            )
            memory[slope] = updates[-1].memory
            ends[round, slope] = updates[-1].state.weights["p"].item()
        state = fold(scaffold, state, updates, all_images=32)
        assert state.server["p"].item() == pytest.approx(1.5 * c_a)
        assert memory[2.0].regularizer["p"].item() == pytest.approx(c_a)
        assert memory[4.0].regularizer["p"].item() == pytest.approx(2 * c_a)
    assert ends[2, 2.0] == pytest.approx(ends[2, 4.0], abs=1e-6)
    start = (ends[1, 2.0] + ends[1, 4.0]) / 2
    assert ends[2, 2.0] == pytest.approx(start - 0.2 * 1.5 * c_a, abs=1e-6)


def test_scaffold_of_a_sampled_client_moves_the_server_by_its_share() -> None:
    """c_A goes from 0 to 2 at a client with a quarter of all images: c = .25 * 2."""
    model, scaffold = line(), Scaffold()
    state = GlobalState(weights=model.shared_state(), server=scaffold.server_state(model))
    state = fold(
        scaffold, state, [two_steps(model, state=state, regularizer=scaffold)], all_images=64
    )
    assert state.server["p"].item() == pytest.approx(0.5)


def test_scaffold_does_nothing_to_identical_clients() -> None:
    """Their control variates are all c: no drift, and the weights of plain FedAvg."""
    ends = []
    for scaffold in (Scaffold(), Regularizer()):
        model = make_model(SimCLR)
        state, memory = (
            GlobalState(weights=model.shared_state(), server=scaffold.server_state(model)),
            None,
        )
        for round in (1, 2):
            data = data_for(model)
            twins = [
                train(model, data, state=state, memory=memory, round=round, regularizer=scaffold)
                for _ in "ab"
            ]
            memory = twins[0].memory
            state = fold(scaffold, state, twins, all_images=80)
        ends.append(state.weights)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("fedx", [False, True])
@pytest.mark.parametrize("regularizer", [FedProx(0.1), Scaffold()], ids=["fedprox", "scaffold"])
def test_every_method_trains_with_every_regularizer(
    name: str, fedx: bool, regularizer: Regularizer
) -> None:
    model = make_model(wrap(FedXMixin, BUILT_IN[name]) if fedx else BUILT_IN[name])
    data = data_for(model)
    state = GlobalState(weights=model.shared_state(), server=regularizer.server_state(model))
    first = train(model, data, state=state, regularizer=regularizer)
    state = fold(regularizer, state, [first], all_images=40)
    second = train(model, data, state=state, memory=first.memory, round=2, regularizer=regularizer)
    assert second.losses.isfinite().all()
    assert (
        fold(regularizer, state, [second], all_images=40).tensors().keys() == state.tensors().keys()
    )


def test_control_variates_survive_a_restart(quick: list[str], tmp_path: Path) -> None:
    """Two rounds with a stop in between end with the same weights and variates."""
    words = [*quick, "method=byol", "fedx=true", "regularizer=scaffold"]
    assert main(["train", *words, f"run.dir={tmp_path / 'whole'}"]) == 0
    stopped = [*words, f"run.dir={tmp_path / 'stopped'}"]
    stop_after_round_1(stopped)
    assert main(["train", *stopped]) == 0
    ends = [
        load_file(tmp_path / d / "checkpoints/round_00002/global.safetensors")
        for d in ("whole", "stopped")
    ]
    assert ends[0].keys() == ends[1].keys()
    assert any(name.startswith("server/") and ends[0][name].abs().sum() > 0 for name in ends[0])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_server_s_variate_is_the_mean_of_all_clients_weighted_by_images(
    quick: list[str], tmp_path: Path
) -> None:
    """After every round of a federation with clients of unequal size, of which two of three train.

    The server's c = sum n_i c_i / N, with c_i = 0 for clients that have never trained. Uniform
    weights, or shares of the round's clients, would give another c.
    """
    run = tmp_path / "run"
    words = [
        *quick,
        "method=byol",
        "regularizer=scaffold",
        "federation.fraction=0.67",
        "partition.beta=0.5",
    ]
    config = compose([*words, f"run.dir={run}"])
    sizes = [len(rows) for rows in made(config).data.clients]
    assert len(set(sizes)) == 3
    trained = []

    class Display(Watching):
        def row(self, row: dict[str, Any]) -> None:
            if row["round"] == 0:
                return
            checkpoints = Checkpoints(run)
            found = checkpoints.latest(mend=False)
            assert found is not None
            state, weights = found
            trained.append(len(state.clients))
            server = weights.server
            expected = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
            for client, record in state.clients.items():
                memory = checkpoints.load_client(client, record)
                assert memory is not None
                for name, mean in expected.items():
                    mean += sizes[client] / sum(sizes) * memory.regularizer[name]
            assert any(tensor.abs().sum() > 0 for tensor in server.values())
            torch.testing.assert_close(server, expected, rtol=1e-4, atol=1e-6)

    fitted(config, Display())
    assert trained == [2, 3]


def test_an_ema_target_follows_the_corrected_step() -> None:
    """With momentum .99, after one step.

    .99 of the start and .01 of the returned weights, the correction of lr * c = .1 in them. Without
    it the target would be .001 off.
    """
    model, scaffold = (
        make_model(BUILT_IN["byol"], momentum=0.99, optim=OptimOptions(lr=0.1)),
        Scaffold(),
    )
    start = {name: tensor.clone() for name, tensor in model.shared_state().items()}
    server = {
        name: torch.ones_like(tensor) for name, tensor in scaffold.server_state(model).items()
    }
    update = train(
        model,
        data_for(model, images=8),
        state=GlobalState(weights=start, server=server),
        regularizer=scaffold,
    )
    assert len(update.losses) == 1
    name = "conv1.weight"
    expected = 0.99 * start[f"backbone.{name}"] + 0.01 * update.state.weights[f"backbone.{name}"]
    torch.testing.assert_close(
        update.memory.private[f"target.0.{name}"], expected, rtol=0, atol=1e-5
    )


def stop_after_round_1(words: list[str]) -> None:
    class Stop(Exception):
        pass

    class Display(Watching):
        def row(self, row: dict[str, Any]) -> None:
            if row["round"] == 1:
                raise Stop

    with pytest.raises(Stop):
        fitted(compose(words), Display())


class OwnOptimizer(SimCLR):
    """A method whose optimizer the test chooses."""

    kind = "adam"

    def configure_optimizers(self) -> Any:
        own, head = list(self.backbone.parameters()), list(self.projector.parameters())
        if self.kind == "adam":
            return {"optimizer": torch.optim.Adam([*own, *head], lr=0.001)}
        if self.kind == "trainer":
            steps = self.trainer.estimated_stepping_batches
            return torch.optim.Adam([*own, *head], lr=1 / steps)
        rates = {"two rates": (0.1, 0.2), "sgd": (0.1, 0.1)}[self.kind]
        groups = [
            {"params": own, "lr": rates[0]},
            {"params": head, "lr": rates[1], "weight_decay": 0.0},
        ]
        return [torch.optim.SGD(groups, lr=1.0)], []


@pytest.fixture
def own_optimizer(quick: list[str], tmp_path: Path) -> list[str]:
    name = f"method={__name__}:OwnOptimizer"
    return [*quick, name, "regularizer=scaffold", f"run.dir={tmp_path / 'run'}"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "adam",
            r"scaffold works with torch\.optim\.SGD only, OwnOptimizer\.configure_optimizers "
            r"returns Adam;",
        ),
        (
            "two rates",
            r"the SGD of OwnOptimizer\.configure_optimizers has 0\.1, 0\.2; "
            r".*use regularizer=fedprox",
        ),
    ],
)
def test_scaffold_refuses_an_optimizer_it_does_not_fit_before_the_data_are_fetched(
    own_optimizer: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    message: str,
) -> None:
    """The data do not exist, so fetching them would fail."""
    monkeypatch.setattr(OwnOptimizer, "kind", kind)
    words = [word for word in own_optimizer if not word.startswith("data.root=")]
    with pytest.raises(UserError, match=message):
        made(compose([*words, f"data.root={tmp_path / 'nowhere'}"]))


def test_scaffold_refuses_an_optimizer_that_only_the_trainer_can_make(
    own_optimizer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client is dropped for it: the run ends before its first step."""
    monkeypatch.setattr(OwnOptimizer, "kind", "trainer")
    display = Watching()
    whole = made(compose(own_optimizer), display)
    with pytest.raises(UserError, match=r"configure_optimizers returns Adam;"):
        whole.fit()
    assert display.steps == 0
    assert not any("dropped" in note for note in display.notes)


def test_scaffold_accepts_a_method_s_own_sgd(
    own_optimizer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups may differ in all but the learning rate, which is then the one that is logged."""
    monkeypatch.setattr(OwnOptimizer, "kind", "sgd")
    display = Watching()
    fitted(compose(own_optimizer), display)
    assert [(row["lr"], row["dropped"]) for row in display.rows[1:]] == [(0.1, 0), (0.1, 0)]


class Halved(Line):
    """SGD whose rate is halved after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.p], lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_scaffold_corrects_each_step_by_the_rate_that_the_step_had() -> None:
    """Slope 2, rates .1 and .05, c = 1, c_i = 0.

    Then p = 1 - .15 * 3 = .55, and c_i <- 0 - 1 + .45 / .15 = 2.
    """
    model, scaffold = make_model(Halved), Scaffold()
    server = {
        name: torch.ones_like(tensor) for name, tensor in scaffold.server_state(model).items()
    }
    state = GlobalState(weights=model.shared_state(), server=server)
    update = two_steps(model, state=state, regularizer=scaffold)
    assert update.state.weights["p"].item() == pytest.approx(0.55)
    assert update.memory.regularizer["p"].item() == pytest.approx(2.0)


class Warming(Line):
    """A warm-up whose first round has a rate of zero."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.p], lr=0.0)


def test_scaffold_learns_nothing_from_a_round_without_a_rate() -> None:
    model, scaffold = make_model(Warming), Scaffold()
    update = two_steps(model, regularizer=scaffold)
    assert update.state.server["p"].item() == update.memory.regularizer["p"].item() == 0


def test_an_unknown_regularizer_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"regularizer=fedproxy is not known; did you mean regularizer=fedprox"
    ):
        compose(["regularizer=fedproxy"])
