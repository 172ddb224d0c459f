"""What every method keeps, over every file in configs/method: found on disk, so a new method is held to it at once."""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import yaml
from support import METHODS, agree, inline, rounds, same, slow_except, states

import pflsim
from lightning_modules.contract import checks
from lightning_modules.contract.command import maker
from lightning_modules.prepare import PreparedRun
from pflsim.config.compose import CONFIGS
from pflsim.engine.execution import ReplyTask, Sent, TrainTask
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError
from pflsim.messages import payload_bytes
from pflsim.records.checkpoint_read import from_containers
from pflsim.records.checkpoint_write import to_containers
from pflsim.records.trace import tensors_of
from ray_actors.actors_equal import actors_equal_inline
from ray_actors.executor import RayExecutor
from ray_actors.layout import Layout
from ray_actors.resources import ActorPool

SLOW = (checks.batch_norm_works, checks.lockstep_equals_loop)
"""Checks that run in `make test-slow` only, and for some methods; lockstep of all is in `test_lockstep.py`."""
FAST = [check for check in checks.CHECKS if check not in SLOW]


@cache
def _made(method: str, overrides: tuple[str, ...], dtype: torch.dtype) -> PreparedRun:
    del dtype  # part of the key only
    return maker(method, (), [CONFIGS])(*overrides)


def job(method: str, *overrides: str) -> PreparedRun:
    """A small run of a method, from its YAML."""
    return _made(method, overrides, torch.get_default_dtype())


