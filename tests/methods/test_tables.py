"""Tables over the methods: what each reports, sends and refuses, its defaults, and what it reduces to."""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import get_class
from support import METHOD_PARAMS, METHODS, rounds, same, slow_except, states

from lightning_modules.contract.checks import BATCH_NORM, equal, inline
from lightning_modules.contract.command import maker
from lightning_modules.prepare import PreparedRun
from pflsim.config.compose import CONFIGS
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.records.checkpoint_write import to_containers as plain

NET, BODY, HEAD = "net.body net.head", "net.body", "net.head"
MEANS = "prototypes"
ALL = (0, 1, 2, 3)
LA = {"embedding": 100, "hidden": (100, 100), "normaliser": "softmax", "hn_lr": 0.3, "unit": "module"}
LA |= {"start": "random", "update_kept": True}
FCD = {"lam": 1.0, "alternate": "batch", "feature_alignment": True, "decision_fusion": True, "hierarchical": True}
PM = {"a": 0.5, "lam": 1.0, "distance": "mse", "alternate": "round", "relation_hidden": 50}
ALP = {"groups": 3, "beta": 0.6, "warmup": 0.5, "unit": "module", "delta": "norm", "gamma": "all", "onto": "mixture"}
HN = {"embedding": None, "hidden": (100, 100, 100), "hn_lr": None, "hn_momentum": 0.9, "hn_weight_decay": 0.001}
AMP = {"alpha": 1e4, "sigma": 1e6, "clamp": False}
TGP = {"max_margin": 100.0, "server_epochs": 100, "server_batch": 10, "server_hidden": None}
DECOMP = {"personal_epochs": 2, "shared_epochs": None, "linear_rank": 0.4, "conv_rank": 0.6, "rank_from": "min"}
DECOMP |= {"scale": "program", "weighting": "samples"}
TABLE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # the model that is reported, what round 3 sends to a client and what the client replies, defaults of all settings
    "apfl": ("personal trained", NET, NET, {"alpha": 0.5, "adaptive": True}),
    "ditto": ("personal trained", NET, NET, {"lam": 1.0}),
    "fedadagrad": ("global trained", NET, NET, {}),
    "fedadam": ("global trained", NET, NET, {}),
    "fedala": ("personal received", NET, NET, {"p": 1, "share": 0.8, "eta": 1.0, "threshold": 0.1}),
    "fedalp": ("personal received", NET, NET, ALP),
    "fedamp": ("personal trained", NET, NET, {"lam": 1.0, "unit": "model", **AMP}),
    "fedas": ("personal trained", BODY, f"{BODY} number/fisher_trace", {"align_epochs": 1, "align_lr": 0.01}),
    "fedavg": ("global trained", NET, NET, {}),
    "fedavgm": ("global trained", NET, NET, {}),
    "fedbabu": ("personal received", BODY, BODY, {"finetune_epochs": 5, "finetune": "both"}),
    "fedbn": ("personal received", NET, NET, {}),
    "fedcac": ("personal received", f"{NET} number/customised", f"extra/net {NET}", {"tau": 0.5, "beta": 100}),
    "fedcp": (*("personal received", *[f"global_head {BODY} policy"] * 2), {"lam": 5.0, "gumbel": False}),
    "feddbe": (
        *("personal received", f"extra/mean_features {NET}", NET),
        {"kappa": 50.0, "mean_momentum": 1.0, "personal_vector": True},
    ),
    "feddecomp": ("personal received", NET, NET, DECOMP),
    "feddyn": ("global trained", NET, NET, {"alpha": 0.01}),
    "fedfcd": (
        *("personal trained", f"global_head {MEANS}", MEANS),
        {**FCD, "server_lr": 0.01, "server_epochs": 1, "server_batch": 10, "prototype_weighting": "samples"},
    ),
    "fedfomo": (
        *("personal trained", "extra/candidate", f"{NET} number/usefulness"),
        {"baseline": "previous", "models": 5, "epsilon": 0.3, "epsilon_decay": 0.05},
    ),
    "fedgh": ("personal trained", HEAD, MEANS, {"server_lr": 0.01, "server_epochs": 1, "server_batch": 1}),
    "fedpac": (
        *("personal received", f"{NET} {MEANS}", f"extra/weighted_means {NET} number/variance {MEANS}"),
        {"lam": 1.0, "head_epochs": 1, "head_lr": 0.1, "min_weight": 0.001},
    ),
    "fedper": ("personal trained", BODY, BODY, {"base": "body"}),
    "fedproto": ("personal received", MEANS, MEANS, {"lam": 1.0, "predict": "prototype"}),
    "fedprox": ("global trained", NET, NET, {"mu": 0.001}),
    "fedrep": ("personal trained", BODY, BODY, {"head_epochs": 10, "body_epochs": None}),
    "fedrod": ("personal trained", NET, NET, {}),
    "fedselect": (
        *("personal received", NET, f"extra/net {NET}"),
        {"p": 0.25, "alpha": 0.8, "every": 1, "reference": "round"},
    ),
    "fedtgp": ("personal received", MEANS, MEANS, {"lam": 1.0, "predict": "prototype", "server_lr": 0.01, **TGP}),
    "fedyogi": ("global trained", NET, NET, {}),
    "fesem": ("personal received", NET, NET, {"groups": 3}),
    "floco": (
        *("personal received", f"extra/alpha {NET}", NET),
        {"endpoints": 10, "rho": 0.1, "sampling": "simplex", "warmup": 0.5},
    ),
    "gpfl": ("personal trained", f"embeddings {BODY} valve", f"embeddings {BODY} valve", {"lam": 0.01, "mu": 0.1}),
    "heurpfedla": ("personal received", BODY, NET, {"k": 1, **LA}),
    "ifca": ("personal received", "extra/model", f"{NET} number/cluster", {"groups": 3}),
    "l2gd": ("personal trained", NET, "", {"lam": 1.0, "p": 0.2}),
    "lg_fedavg": ("personal received", HEAD, HEAD, {}),
    "local": ("personal trained", "", "", {}),
    "moon": ("global trained", NET, NET, {"mu": 1.0, "temperature": 0.5}),
    "per_fedavg": ("personal received", NET, NET, {"alpha": None, "variant": "fo", "delta": 0.001}),
    "pfedcfr": ("personal trained", NET, NET, {"lam": 1.0, "mu": 0.001, "r": "body", "unit": "module", **AMP}),
    "pfedfda": (
        *("personal received", *[f"extra/class_means extra/covariance {BODY}"] * 2),
        {"single_beta": False, "min_count": 2, "cov_ridge": 0.0001, "full_last_round": False},
    ),
    "pfedhn": ("personal received", NET, NET, HN),
    "pfedla": ("personal received", NET, NET, {"k": 0, **LA}),
    "pfedme": (
        *("personal trained", NET, NET),
        {"lam": None, "inner_steps": 5, "personal_lr": 0.09, "beta": 1.0},
    ),
    "pfedpm": ("personal trained", MEANS, MEANS, {"predict": "decision", **PM}),
    "r_pfedpm": ("personal trained", MEANS, MEANS, {"predict": "relation", **PM}),
    "scaffold": ("global trained", f"extra/net {NET}", f"extra/net {NET}", {"server_lr": 1.0}),
}
OF_SEVERAL_SHAPES = {"fedfcd", "fedgh", "fedproto", "fedtgp", "lg_fedavg", "local", "pfedpm", "r_pfedpm"}
"""Methods for clients with models of their own."""
NO_GLOBAL = {"fedfcd", "fedfomo", "fedgh", "fedproto", "fedtgp", "fesem", "gpfl", "heurpfedla", "ifca", "local"}
NO_GLOBAL |= {"fedcp", "fedpac", "pfedfda"}
NO_GLOBAL |= {"pfedhn", "pfedla", "pfedpm", "r_pfedpm"}
"""Methods without a model for all clients."""


