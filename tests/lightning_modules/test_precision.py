"""precision=bf16: the nets compute in bfloat16, everything else in float32."""

from pathlib import Path

import pytest
import torch
from support import KINDS, Records, prepared, slow_except, states
from torch.nn import functional

from lightning_modules.contract.checks import inline
from lightning_modules.hosts.inline import InlineExecutor
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError

SMALL = ["data=digits", "clients=5", "rounds=2", "batch_size=8", "model.hidden=[8]"]


def run(folder: Path, *overrides: str) -> tuple[InlineExecutor, Records]:
    made = prepared(*SMALL, *overrides)
    executor, records = inline(made), Records()
    Simulation(executor, made.plan, folder, records).run()
    return executor, records


def step_by_hand(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, lr: float) -> torch.Tensor:
    """A linear classifier's weights after a step whose products are in bfloat16; softmax and update in float32."""
    low = torch.bfloat16
    scores = (x.to(low) @ weight.to(low).T + bias.to(low)).float()
    error = (torch.softmax(scores, 1) - functional.one_hot(y, len(bias))) / len(y)
    return weight - lr * (error.to(low).T @ x.to(low)).float()


@pytest.mark.parametrize("lockstep", ["lockstep=true", "lockstep=false"])
def test_a_step_by_hand(lockstep: str, tmp_path: Path) -> None:
    given = ["method=local", "model.hidden=[]", "rounds=1", "local_steps=1", "lr=0.5", "batch_size=900", lockstep]
    executor, _ = run(tmp_path / "low", *given, "precision=bf16")
    exact, _ = run(tmp_path / "exact", *given)
    for client, own in executor.host.shards.items():
        start = executor.factory.build().state_dict()
        x, y = own.train.batch(slice(None))
        name, bias = (next(key for key in start if key.endswith(end)) for end in ("weight", "bias"))
        expected = step_by_hand(start[name], start[bias], x.flatten(1), y, 0.5)
        found, other = (states(each)[client][name] for each in (executor, exact))
        assert found.dtype == torch.float32
        # a few elements are rounded to the other side, since sums have another order
        assert float((found - expected).abs().median()) < 0.1 * float((found - other).abs().median())


@pytest.mark.parametrize("method", slow_except(["fedavg", "fedproto"], [*KINDS, "fedproto", "gpfl", "pfedla"]))
@pytest.mark.slow
def test_states_and_messages_are_float32(method: str, tmp_path: Path) -> None:
    executor, records = run(tmp_path / "low", f"method={method}", "precision=bf16")
    exact, plainly = run(tmp_path / "exact", f"method={method}")
    for client, state in states(executor).items():
        expected = states(exact)[client]
        assert {name: value.dtype for name, value in state.items()} == {k: v.dtype for k, v in expected.items()}
    for low, high in zip(records.records, plainly.records, strict=True):
        assert [report.up_bytes for report in low.reports] == [report.up_bytes for report in high.reports]
    losses = [sum(row.loss for row in found.records[-1].evaluations) for found in (records, plainly)]
    assert losses[0] == pytest.approx(losses[1], rel=0.2) and losses[0] != losses[1]


@pytest.mark.parametrize("lockstep", ["lockstep=true", "lockstep=false"])
@pytest.mark.slow
def test_loss_terms_are_summed_in_float32(lockstep: str, tmp_path: Path) -> None:
    """In bfloat16, a term of 2.3 added to 128 or more would count as 2."""
    given = ["method=gpfl", "rounds=1", "local_steps=100", "lr=1e-5", "method.mu=0", "batch_size=5", lockstep]
    low, high = (run(tmp_path / p, *given, f"precision={p}")[1].records[0].reports for p in ("bf16", "ieee"))
    for found, exact in zip(low, high, strict=True):
        assert found.losses["ce"] == pytest.approx(exact.losses["ce"], rel=0.002)
        assert found.losses["angle"] == pytest.approx(exact.losses["angle"], rel=0.01)


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_lockstep_and_loop_differ_by_rounding(method: str, tmp_path: Path) -> None:
    losses = []
    for how in ("true", "false"):
        _, found = run(tmp_path / how, f"method={method}", f"lockstep={how}", "precision=bf16")
        losses.append([row.loss for row in found.records[-1].evaluations])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_tf32_needs_a_gpu() -> None:
    with pytest.raises(SettingsError, match="precision=tf32"):
        prepared(*SMALL, "precision=tf32")
