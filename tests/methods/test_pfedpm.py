"""What must hold of pFedPM, R-pFedPM and models of several kinds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import ALL, World, nets, partition, play, run_cohorts, same, slow_except, states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.local import Local
from lightning_modules.methods.pfedpm import PFedPM
from lightning_modules.training import Training
from pflsim.data.federated import Partition
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedpm import PFedPM as Server

TRAINING = Training(lr=0.1, momentum=0.5, batch_size=4)
COHORTS = ((1, 2), (0, 2), (0, 1, 3), (2, 3))
"""Partial participation; client 0 is new in round 2, client 3 in round 3."""


def pfedpm(*, model: Any = None, data: Any = None, training: Training = TRAINING, **settings: Any) -> World:
    return world(partial(PFedPM, **settings), Server(), model=model, data=data, training=training)


def local(w: World) -> World:
    """The same federation under Local."""
    return replace(w, factory=replace(w.factory, client=Local), rule=LocalServer())


def limited(w: World, held: Sequence[Sequence[int]]) -> World:
    """The same with each client's examples of some classes only."""
    rows = partition(w.dataset, (24, 24, 24, 18))
    train = tuple(r[np.isin(w.dataset.y[r], c)] for r, c in zip(rows.train, held, strict=True))
    return replace(w, partition=Partition(train, rows.val, rows.test))


def run(executor: InlineExecutor, cohorts: Sequence[Sequence[int]], first: int = 1) -> list[Any]:
    """Rounds with these clients; returns the reports."""
    reports = []
    for t, cohort in enumerate(cohorts, start=first):
        reports.append(play(executor, t, cohort)[0].reports)
    return reports


def after_rounds(w: World) -> dict[int, dict[str, torch.Tensor]]:
    """Every client's body and head (the decision path), buffers included."""
    return nets(states(run_cohorts(w, COHORTS)))


# a = 1 ------------------------------------------------------------------------------------------------------------


def others_changed(w: World) -> World:
    """The same client 0 among clients with other data."""
    rows = w.partition.train
    swapped = (rows[0], *(np.roll(np.concatenate(rows[1:]), 5)[: len(r)] for r in rows[1:]))
    return replace(w, partition=replace(w.partition, train=swapped))


@pytest.mark.parametrize("predict", slow_except(["relation"], ["decision", "relation"]))
@pytest.mark.parametrize("distance", slow_except(["mse"], ["mse", "l2"]))
def test_with_a_of_one_no_other_client_has_a_say(distance: str, predict: str) -> None:
    """Nor where a client comes in late and has no own features yet. With a < 1 others do have a say."""
    for a in (1.0, 0.5):
        w = pfedpm(a=a, lam=5.0, distance=distance, predict=predict)
        (one, *_), (other, *_) = (after_rounds(v).values() for v in (w, others_changed(w)))
        assert same({0: one}, {0: other}) == (a == 1.0)
    alone = after_rounds(local(w))
    assert not same({0: one}, {0: alone[0]})


# Phases -----------------------------------------------------------------------------------------------------------


def test_mixed_features_are_fixed_while_training_and_kept_for_the_test() -> None:
    w = run_cohorts(pfedpm(a=0.25), [ALL] * 2)
    own, common = states(w)[1]["own_means"], w.server.state.features.means
    run(w, [ALL], first=3)
    torch.testing.assert_close(states(w)[1]["mixed"], 0.25 * own + 0.75 * common)
    assert not torch.equal(states(w)[1]["own_means"], own)


def test_the_first_round_knows_no_features() -> None:
    """Nothing pulls, nothing comes down."""
    executor = pfedpm().inline()
    sent = executor.send(ALL)
    assert set(sent.down_bytes.values()) == {0}
    trained = executor.run(TrainTask(1), sent)
    for report in trained.reports:
        assert report.losses["net/align"] == 0 < report.losses["net/ce"] and "relation/mse" not in report.losses
    assert not any(state["seen"].any() for state in states(executor).values())
    executor.fuse(trained)
    (reports,) = run(executor, [ALL], first=2)
    assert all(r.losses["net/align"] > 0 and r.losses["relation/mse"] > 0 for r in reports)


# Clients that lack classes, or come and go --------------------------------------------------------------------------


def test_a_class_that_nobody_has_reported_is_never_predicted() -> None:
    executor = run_cohorts(limited(pfedpm(predict="relation"), [[1], [1], [1], [1]]), [ALL] * 2)
    with executor.host._client(TrainTask(2), 0, "train"):
        scores = executor.host.module.eval().predict(torch.rand(9, 1, 4, 4)).detach()
    assert (scores[:, [0, 2]] == 0).all() and (scores[:, 1] > 0).all() and (scores[:, 1] < 1).all()


# Models of several kinds --------------------------------------------------------------------------------------------


def test_before_there_are_features_the_head_decides_and_the_relation_module_rests() -> None:
    """Scores of 0 would credit all with class 0; and weight decay or a norm layer would move the module."""
    w = pfedpm(predict="relation", training=Training(lr=0.1, weight_decay=0.1, batch_size=4))
    executor, heads = w.inline(), pfedpm(predict="decision", training=w.factory.training).inline()
    before = states(executor)
    for e in (executor, heads):
        run(e, [ALL])
    after = states(executor)
    for client in ALL:
        relation = [key for key in before[client] if key.startswith("relation.")]
        assert relation and all(torch.equal(before[client][key], after[client][key]) for key in relation)
    request = EvalRequest("personal", "trained", ALL, ("test",))
    assert executor.evaluate(request) == heads.evaluate(request)
    run(executor, [ALL], first=2)
    assert any(not torch.equal(before[0][key], states(executor)[0][key]) for key in relation)


def test_a_diverged_client_stays_alone_where_others_have_no_say() -> None:
    """0·NaN is NaN: with a=1, and with λ=0, global features that are not finite do not reach the net."""
    common = Prototypes(torch.full((3, 5), torch.nan), torch.ones(3, dtype=torch.int64))
    for settings in ({"a": 1.0}, {"lam": 0.0}):
        w = pfedpm(**settings)
        module = w.factory.build()
        module.own_means.copy_(torch.rand(3, 5))
        module.own_counts.copy_(torch.tensor([3, 2, 0]))
        module.receive(Message(prototypes=common))
        batch = w.inline().host.shards[0].train.batch(slice(0, 6))
        total = torch.stack(list(module.objective(batch).values())).sum()
        total.backward()
        assert total.isfinite() and all(q.grad is None or q.grad.isfinite().all() for q in module.parameters())


def test_one_pair_alone_is_scored() -> None:
    """Batch normalisation of flat features has no variance to go by with one example and one class."""
    module = pfedpm(predict="relation").factory.build()
    module.receive(Message(prototypes=Prototypes(torch.rand(3, 5), torch.tensor([0, 4, 0]))))
    module.train()
    terms = module.relation_loss((torch.rand(1, 1, 4, 4), torch.tensor([1])))
    assert 0 < float(terms["mse"].detach()) < 1


def test_a_server_of_another_method_is_noticed() -> None:
    module = pfedpm().factory.build()
    with pytest.raises(ValueError, match="pFedPM.*class means"):
        module.receive(Message())
    rule = Server()
    with pytest.raises(ValueError, match="client 2 sent no class features"):
        rule.fuse(rule.init(pfedpm().federation), [Uplink(client=2)])