@cache
def job(method: str, *overrides: str) -> PreparedRun:
    return maker(method, (), [CONFIGS])(*overrides)


def contents(message: Message) -> str:
    """The names in a message, in short."""
    names = {".".join(key.split(".")[: 2 if key.startswith("net.") else 1]) for key in message.weights}
    names |= {f"extra/{key.split('/')[0].split('.')[0]}" for key in message.extra}
    names |= {f"number/{key.split('/')[0]}" for key in message.numbers}
    return " ".join(sorted(names | ({MEANS} if message.prototypes is not None else set())))


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_what_is_reported_and_what_travels(method: str) -> None:
    """The class, the prepared run and the plan agree with the table."""
    made = job(method)
    reported, down, up, _ = TABLE[method]
    module = made.factory.build()
    for found in (module, made.meta):
        assert f"{found.reported_model} {found.reported_phase}" == reported  # type: ignore[attr-defined]
    assert made.plan.meta.reported_phase == module.reported_phase
    executor = inline(made)
    rounds(executor, 2, 4)
    sent = executor.send(ALL)
    (handle,) = executor.run(TrainTask(3), sent).uplinks
    messages = [executor.downlink(sent.downlinks[c]) for c in ALL]
    assert {contents(m) for m in messages} == {down} or method == "heurpfedla"  # each client keeps a unit of its own
    assert {contents(m) for m in executor.uplinks(handle)} == {up}
    assert (executor.evaluate(EvalRequest("global", "received", (0,), ("test",), 2)) == []) == (method in NO_GLOBAL)


