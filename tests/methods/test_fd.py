"""FD: the mean outputs of the other clients are targets for the labels that these have."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import backward, batches, close, evaluates, examples, plus, scores, slope, started, values
from support import (
    ALL,
    BATCH_NORM,
    World,
    dataset,
    dropout_mlp,
    nets,
    play,
    rounds,
    run_cohorts,
    same,
    softmax,
    states,
    world,
)
from support import trained_states as after_training
from torch import nn

from lightning_modules.methods.fd import FD
from lightning_modules.methods.local import Local
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.dataset import Dataset
from pflsim.engine.execution import TrainTask
from pflsim.messages import Message, Prototypes, Uplink, payload_bytes
from pflsim.servers.fd import FD as Server
from pflsim.servers.local import Local as LocalServer

COHORTS = (ALL, (0, 2), (1, 2, 3), ALL)
TRAINING = Training(lr=0.1, momentum=0.5, batch_size=4)


def fd(*, training: Training = TRAINING, model: Any = None, data: Any = None, **settings: Any) -> World:
    return world(partial(FD, **settings), Server(), training=training, model=model, data=data)


def apart() -> Dataset:
    """Training examples sorted by class, so that clients lack classes; the first ones have the third class alone."""
    data = dataset()
    order = np.argsort(data.y[:90], kind="stable")[::-1]
    return replace(data, x=np.r_[data.x[order], data.x[90:]], y=np.r_[data.y[order], data.y[90:]])


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("data", [dataset(), apart()], ids=["all classes", "missing classes"])
def test_rounds_by_hand(data: Dataset, average: str) -> None:
    """Each client learns from what the others have sent last, with equal weights; absent clients count too."""
    eta, lam = 0.4, 1.5
    made = fd(data=data, training=Training(lr=eta, batch_size=4), lam=lam, average=average)
    with started(made) as executor:
        own = [values(states(executor)[i]) for i in ALL]
        tables: list[dict[int, np.ndarray]] = [{} for _ in ALL]
        for t, cohort in enumerate(COHORTS, start=1):
            new: dict[int, dict[int, np.ndarray]] = {}
            for i in cohort:
                w, targets, held = own[i], np.zeros((3, 3)), np.zeros(3, bool)
                for c in range(3):
                    others = [tables[j][c] for j in ALL if j != i and c in tables[j]]
                    if others:
                        mean, held[c] = np.mean(others, axis=0), True
                        targets[c] = softmax(mean[None])[0] if average == "logits" else mean
                for x, y in batches(executor, i, t):
                    pull = (softmax(scores(w, x)) - targets[y]) * held[y][:, None] / len(y)
                    w = plus(w, -eta, backward(w, x, slope(scores(w, x), y) + lam * pull))
                own[i] = w
                x, y = examples(executor, i)
                outputs = scores(w, x) if average == "logits" else softmax(scores(w, x))
                new[i] = {c: outputs[y == c].mean(0) for c in {*y.tolist()}}
            for i, table in new.items():
                tables[i] = table
            play(executor, t, cohort)
            for i in ALL:
                close(values(states(executor)[i]), own[i])
        evaluates(executor, len(COHORTS), lambda i, x: scores(own[i], x))


class Constant(Net):
    """Returns its parameters as scores."""

    def __init__(self, *given: float):
        super().__init__(nn.Identity(), nn.Linear(1, len(given), bias=False), (1,), len(given))
        self.head.weight = nn.Parameter(torch.tensor(given)[:, None])


def test_loss_and_gradient_of_one_example() -> None:
    """f = (0, 0), y = 0, T_0 = (2, 0), λ = 1; six digits of a program of the definition. Label 1 has no target."""
    module = FD(Constant(0.0, 0.0), Training())
    module.receive(Message(prototypes=Prototypes(torch.tensor([[2.0, 0.0], [np.nan] * 2]), torch.tensor([3, 0]))))
    for label, loss, slope_ in ((0, 1.386294, [-0.880797, 0.880797]), (1, 0.693147, [0.5, -0.5])):
        total = torch.stack([*module.objective((torch.ones(1, 1), torch.tensor([label]))).values()]).sum()
        (gradient,) = torch.autograd.grad(total, [*module.parameters()])
        assert total.item() == pytest.approx(loss, abs=1e-6)
        np.testing.assert_allclose(gradient.flatten(), slope_, atol=1e-6)


def sent(client: int, rows: dict[int, list[float]]) -> Uplink:
    """An uplink with these mean outputs; rows of other labels are undefined."""
    means, counts = torch.full((3, 3), torch.nan), torch.zeros(3, dtype=torch.int64)
    for label, row in rows.items():
        means[label], counts[label] = torch.tensor(row), 5
    return Uplink(prototypes=Prototypes(means, counts), client=client, num_examples=9)


def test_the_receiver_is_left_out() -> None:
    """The target of one of two clients is the table of the other; a newcomer gets the mean of all."""
    made = fd()
    state = made.rule.init(replace(made.federation, clients=made.federation.clients[:2]))
    tables = ({0: [1.0, 2.0, 3.0], 1: [0.0, 0.5, 1.0]}, {0: [3.0, 2.0, 0.0]})
    state = made.rule.fuse(state, [sent(client, table) for client, table in enumerate(tables)])

    def targets(client: int) -> dict[int, list[float]]:
        found = made.rule.downlink(state, client).prototypes
        assert found is not None
        return {c: found.means[c].tolist() for c in range(3) if found.counts[c]}

    assert targets(0) == tables[1] and targets(1) == tables[0]
    assert targets(7) == {0: [2.0, 2.0, 1.5], 1: [0.0, 0.5, 1.0]}
    state = made.rule.fuse(state, [sent(0, {0: [9.0, 9.0, 9.0]})])
    assert targets(0) == tables[1] and targets(1) == {0: [9.0, 9.0, 9.0], 1: [0.0, 0.5, 1.0]}
    assert payload_bytes(made.rule.downlink(state, 0)) == 1 * (4 * 3 + 4)
    assert made.rule.fuse(state, []).tables.equal(state.tables)
    with pytest.raises(ValueError, match="client 1 sent no mean outputs"):
        made.rule.fuse(state, [Uplink(client=1)])


@pytest.mark.parametrize("model", [None, dropout_mlp, BATCH_NORM])
def test_the_first_round_is_local(model: Any) -> None:
    """To the bit, since there are no targets yet; the second one no longer is."""
    made, alone = fd(model=model), world(Local, LocalServer(), model=model, training=TRAINING)
    for count in (1, 2):
        found = (nets(states(run_cohorts(each, [ALL] * count))) for each in (made, alone))
        assert same(*found) == (count == 1)


def test_what_is_sent_and_counted() -> None:
    """A row of C outputs and a count of each label that a client has, in evaluation mode after training."""
    executor = fd(model=dropout_mlp, data=apart()).inline()
    rounds(executor, 1, 4)
    trained = executor.run(TrainTask(2), executor.send(ALL))
    state = after_training(executor, trained)
    for report in trained.reports:
        module, own = executor.factory.build().eval(), executor.host.shards[report.client].train
        module.load_state_dict(dict(state[report.client]))
        (up,) = [up for handle in trained.uplinks for up in executor.uplinks(handle) if up.client == report.client]
        labels = own.y.unique()
        assert report.up_bytes == len(labels) * (4 * 3 + 4) and up.prototypes.counts.sum() == len(own)
        x, y = own.batch(slice(None))
        for label in labels:
            torch.testing.assert_close(up.prototypes.means[label], module.net(x[y == label]).mean(0).detach())
