"""The benchmarks of the leaderboards: their settings, their methods, and the figure that a row reports.

Each method is tuned under an equal budget, with seed 0; the values with the best validation result run with the seeds
1, 2, ... The values that earlier studies chose are in docs/results/leaderboard-methods.csv too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from examples.real_clients import DATA
from pflsim.display.formats import Choice

MIXED = "mixed_model"
"""The mixed-effects model of `examples/real_clients.py` in place of a method."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A setting in which methods are compared.

    Args:
        settings: of all runs; `{root}` is the folder of the data.
        tuning: further settings of the trials.
        final: further settings of the runs that are reported.
        methods: the most important ones first.
        spaces: further settings of the trials of a method, which replace a part of its space.
        trials: number of trials of each method.
        seeds: number of the runs that are reported.
        figure: the reported metric: its mean over clients, or over the rows of all clients together if `pooled`.
        pooled: see `figure`.
        at: the round that is reported.
        table: the data of R's package mlmRev, or "".
        order: benchmarks with a lower number come first.
    """

    settings: str
    tuning: str
    final: str
    methods: tuple[str, ...]
    spaces: Mapping[str, str] = field(default_factory=dict)
    trials: int = 12
    seeds: int = 5
    figure: str = "accuracy"
    pooled: bool = False
    at: Choice = "best_val"
    table: str = ""
    order: int = 1


NEWER = (
    *("fedpac", "fedcp", "pfedfda", "floco", "fedselect", "feddecomp", "fedcac"),
    *("fedavgm", "fedadam", "fedyogi", "fedadagrad"),
)
ALL = (
    *("local", "fedavg", "ditto", "ifca", "apfl", "fedrep", "pfedme", "per_fedavg", "fedamp", "pfedcfr", "pfedla"),
    *("fedfcd", "fedalp", "pfedpm", "r_pfedpm", *NEWER, "heurpfedla", "fedala", "gpfl", "fedrod", "fedfomo", "fedas"),
    *("pfedhn", "fedper", "l2gd", "fedgh", "fedproto", "lg_fedavg", "fedbabu", "fedtgp", "feddbe", "fesem", "fedbn"),
    *("scaffold", "fedprox", "moon", "feddyn"),
)
CLASSES = {
    *("fedfcd", "pfedpm", "r_pfedpm", "fedpac", "pfedfda", "gpfl", "fedrod", "fedas", "fedgh", "fedproto", "fedtgp"),
}
"""Methods that need a score for each class."""
HIDDEN = {"fedrep", "fedbabu", "pfedcfr", "fedper", "lg_fedavg", "fedbn", "moon"}
"""Methods that need a hidden layer: without one, FedPer is Local, and the last three are FedAvg."""
FIRST = ("local", "fedavg", "ditto", "apfl", "pfedme", "fedprox", "per_fedavg", "l2gd", "fedamp", "feddbe")
REAL = tuple(dict.fromkeys(name for name in (*FIRST, *ALL) if name != "fedfomo"))
"""Methods for real clients: FedFomo needs validation examples at every client."""
SMALL = (
    "data.root={root} model=mlp clients=20 split=counts split.stratify=true split.train=60 split.test=100 "
    "split.validation=0.333 batch_size=10 local_epochs=2 eval.every=5"
)
SKEWED = {
    "fashion-mnist-two-classes": "data=fashion_mnist partition=classes_per_client partition.classes=2",
    "fashion-mnist-dirichlet": "data=fashion_mnist partition=dirichlet partition.alpha=0.1 partition.min_examples=160",
    "mnist-permuted-labels": "data=mnist partition=iid shift=permuted_labels",
    "mnist-rotation": "data=mnist partition=iid shift=rotation",
}


def _real(table: str, hidden: bool) -> Benchmark:
    """Return a benchmark of real clients, with a linear model or with a hidden layer."""
    label, client, features, _ = DATA[table]
    binary, large = table == "Contraception", table == "Chem97"
    task = (
        f"task=classification eval.primary=nll eval.metrics=[auroc]{' task.loss=BCEWithLogitsLoss' * (not hidden)}"
        if binary
        else "task=regression task.standardize_target=true"
    )
    model = "tabular_mlp model.hidden=[16]" if hidden else "linear"
    settings = (
        f"data=table data.path={{root}}/{table}.csv data.label={label} data.client={client} "
        f"data.features=[{','.join(features)}] data.min_examples=2 model={model} {task} split.fraction=0.75 "
        "split.stratify=true batch_size=20 local_steps=5 rounds=40 lr_schedule=cosine eval.every=40"
        f"{' lockstep_clients=256' * large}"
    )
    # Chem97 has 2,230 schools, so trials are shorter. The largest curvature of a school's loss is 49, with a penalty of
    # 20 it is 69: training diverges from learning rates of 2/69 = 0.029 on.
    budget, rates = (" rounds=20", (0.003, 0.025)) if large else ("", (0.01, 1.0))
    personal = {"pfedme": "search.pfedme.personal_lr={low:0.003,high:0.025,log:true}"} if large else {}
    # Their default alpha allows 101 clients; the penalty is lam/alpha, with the default space up to 1.
    amp = "search.{0}.alpha={{low:40,high:400,log:true}} search.{0}.lam={{low:0.04,high:40,log:true}}"
    mixing = {name: amp.format(name) for name in ("fedamp", "pfedcfr") if table in ("Hsb82", "Chem97")}
    refused = (set() if hidden else HIDDEN) | (set() if hidden and binary else CLASSES)
    return Benchmark(
        settings=settings,
        tuning="split.validation=0.25 search.lr={{low:{},high:{},log:true}}".format(*rates) + budget,
        spaces={"ditto": "search.ditto.lam={low:0.05,high:20.0,log:true}", **personal, **mixing},
        final="split.validation=0",
        methods=(MIXED, *(name for name in (FIRST if large else REAL) if name not in refused)),
        trials=5 if large else 8,
        seeds=3 if large else 5,
        figure="auroc" if binary else "rmse",
        pooled=True,
        at="last",
        table=table,
        order=(2 if hidden else 0) + 4 * large,
    )


BENCHMARKS = {
    **{f"{table.lower()}-linear": _real(table, False) for table in DATA},
    **{name: Benchmark(f"{skew} {SMALL}", "rounds=40", "rounds=200", ALL) for name, skew in SKEWED.items()},
    **{f"{table.lower()}-mlp": _real(table, True) for table in DATA},
    "cifar10": Benchmark(
        "data=npz data.path={root}/cifar10.npz data.standardize=true model=cnn clients=20 partition=dirichlet "
        "partition.alpha=0.3 batch_size=50 local_steps=20 eval.every=5",
        tuning="rounds=15",
        final="rounds=60",
        methods=("local", "fedavg", "ditto", "fedrep", "apfl", "fedala", "fedrod", "fedpac", "pfedla", "pfedcfr"),
        trials=4,
        seeds=3,
        order=3,
    ),
}
