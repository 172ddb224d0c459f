"""Tables over the methods: what each reports, sends and refuses, and what it reduces to."""

import re
from dataclasses import asdict
from functools import cache

import pytest
import torch
from support import ALL, METHOD_PARAMS, METHODS, prepared, refusing, rounds, same, slow_except, states

from lightning_modules.contract.checks import BATCH_NORM, inline, newcomers_join
from lightning_modules.contract.command import maker
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.checks import settings_from
from pflsim.config.compose import CONFIGS, parse
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message

NET, BODY, HEAD = "net.body net.head", "net.body", "net.head"
MEANS = "prototypes"
TABLE = {
    # the model that is reported, what round 3 sends to a client and what the client replies
    "apfl": ("personal trained", NET, NET),
    "apple": ("personal trained", "extra/core extra/p_0", "core"),
    "cfl": ("personal received", NET, NET),
    "ditto": ("personal trained", NET, NET),
    "fd": ("personal trained", MEANS, MEANS),
    "fedadagrad": ("global trained", NET, NET),
    "fedadam": ("global trained", NET, NET),
    "fedala": ("personal received", NET, NET),
    "fedalp": ("personal received", NET, NET),
    "fedamp": ("personal trained", NET, NET),
    "fedas": ("personal trained", BODY, f"{BODY} number/fisher_trace"),
    "fedavg": ("global trained", NET, NET),
    "fedavgm": ("global trained", NET, NET),
    "fedbabu": ("personal received", BODY, BODY),
    "fedbn": ("personal received", NET, NET),
    "fedcac": ("personal received", f"{NET} number/customised", f"extra/net {NET}"),
    "fedcp": ("personal received", *[f"global_head {BODY} policy"] * 2),
    "feddbe": ("personal received", f"extra/mean_features {NET}", NET),
    "feddecomp": ("personal received", NET, NET),
    "feddyn": ("global trained", NET, NET),
    "fedem": ("personal received", f"{NET} others", f"{NET} others"),
    "fedfcd": ("personal trained", f"global_head {MEANS}", MEANS),
    "fedfomo": ("personal trained", "extra/candidate", f"{NET} number/usefulness"),
    "fedgh": ("personal trained", HEAD, MEANS),
    "fedmrl": ("personal trained", "common", "common"),
    "fedpac": ("personal received", f"{NET} {MEANS}", f"extra/weighted_means {NET} number/variance {MEANS}"),
    "fedper": ("personal trained", BODY, BODY),
    "fedphp": ("personal received", NET, NET),
    "fedproto": ("personal received", MEANS, MEANS),
    "fedprox": ("global trained", NET, NET),
    "fedrep": ("personal trained", BODY, BODY),
    "fedrod": ("personal trained", NET, NET),
    "fedselect": ("personal received", NET, f"extra/net {NET}"),
    "fedtgp": ("personal received", MEANS, MEANS),
    "fedyogi": ("global trained", NET, NET),
    "fesem": ("personal received", NET, NET),
    "floco": ("personal received", f"extra/alpha {NET}", NET),
    "fml": ("personal trained", "common", "common"),
    "gpfl": ("personal trained", f"embeddings {BODY} valve", f"embeddings {BODY} valve"),
    "heurpfedla": ("personal received", BODY, NET),
    "ifca": ("personal received", "extra/model", f"{NET} number/cluster"),
    "knn_per": ("personal received", NET, NET),
    "l2gd": ("personal trained", NET, ""),
    "lg_fedavg": ("personal received", HEAD, HEAD),
    "local": ("personal trained", "", ""),
    "moon": ("global trained", NET, NET),
    "per_fedavg": ("personal received", NET, NET),
    "pfedcfr": ("personal trained", NET, NET),
    "pfedfda": ("personal received", *[f"extra/class_means extra/covariance {BODY}"] * 2),
    "pfedhn": ("personal received", NET, NET),
    "pfedla": ("personal received", NET, NET),
    "pfedme": ("personal trained", NET, NET),
    "pfedpm": ("personal trained", MEANS, MEANS),
    "r_pfedpm": ("personal trained", MEANS, MEANS),
    "scaffold": ("global trained", f"extra/net {NET}", f"extra/net {NET}"),
}
OF_SEVERAL_SHAPES = {"fedfcd", "fedgh", "fedproto", "fedtgp", "lg_fedavg", "pfedpm", "r_pfedpm"}
OF_ANY_SHAPES = {"fd", "fedmrl", "fml", "local"}
"""Methods for clients with models of their own."""
NO_GLOBAL = {"fedfcd", "fedfomo", "fedgh", "fedproto", "fedtgp", "fesem", "gpfl", "heurpfedla", "ifca", "local"}
NO_GLOBAL |= {"apple", "cfl", "fd", "fedcp", "fedpac", "pfedfda"}
NO_GLOBAL |= {"pfedhn", "pfedla", "pfedpm", "r_pfedpm"}
"""Methods without a model for all clients."""
JOINING = {"cfl": "extra/centre", "fedcac": NET, "fesem": "extra/centre", "floco": NET, "heurpfedla": NET}
"""What a newcomer is sent, where it is something else than a client of the federation."""


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
    reported, down, up = TABLE[method]
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
    joining = {contents(m) for m in executor.server.downlinks(ALL, joining=True).values()}
    assert joining == {JOINING.get(method, down)}
    assert {contents(m) for m in executor.uplinks(handle)} == {up}
    assert (executor.evaluate(EvalRequest("global", "received", (0,), ("test",), 2)) == []) == (method in NO_GLOBAL)


