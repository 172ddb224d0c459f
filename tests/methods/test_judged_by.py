"""The model that every method is judged by, and when: a table, so that a change of it is seen."""

from __future__ import annotations

import pytest

from pflsim.config.compose import CONFIGS, composed, composing, plain
from ray_actors.prepare import prepare

JUDGED_BY = {
    # the server's model; the phase is that of the personal figures beside it
    "fedavg": ("global", "trained"),
    "fedprox": ("global", "trained"),
    # each client's own, after local training
    "local": ("personal", "trained"),
    "ditto": ("personal", "trained"),
    "fedamp": ("personal", "trained"),
    "fedfcd": ("personal", "trained"),
    "fedfomo": ("personal", "trained"),
    "fedgh": ("personal", "trained"),
    "fedper": ("personal", "trained"),
    "fedrep": ("personal", "trained"),
    "gpfl": ("personal", "trained"),
    "l2gd": ("personal", "trained"),
    "pfedcfr": ("personal", "trained"),
    "pfedme": ("personal", "trained"),
    "pfedpm": ("personal", "trained"),
    "r_pfedpm": ("personal", "trained"),
    # what the server makes for each client: mixtures, cluster models, what a hypernetwork makes
    "fedalp": ("personal", "received"),
    "fesem": ("personal", "received"),
    "heurpfedla": ("personal", "received"),
    "pfedhn": ("personal", "received"),
    "pfedla": ("personal", "received"),
    # the client's own part together with the server's newest: the mean of the other layers, the global class means
    "fedbn": ("personal", "received"),
    "fedproto": ("personal", "received"),
    # the server's model after a step of the client's own
    "per_fedavg": ("personal", "received"),
}


@pytest.mark.parametrize("method", sorted(p.stem for p in (CONFIGS / "method").glob("*.yaml")))
def test_judged_by(method: str) -> None:
    """The class says so, and the run goes by it."""
    with composing([CONFIGS]):
        made = prepare(plain(composed([f"method={method}", "model.hidden=[4]", "clients=4", "rounds=2"], [CONFIGS])))
    module = made.factory.build()
    assert (module.reported_model, module.reported_phase) == JUDGED_BY[method]
    assert (made.meta.reported_model, made.meta.reported_phase) == JUDGED_BY[method]
    assert made.plan.reported_phase == module.reported_phase
