"""The model that each method reports, and when it is evaluated: a table, so that a change is noticed."""

from __future__ import annotations

import pytest

from lightning_modules.prepare import prepare
from pflsim.config.compose import CONFIGS, composed, composing, to_settings

REPORTED = {
    # the server's model; the phase is that of the personal results
    "fedavg": ("global", "trained"),
    "feddyn": ("global", "trained"),
    "fedprox": ("global", "trained"),
    "moon": ("global", "trained"),
    "scaffold": ("global", "trained"),
    # the client's model after local training
    "local": ("personal", "trained"),
    "apfl": ("personal", "trained"),
    "ditto": ("personal", "trained"),
    "fedas": ("personal", "trained"),
    "feddbe": ("personal", "received"),
    "fedamp": ("personal", "trained"),
    "fedfcd": ("personal", "trained"),
    "fedfomo": ("personal", "trained"),
    "fedgh": ("personal", "trained"),
    "fedper": ("personal", "trained"),
    "fedrep": ("personal", "trained"),
    "fedrod": ("personal", "trained"),
    "gpfl": ("personal", "trained"),
    "l2gd": ("personal", "trained"),
    "pfedcfr": ("personal", "trained"),
    "pfedme": ("personal", "trained"),
    "pfedpm": ("personal", "trained"),
    "r_pfedpm": ("personal", "trained"),
    # the model that the server makes for each client: a mixture, a cluster's model, a hypernetwork's output
    "fedalp": ("personal", "received"),
    "fesem": ("personal", "received"),
    "heurpfedla": ("personal", "received"),
    "ifca": ("personal", "received"),
    "pfedhn": ("personal", "received"),
    "pfedla": ("personal", "received"),
    # private layers with the newest shared ones; the trained net with the newest global class means
    "fedbn": ("personal", "received"),
    "lg_fedavg": ("personal", "received"),
    "fedproto": ("personal", "received"),
    "fedtgp": ("personal", "received"),
    # the server's model after one local step
    "per_fedavg": ("personal", "received"),
    # the received model, fine-tuned on a copy
    "fedbabu": ("personal", "received"),
    # the mixture of the received with the own model
    "fedala": ("personal", "received"),
}


@pytest.mark.parametrize("method", sorted(p.stem for p in (CONFIGS / "method").glob("*.yaml")))
def test_reported_model(method: str) -> None:
    """The class, the prepared run and the plan agree with the table."""
    with composing([CONFIGS]):
        made = prepare(
            to_settings(composed([f"method={method}", "model.hidden=[4]", "clients=4", "rounds=2"], [CONFIGS]))
        )
    module = made.factory.build()
    assert (module.reported_model, module.reported_phase) == REPORTED[method]
    assert (made.meta.reported_model, made.meta.reported_phase) == REPORTED[method]
    assert made.plan.reported_phase == module.reported_phase