REFUSED = """
apfl: alpha=-0.1 alpha=1.1
apple: p_lr=-1 mu=-0.1 mu=1e4 pull_rounds=1.1 decay=linear
cfl: eps1=-1 eps2=-0.1 after=-1 linkage=ward
ditto: lam=-0.1
fd: lam=-1 average=mean
fedala: p=-1 p=3 share=0 share=1.5 eta=-1 threshold=0
fedalp: groups=0 groups=5 beta=-0.1 beta=1.5 beta=nan warmup=0 warmup=1 warmup=nan
fedamp: lam=-1 alpha=0 alpha=nan sigma=0
fedas: align_epochs=-1 align_lr=0
fedbabu: finetune_epochs=-1 finetune=tail
fedcac: tau=-0.1 tau=1.1 beta=0
fedcp: lam=-1
feddbe: kappa=-1 mean_momentum=0 mean_momentum=1.5
feddecomp: personal_epochs=-1 shared_epochs=-1 linear_rank=0 conv_rank=1.1 rank_from=in scale=two weighting=all
feddyn: alpha=0 alpha=-1 alpha=41
fedem: components=0 e_steps=0 differ=body
fedfcd: lam=-1 server_lr=0 server_epochs=0 server_batch=0 alternate=step prototype_weighting=all
fedfomo: models=0 epsilon=1.5 epsilon_decay=-0.1
fedgh: server_lr=0 server_epochs=0 server_batch=0
fedpac: lam=-1 head_epochs=0 head_lr=0 min_weight=1 min_weight=-0.1
fedper: base=3 base=-1 base=1.5 base=tail private=head private=[head,hed]
fedphp: lam=-0.1 lam=1.5 hint=both most=1.1 temperature=0
fedproto: lam=-1 predict=nearest
fedrep: head_epochs=0 body_epochs=0 body_epochs=-1 private=[hed]
fedselect: p=-0.1 p=1.1 alpha=-0.1 alpha=1.1 every=0 reference=last
fedtgp: max_margin=-1 server_lr=0 server_epochs=0 server_batch=0 server_hidden=0
fesem: groups=0 groups=-1 groups=5
floco: endpoints=0 rho=-0.1 sampling=l2 warmup=-0.1 warmup=1.5
fml: alpha=-0.1 alpha=1.2 beta=-0.1 beta=1.2 beta=nan
gpfl: lam=-1 mu=-1
ifca: groups=0
knn_per: neighbours=0 scale=0 capacity=0 lam=1.1
l2gd: lam=-1 p=1 p=-0.1 p=nan
moon: mu=-0.1 temperature=0
per_fedavg: alpha=-0.1 delta=0 delta=9e-7
pfedcfr: alpha=-1 sigma=0 sigma=-2 sigma=inf r=3 r=-1 r=1.5 r=tail
pfedfda: min_count=0 cov_ridge=0
pfedhn: embedding=0 hidden=[5,0] hn_lr=-1 hn_lr=nan hn_momentum=-0.5 hn_momentum=1 hn_weight_decay=-0.1
pfedla: k=3 k=-1 hn_lr=-0.1 hn_lr=nan embedding=0 hidden=[5,0]
pfedme: lam=0 lam=-1 lam=1e6 inner_steps=0 personal_lr=0 personal_lr=0.5 beta=0
pfedpm: a=1.5 a=-0.1 lam=-1 relation_hidden=0 distance=cosine predict=both alternate=never prototype_weighting=all
scaffold: server_lr=0
"""


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1], ids=lambda line: line.partition(":")[0])
def test_settings_that_are_refused(line: str) -> None:
    """In one line that names the setting."""
    method, _, given = line.partition(": ")
    usual = asdict(job(method).settings)
    for key, value in (setting for word in given.split() for setting in parse([word]).items()):
        with refusing(f"method.{key}"):
            inline(prepare(settings_from({**usual, "method": {**usual["method"], key: value}}), trial=False))