@pytest.fixture(params=support.METHOD_PARAMS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_part_of_a_method_has_its_name(method: str) -> None:
    """Client file, server file and YAML are named alike, where they exist; or the YAML is another's with settings."""
    nodes = {name: yaml.safe_load((CONFIGS / "method" / f"{name}.yaml").read_text()) for name in METHODS}
    package, _, name = nodes[method]["client"]["_target_"].rpartition(".")[0].rpartition(".")
    assert package == "lightning_modules.methods"
    assert (CONFIGS.parent / "lightning_modules" / "methods" / f"{name}.py").exists()
    if name != method:
        assert nodes[method].items() > nodes[name].items()


@pytest.mark.parametrize(
    ("method", "check"),
    slow_except([*product(support.IN_BOTH_TIERS, FAST)], [*product(METHODS, FAST), *product(support.KINDS, SLOW)]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_contract(method: str, check: Callable[[checks.Make], None]) -> None:
    support.check_contract(method, check, partial(job, method))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


@pytest.mark.parametrize("method", slow_except({"fedcp", "floco", "fedtgp", "pfedhn"}, METHODS))
def test_tensors_of_a_method_have_the_type_of_the_model(method: str) -> None:
    executor = inline(job(method, "model=support.Double"))
    rounds(executor, 2, 4)
    found = {t.dtype for t in tensors_in((states(executor), executor.server_state())) if t.is_floating_point()}
    assert found == {torch.float64}


OTHER_TASKS = [*product(METHODS, ("regression", "multilabel"))]
IN_FAST = {("ditto", "regression"), ("fedrep", "multilabel"), ("fedproto", "regression")}


@pytest.mark.parametrize(
    "check",
    [
        checks.training_helps,
        checks.trainer_equals_loop,
        checks.lockstep_equals_loop,
        checks.evaluated_together_as_alone,
    ],
)
@pytest.mark.parametrize(("method", "task"), slow_except(IN_FAST, OTHER_TASKS))
def test_other_tasks(method: str, task: str, check: Callable[[checks.Make], None]) -> None:
    """A method trains for each task as under a Trainer and in lockstep, or says that it needs classes."""
    settings = [f"task={task}", *(["task.standardize_target=true", "lr=0.05"] if task == "regression" else [])]
    if job(method).factory.build().needs_classes:
        with pytest.raises(SettingsError, match=f"method={method}.*task={task}.*task=classification.*: apfl, .*"):
            job(method, *settings)
        return
    if method == "fedbabu" and check is checks.training_helps:
        pytest.skip("it fine-tunes before the first evaluation too")
    with suppress(checks.Skipped), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Trainer
        check(lambda *overrides: job(method, *overrides, *settings))


def language(method: str, folder: Path) -> checks.Make:
    """Return what prepares a small run with a causal model on the texts of four authors."""
    for client, line in enumerate(("to be or not to be", "all the world's a stage", "the rest", "if music be")):
        (folder / "docs" / str(client)).mkdir(parents=True)
        for number in range(10):
            (folder / "docs" / str(client) / f"{number}.txt").write_text(f"{line} {number * client}")
    words = [
        "task=language_model", "data=text", f"data.path={folder / 'docs'}", "data.tokens=characters", "data.length=12",
        "model=text_transformer", "model.width=8", "batch_size=4", "lr=0.2", *["lora.r=2"] * ("lora" in method),
        *["method.ranks=[1,2]"] * (method in ("hetlora", "flexlora")),
    ]  # fmt: skip
    return maker(method, words, [CONFIGS])


@pytest.mark.parametrize("check", [check for check in checks.CHECKS if check is not checks.batch_norm_works])
@pytest.mark.parametrize("method", slow_except({"ditto"}, support.OF_TOKENS))
def test_next_tokens(method: str, check: Callable[[checks.Make], None], tmp_path: Path) -> None:
    with suppress(checks.Skipped), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Trainer
        check(language(method, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("method", support.OF_TOKENS)
def test_next_tokens_on_actors(method: str, pool: ActorPool, tmp_path: Path) -> None:
    actors_equal_inline(language(method, tmp_path), pool)


@pytest.mark.parametrize("method", support.RUN_PARAMS)
def test_equal_on_actors(method: str, pool: ActorPool) -> None:
    actors_equal_inline(partial(job, method), pool)


@pytest.mark.parametrize("method", slow_except({"fedbabu", "r_pfedpm"}, [m for m in METHODS if m != "knn_per"]))
def test_loaded_models_predict_as_recorded(method: str, tmp_path: Path) -> None:
    """FedBABU adapts its model to the client's examples; R-pFedPM branches on values. kNN-Per needs the examples."""
    settings = [*checks.SMALL, "partition=dirichlet", f"run_dir={tmp_path / 'run'}", "progress=none"]
    support.check_loaded(
        pflsim.run(method=method, overrides=settings), 1, 3, export=method in {*support.KINDS, "fedbabu"}
    )


@pytest.mark.parametrize("method", support.RUN_PARAMS)
def test_newcomers(method: str, pool: ActorPool, tmp_path: Path) -> None:
    """A client that is held out is in no round; it joins in the end, equally inline and on actors."""
    made = job(method, "eval.holdout_clients=1")
    on_actors = RayExecutor(made, Layout(((0, 3), (1, 2)), 1, 0), pool)
    on_actors.start()
    alone, found = inline(made), []
    before = states(alone)[3]
    for executor in (alone, on_actors):
        records = support.Records()
        Simulation(executor, made.plan, tmp_path / str(len(found)), records).run()
        found.append(records)
    assert found[0].joined == found[1].joined and same(states(alone), states(on_actors))
    assert [info.id for info in made.federation.clients] == [0, 1, 2]
    for record in found[0].records:
        rows = {row.client for row in record.evaluations}
        assert {*record.cohort, *record.down_bytes, *rows, *(r.client for r in record.reports)} <= {0, 1, 2}
    (joined,) = found[0].joined
    assert joined.down_bytes == {3: payload_bytes(alone.server.downlinks([3], joining=True)[3])}
    for rows in (joined.received, joined.trained):
        assert {(row.client, row.split) for row in rows} == {(3, "test"), (3, "val")}
        assert all(row.total > 0 and row.loss == row.loss for row in rows)
    assert not same({3: before}, {3: states(alone)[3]})

    no_epochs, records = inline(made), support.Records()
    Simulation(no_epochs, support.planned(made.plan, eval_finetune_epochs=0), tmp_path / "none", records).run()
    (left,) = records.joined
    assert left.received == joined.received
    assert [(r.correct, r.loss) for r in left.trained] == [(r.correct, r.loss) for r in left.received]
    assert left.trained != joined.trained


# States that are saved and read back ---------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(to_containers(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("method", support.METHOD_PARAMS)
def test_a_state_that_was_read_back_goes_on_to_the_bit(method: str) -> None:
    """After every round, also before the first: the same state, the same messages, the same fusion.

    A fusion changes nothing that it is given.
    """
    made = job(method, "rounds=4", "fraction=0.5", "local_epochs=1")
    rule, executor = made.rule, inline(made)
    example = rule.init(made.federation)
    if rule.initial_round:
        executor.fuse(executor.run(ReplyTask(), Sent.nothing(range(4))))
    for number, cohort in enumerate(made.plan.cohorts, start=1):
        state = executor.server.state
        back = from_containers(type(example), through_a_file(state))
        agree(state, back)
        for one, other in (
            (rule.downlinks(state, cohort), rule.downlinks(back, cohort)),
            ({c: rule.join(state, c) for c in (0, 4)}, {c: rule.join(back, c) for c in (0, 4)}),
        ):
            agree(*({c: tensors_of(m) for c, m in side.items()} for side in (one, other)))
        agree(dict(rule.numbers(state)), dict(rule.numbers(back)))
        trained = executor.run(TrainTask(number), executor.send(cohort))
        ups = sorted((up for each in trained.uplinks for up in executor.uplinks(each)), key=lambda up: up.client)
        before = deepcopy(([tensors_of(up) for up in ups], to_containers(state)))
        agree(rule.fuse(state, ups), rule.fuse(back, ups))
        agree(before, ([tensors_of(up) for up in ups], to_containers(state)))
        executor.fuse(trained)