@pytest.mark.parametrize("method", METHODS)
def test_defaults(method: str) -> None:
    """Of every setting of a method, in the signatures of its two classes or in its file."""
    node = yaml.safe_load((CONFIGS / "method" / f"{method}.yaml").read_text())
    sides = [node.pop(side) for side in ("client", "server")]
    node.pop("search", None)
    node.pop("defaults", None)
    found = {}
    for side in sides:
        for parameter in inspect.signature(get_class(side["_target_"])).parameters.values():
            if parameter.default is not parameter.empty:
                found[parameter.name] = parameter.default
    assert {**found, **node} == TABLE[method][3]


REFUSED = """
apfl: alpha=-0.1 alpha=1.1
ditto: lam=-0.1
fedala: p=-1 p=3 share=0 share=1.5 eta=-1 threshold=0
fedalp: groups=0 groups=5 beta=-0.1 beta=1.5 beta=nan warmup=0 warmup=1 warmup=nan
fedas: align_epochs=-1 align_lr=0
fedbabu: finetune_epochs=-1 finetune=tail
fedcac: tau=-0.1 tau=1.1 beta=0
fedcp: lam=-1
feddbe: kappa=-1 mean_momentum=0 mean_momentum=1.5
feddecomp: personal_epochs=-1 shared_epochs=-1 linear_rank=0 conv_rank=1.1 rank_from=in scale=two weighting=all
feddyn: alpha=0 alpha=-1 alpha=41
fedfcd: lam=-1 server_lr=0 server_epochs=0 server_batch=0 alternate=step prototype_weighting=all
fedfomo: models=0 epsilon=1.5 epsilon_decay=-0.1
fedgh: server_lr=0 server_epochs=0 server_batch=0
fedpac: lam=-1 head_epochs=0 head_lr=0 min_weight=1 min_weight=-0.1
fedper: base=3 base=-1 base=1.5 base=tail
fedproto: lam=-1 predict=nearest
fedrep: head_epochs=0 body_epochs=0 body_epochs=-1
fedselect: p=-0.1 p=1.1 alpha=-0.1 alpha=1.1 every=0 reference=last
fedtgp: max_margin=-1 server_lr=0 server_epochs=0 server_batch=0 server_hidden=0
fesem: groups=0 groups=-1 groups=5
floco: endpoints=0 rho=-0.1 sampling=l2 warmup=-0.1 warmup=1.5
gpfl: lam=-1 mu=-1
ifca: groups=0
l2gd: lam=-1 p=1 p=-0.1 p=nan
moon: mu=-0.1 temperature=0
per_fedavg: alpha=-0.1 delta=0 delta=9e-7
pfedcfr: r=3 r=-1 r=1.5 r=tail
pfedfda: min_count=0 cov_ridge=-1
pfedhn: embedding=0 hidden=[5,0] hn_lr=-1 hn_lr=nan hn_momentum=-0.5 hn_momentum=1 hn_weight_decay=-0.1
pfedla: k=3 k=-1 hn_lr=-0.1 hn_lr=nan embedding=0 hidden=[5,0]
pfedme: lam=0 lam=-1 lam=1e6 inner_steps=0 personal_lr=0 personal_lr=0.5 beta=0
pfedpm: a=1.5 a=-0.1 lam=-1 relation_hidden=0 distance=cosine predict=both alternate=never
scaffold: server_lr=0
"""


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1], ids=lambda line: line.partition(":")[0])
def test_settings_that_are_refused(line: str) -> None:
    """In one line that names the setting."""
    method, _, settings = line.partition(": ")
    for setting in settings.split():
        with pytest.raises(SettingsError, match=rf"method\.{setting.partition('=')[0]}") as error:
            inline(job(method, f"method.{setting}"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_models_of_several_shapes(method: str) -> None:
    """Some methods take bodies of several depths, with features of one shape; others name the client that differs."""
    if method in OF_SEVERAL_SHAPES:
        executor = inline(job(method, "model.variants=[{hidden:[7,5]},{hidden:[5]}]"))
        rounds(executor, 2, 4)
        assert [("net.body.fc2.weight" in states(executor)[c]) for c in ALL] == [True, False] * 2
        rows = executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 2))
        assert all(row.loss == row.loss for row in rows)
    if method != "local":
        with pytest.raises(SettingsError, match="client 1"):
            job(method, "model.variants=[{hidden:[5]},{hidden:[6]}]")