HALVES = "model=pfedpm_cnn model.padding=2 model.variants=[{strides:[2,1]},{strides:[1,2]}]"
MAPS = "model=pfedpm_cnn_mh model.padding=2"
EQUALLY_WIDE = "model.variants=[{channels:32,strides:[1,1]},{channels:32,strides:[1,1]},{channels:128,strides:[1,2]}]"
REFUSED_RUNS = {
    "fedalp rounds=1": "rounds=1.*at least 2",
    "apple optimizer=adam": "optimizer=adam: apple is defined by steps of gradient descent; use sgd",
    "apple weight_decay=0.1": r"weight_decay=0\.1.* apple",
    "fedavg model.variants=[{hidden:[7,5]},{hidden:[5]}]": "fedavg .*client 1",
    "fedavg model.variants=[{hidden:[5]},{hidden:[7,5]}]": "fedavg .*client 0.*client 1",
    "fedavg model.variants=[{hiden:[7]}]": r"model\.hiden",
    f"fedavg {HALVES}": "client 0.* client 1",
    f"fedavg {MAPS}": "fedavg .*client 1",
    f"fedper {HALVES}": "client 0.* client 1",
    "fedper method.base=1 method.private=[head]": r"method\.base=1 and method\.private",
    "fedem task.label_smoothing=0.1": "fedem .*task.loss",
    "fedem method.differ=head freeze=[head]": r"method\.differ=head.* equal",
    "fedrod freeze=[head]": "fedrod.*frozen",
    "floco freeze=[head.weight]": "floco needs .*not frozen",
    "floco model=pfedpm_cnn model.padding=2": "floco needs .*Linear.*Sequential",
    "pfedcfr method.r=body method.unit=model": r"method\.r=body with method\.unit=model",  # it would be no unit at all
    f"pfedpm {MAPS} model.variants=[{{channels:20}},{{channels:12}}]": r"\(20, 2, 2\) at .*\(12, 2, 2\) at client 1",
    f"pfedpm {MAPS} model.kernel=1 model.padding=4 {EQUALLY_WIDE}": r"\(32, 8, 8\).* \(128, 4, 4\) at client 2",
    "scaffold momentum=0.5": "momentum=0.5.*scaffold.*momentum=0",
    "scaffold weight_decay=0.5": "weight_decay=0.5.*scaffold.*weight_decay=0",
    **{f"{name} model.hidden=[]": f"(?i){name} .*body.* no parameters" for name in ("fedbabu", "fedfcd", "fedrep")},
}


@pytest.mark.parametrize(("words", "said"), REFUSED_RUNS.items())
def test_runs_that_are_refused(words: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        prepared("data=digits", "clients=4", *f"method={words}".split())


@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_models_of_several_shapes(method: str) -> None:
    """Some methods take bodies of several depths, with features of one shape; others name the client that differs."""
    if method in OF_SEVERAL_SHAPES | OF_ANY_SHAPES:
        common = ["model.common={hidden:[5]}"] * (method == "fedmrl")
        executor = inline(job(method, "model.variants=[{hidden:[7,5]},{hidden:[5]}]", *common))
        rounds(executor, 2, 4)
        assert [("net.body.fc2.weight" in states(executor)[c]) for c in ALL] == [True, False] * 2
        rows = executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 2))
        assert all(row.loss == row.loss for row in rows)
    if method not in OF_ANY_SHAPES:
        with pytest.raises(SettingsError, match="client 1"):
            job(method, "model.variants=[{hidden:[5]},{hidden:[6]}]")


REDUCTIONS = [
    # settings of a method, the method that it then is to the bit, its model in the state, whether it always is
    ("apfl alpha=1", "local", "personal", False),
    ("apfl alpha=0.7", "fedavg", "net", True),
    ("cfl eps1=0 eps2=0 after=0", "fedavg", "net", True),
    ("ditto lam=0", "local", "personal", False),
    ("ditto lam=3", "fedavg", "net", True),
    ("fd lam=0", "local", "net", False),
    ("fedala p=0", "fedavg", "net", False),
    ("fedala eta=0", "fedavg", "net", False),
    ("fedbn", "fedavg", "net", True),
    ("fedcac tau=0", "fedavg", "net", False),
    ("feddbe kappa=0 personal_vector=false", "fedavg", "net", False),
    ("feddecomp personal_epochs=0", "fedavg", "net", False),
    ("fedem components=1", "fedavg", "net", False),
    ("fedfcd feature_alignment=false decision_fusion=false hierarchical=false", "local", "net", False),
    ("fedper base=1.0", "fedavg", "net", False),
    ("fedper base=0", "local", "net", False),
    ("fedper private=[head]", "fedper", "net", True),
    ("fedper private=[body,head]", "local", "net", False),
    ("fedphp lam=0", "fedavg", "net", False),
    ("fedproto lam=0", "local", "net", False),
    ("fedprox mu=0", "fedavg", "net", False),
    ("fedrep private=[head]", "fedrep", "net", True),
    ("fedselect alpha=0", "pfedcfr r=0 mu=0", "net", False),
    ("fedtgp lam=0 server_epochs=2", "local", "net", False),
    ("fesem groups=1", "pfedcfr r=0 mu=0", "net", False),
    ("fml alpha=1", "local", "net", False),
    ("heurpfedla k=0", "pfedla", "net", False),
    ("ifca groups=1", "fedavg", "net", False),
    ("knn_per", "fedavg", "net", True),
    ("l2gd p=0", "local", "net", False),
    ("moon mu=0", "fedavg", "net", False),
    ("pfedcfr r=1 unit=model", "fedamp", "net", False),
    ("pfedpm lam=0", "local", "net", False),
    ("pfedpm lam=0 alternate=batch distance=mse predict=relation", "local", "net", False),
]
RUNS = {"mlp": ("local_epochs=null", "local_steps=5", "momentum=0.5", "lr_decay=0.9"), "batch_norm": BATCH_NORM}


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
    another, *others = other.split()
    if run == "batch_norm" and which in ("fedbn", "apfl alpha=1", "fedcac tau=0", "fedselect alpha=0"):
        pytest.skip("running statistics are of the client's own layers, or of the mixture")
    if run == "batch_norm" and which == "fedrep private=[head]":
        pytest.skip("the body is in training mode while the head trains")
    expected = ends(another, tuple(others), run)
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
        differs = ("fedbabu", "fedem", "fedmrl", "fedrod", "knn_per", "per_fedavg")
        assert (rows[0].loss == common.loss) == (method not in differs)


ODD = [  # products in bfloat16, a body without parameters, and features that are maps
    ["precision=bf16"],
    ["model=tabular_mlp", "model.hidden=[]", "data=wine"],
    [
        "model=pfedpm_cnn",
        "model.hidden_channels=3",
        "model.channels=2",
        "model.kernel=3",
        "model.padding=1",
        "model.hidden=5",
    ],
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[0])
@pytest.mark.parametrize("method", slow_except({"fedfcd"}, METHODS))
def test_rounds_and_newcomers(method: str, odd: list[str]) -> None:
    few = ["clients=4", "partition=iid", "split.validation=0.2", "rounds=2", "batch_size=8"]
    try:
        prepared(f"method={method}", *few, *odd)
    except SettingsError as error:
        assert "body" in str(error) or (method, odd) == ("floco", ODD[2])
        return
    newcomers_join(lambda *more: prepared(f"method={method}", *few, *odd, *more))


# Penalties under which training would diverge ------------------------------------------------------------------------


def refusal(*overrides: str) -> str:
    """The error of these settings, or an empty string."""
    try:
        prepared("model.hidden=[4]", "clients=4", "lr=0.1", "rounds=1", *overrides)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("method", "setting", "limit"),
    [
        (["fedprox"], "method.mu", 20.0),
        (["ditto"], "method.lam", 20.0),
        (["fedamp", "method.alpha=10"], "method.lam", 200.0),
        (["pfedcfr", "method.alpha=10"], "method.lam", 200.0),
        (["pfedcfr"], "method.mu", 20.0),
        (["gpfl"], "method.mu", 20.0),
        (["feddyn"], "method.alpha", 20.0),
        (["pfedme", "method.personal_lr=0.5", "lr=0.001"], "method.lam", 4.0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_a_penalty_that_diverges(method: list[str], setting: str, limit: float) -> None:
    """lr·c above 2, where c is μ, λ or λ/α; the error is one line with the setting, lr·c and its bound."""
    name, *given = method
    assert refusal(f"method={name}", *given, f"{setting}={0.99 * limit}") == ""
    said = refusal(f"method={name}", *given, f"{setting}={1.01 * limit}")
    assert re.search(rf"{re.escape(setting)}\S*=.*lr\S* = 2\.02 .*\b2\b.*lr=", said), said
    assert "\n" not in said


def test_momentum_counts() -> None:
    """Momentum 0.5 bears 3 for 2."""
    given = ["method=fedprox", "method.mu=6", "lr=0.4"]
    assert "at lr=0.4" in refusal(*given) and refusal(*given, "momentum=0.5") == ""


@pytest.mark.parametrize("method", ["fedamp", "pfedcfr"])
@pytest.mark.parametrize(("alpha", "sigma"), [("1e300", "1e-300"), ("1e300", "1e-8")])
def test_mixing_weights_beyond_all_numbers(method: str, alpha: str, sigma: str) -> None:
    """Also where only their sum over the clients is."""
    said = refusal(f"method={method}", "method.clamp=true", f"method.alpha={alpha}", f"method.sigma={sigma}")
    assert "method.alpha" in said and "method.sigma" in said and "not finite" in said