REDUCTIONS = [
    # settings of a method, the method that it then is to the bit, its model in the state, whether it always is
    ("apfl alpha=1", "local", "personal", False),
    ("apfl alpha=0.7", "fedavg", "net", True),
    ("ditto lam=0", "local", "personal", False),
    ("ditto lam=3", "fedavg", "net", True),
    ("fedala p=0", "fedavg", "net", False),
    ("fedala eta=0", "fedavg", "net", False),
    ("fedbn", "fedavg", "net", True),
    ("fedcac tau=0", "fedavg", "net", False),
    ("feddbe kappa=0 personal_vector=false", "fedavg", "net", False),
    ("feddecomp personal_epochs=0", "fedavg", "net", False),
    ("fedfcd feature_alignment=false decision_fusion=false hierarchical=false", "local", "net", False),
    ("fedper base=1.0", "fedavg", "net", False),
    ("fedper base=0", "local", "net", False),
    ("fedproto lam=0", "local", "net", False),
    ("fedprox mu=0", "fedavg", "net", False),
    ("fedtgp lam=0 server_epochs=2", "local", "net", False),
    ("heurpfedla k=0", "pfedla", "net", False),
    ("ifca groups=1", "fedavg", "net", False),
    ("l2gd p=0", "local", "net", False),
    ("moon mu=0", "fedavg", "net", False),
    ("pfedcfr r=1 unit=model", "fedamp", "net", False),
    ("pfedpm lam=0", "local", "net", False),
    ("pfedpm lam=0 alternate=batch", "local", "net", False),
]
RUNS = {
    "mlp": ("local_epochs=null", "local_steps=5", "momentum=0.5", "lr_decay=0.9"),
    "batch_norm": BATCH_NORM,
}


@cache
def ends(method: str, settings: tuple[str, ...], run: str, name: str = "net") -> dict[int, dict[str, torch.Tensor]]:
    """A model of every client after three rounds of three clients each."""
    executor = inline(job(method, *RUNS[run], *(f"method.{setting}" for setting in settings)))
    rounds(executor, 3, 4, fraction=0.75)
    return {
        client: {key.removeprefix(name): value for key, value in state.items() if key.startswith(f"{name}.")}
        for client, state in states(executor).items()
    }


@pytest.mark.parametrize("run", slow_except({"mlp"}, RUNS))
@pytest.mark.parametrize(("which", "other", "name", "always"), REDUCTIONS, ids=lambda value: str(value))
def test_reductions(which: str, other: str, name: str, always: bool, run: str) -> None:
    """To the bit, running statistics included; with the defaults it is another method."""
    method, *settings = which.split()
    if run == "batch_norm" and which in ("fedbn", "apfl alpha=1", "fedcac tau=0"):
        pytest.skip("running statistics are of the client's own layers, or of the mixture")
    expected = ends(other, (), run)
    assert same(ends(method, tuple(settings), run, name), expected)
    assert same(ends(method, (), run, name), expected) == always


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_newcomers_start_from_the_global_model(method: str) -> None:
    """Where there is one, unless the method adapts it to the client's examples or adds the client's own head."""
    executor = inline(job(method, "eval.holdout_clients=1"))
    rounds(executor, 2, 3)
    joining = EvalRequest("personal", "received", (3,), ("test",), 2, joining=True)
    rows = executor.evaluate(joining, executor.send([3], joining=True))
    for common in executor.evaluate(EvalRequest("global", "received", (3,), ("test",), 2)):
        assert (rows[0].loss == common.loss) == (method not in ("fedbabu", "fedrod", "per_fedavg"))


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_a_fusion_changes_nothing_it_was_given(method: str) -> None:
    """Neither the state nor the messages, so that it can be run again; a second run gives the same."""
    executor = inline(job(method))
    rounds(executor, 2, 4)
    (handle,) = executor.run(TrainTask(3), executor.send(ALL)).uplinks
    rule, state, uplinks = executor.server.rule, executor.server.state, executor.uplinks(handle)
    before = deepcopy([plain(state), *map(plain, uplinks)])
    fused = [plain(rule.fuse(state, uplinks)) for _ in range(2)]
    assert equal([plain(state), *map(plain, uplinks)], before) and equal(*fused)


@pytest.mark.parametrize("method", ["fedbabu", "fedrep"])
def test_a_body_without_parameters_is_refused(method: str) -> None:
    with pytest.raises(SettingsError, match=f"(?i){method}.*body"):
        inline(job(method, "model.hidden=[]"))
