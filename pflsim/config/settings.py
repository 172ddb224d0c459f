"""The settings of a run as dataclasses: types, bounds, defaults and help.

The text below a field is its help. Pydantic checks the values once, when a run is composed or resumed (see
`pflsim.config.checks`); actors read them without pydantic. Components (`COMPONENTS` in
`pflsim.config.components`) are mappings that name a class or function under `_target_` and give its keyword-only
arguments; the signatures hold the defaults of those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from pflsim.errors import SettingsError
from pflsim.fusion import ServerOptimizer
from pflsim.participation import Participation

LARGEST = 2**31 - 1
"""Limit of whole numbers without an upper bound of their own, so that products of them do not overflow."""
DEFAULT_RETRIES = 3
"""Retries of `retry` without a number; with the rule drop, of what is not a client (server, a starting actor)."""
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "gaussian_blur", "contrast", "brightness", "pixelate", "jpeg",
    "feature_noise", "missing_columns",
)  # fmt: skip
TEST_SETS = ("others", "all", "mixture", "corrupted", *CORRUPTIONS)
"""Test sets besides each client's own."""
Count = Annotated[int, Ge(1), Le(LARGEST)]
CountOrZero = Annotated[int, Ge(0), Le(LARGEST)]
Epochs = Annotated[int, Ge(1), Le(1_000_000)]
Probability = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Placement:
    """Where clients run. Only the devices and `threads` can change the last bits of a result."""

    clients_per_actor: Literal["auto"] | Count = "auto"
    """Clients per actor; auto: one stack per actor while CPUs or GPUs suffice, then balanced by mini-batches."""
    actors: Count | None = None
    """Number of client actors, instead of clients_per_actor."""
    cpus: Count | None = None
    """Maximum number of CPUs that Ray uses; null: all."""
    gpus: CountOrZero = 0
    """Number of GPUs that Ray uses; above 0, clients train on GPUs."""
    actors_per_gpu: Annotated[int, Ge(1), Le(1000)] = 1
    """Client actors that share a GPU and its memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto (cuda if gpus > 0, else cpu), cpu or cuda."""
    server_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the server mixes the models of clients; auto: cuda if clients use GPUs and the driver's machine has one."""
    threads: Annotated[int, Ge(1), Le(256)] = 1
    """Torch threads per client computation; another number can change the last bits of results."""
    strategy: Literal["pack", "spread"] = "pack"
    """On a cluster: pack uses few nodes, spread uses all nodes equally."""
    nodes: Count | None = None
    """On a cluster: wait for this many nodes, including the driver's; null: start with those present."""
    wait_s: Annotated[float, Ge(0), Le(86_400)] = 60.0
    """Maximum time to wait for Ray's nodes and resources, also after a node is lost, in seconds."""
    object_store_mb: Annotated[int, Ge(75), Le(LARGEST)] | None = None
    """Size of Ray's object store on this machine, in MiB (at least 75); null: 30% of the free memory."""


@dataclass(frozen=True)
class Optimizer:
    """The optimiser of local training."""

    name: str = "sgd"
    """sgd, adam, adamw, or the dotted name of a torch optimiser; optimizer=NAME is the same."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its other arguments, for example {betas: [0.9, 0.99]}."""
    keep: bool = False
    """Keep its state from round to round; false: a new optimiser every round."""
    parts: dict[str, Annotated[float, Gt(0)]] = field(default_factory=dict)
    """Factors of the learning rate for parts of the net, by patterns as in freeze: {body: 0.1}; the last one counts."""
    no_decay: bool = False
    """No weight decay of biases and normalisation layers, which are the parameters with one axis."""


@dataclass(frozen=True)
class TaskChoice:
    """What is predicted, and its loss."""

    name: Literal["auto", "classification", "multilabel", "regression", "language_model"] = "auto"
    """classification, multilabel, regression or language_model; auto: one of the first three, as the targets are;
    task=NAME is the same."""
    loss: str | None = None
    """A loss of torch.nn, such as HuberLoss, or a dotted name; null: cross-entropy, BCEWithLogitsLoss or MSELoss."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments, for example {delta: 2}."""
    class_weights: Literal["none", "balanced", "balanced_client"] | list[Annotated[float, Ge(0)]] = "none"
    """Weights of classes in the loss: balanced over all training data or within each client, or a list."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Label smoothing of cross-entropy, in [0, 1)."""
    weights_by: Literal["examples", "tokens"] = "examples"
    """What weighs the clients in the mean of their models; tokens: the predicted ones, with task=language_model."""
    standardize_target: bool | None = None
    """Train on standardised targets of regression; metrics keep their unit. null: on tables with the default loss."""


@dataclass(frozen=True)
class Pretrained:
    """The initial weights of the model."""

    weights: str | None = None
    """File of weights, safetensors or a state_dict saved by torch.save; null: the model's own initial weights."""
    strict: bool = True
    """Refuse weights that miss tensors of the model or have others; false: list them in a warning."""


@dataclass(frozen=True)
class Eval:
    """When and on which clients the models are evaluated."""

    every: Count = 1
    """Evaluate every N rounds, and after the last one."""
    clients: Literal["all", "participants"] | Count = "all"
    """all clients, the participants of the round, or N clients, which the seed chooses once."""
    models: list[Literal["personal", "global"]] = field(default_factory=lambda: ["personal", "global"])
    """Models to evaluate, if the method has them; the one that it reports alone takes about half the time."""
    metrics: list[str | dict[str, dict[str, Any]]] = field(default_factory=list)
    """Metrics of every client, by name or with options: [auroc, {top_k_accuracy: {top_k: 5}}]."""
    primary: str | None = None
    """Metric that decides best round, early stopping, tuning and comparison; null: accuracy, auroc or rmse by task."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the lowest (min) or the highest (max) primary metric is best; auto: as the metric says."""
    threshold: float | str = 0.5
    """Probability from which on class 1 of two is predicted: 0.5, or sensitivity:0.9, chosen on validation rows."""
    sets: list[str] = field(default_factory=list)
    """Test sets besides each client's own: others, all, mixture, corrupted, or a corruption by name."""
    severity: Annotated[int, Ge(1), Le(5)] = 3
    """Severity of the corruptions of test sets, from 1 to 5."""
    all_examples: Count = 1000
    """Rows of the test set all at most."""
    received: bool = False
    """Evaluate the personal model both as received and after local training."""
    batch_size: Count | None = None
    """Examples per forward pass; null: 128 on a CPU, 1024 on a GPU."""
    holdout_clients: CountOrZero | list[str | int] = 0
    """Hold out the last N clients, or clients by name, from training; they join as newcomers after the last round."""
    holdout_partition: dict[str, Any] = field(default_factory=dict)
    """Settings of the partition that differ for the held-out clients, for example {alpha: 1.0}."""
    fit: Literal["training", "all"] = "training"
    """Clients whose training rows give the encoder of a table or texts, the scale of targets and class weights."""
    finetune_epochs: Annotated[int, Ge(0), Le(1_000_000)] = 1
    """Local epochs of a newcomer before its second evaluation."""
    newcomer_rows: list[Count] = field(default_factory=list)
    """Evaluate newcomers also after training, and after recalibration, with N training rows of each: [10, 50]."""

    @property
    def newcomers(self) -> int:
        """The number of clients that do not train."""
        held = self.holdout_clients
        return held if isinstance(held, int) else len(held)

    @property
    def sensitivity(self) -> float | None:
        """The sensitivity for which thresholds are chosen; None: none are chosen.

        Raises:
            SettingsError: the threshold is neither 0.5 nor a sensitivity.
        """
        found = re.fullmatch(r"sensitivity:(0?\.\d*[1-9]\d*|1|1\.0)", str(self.threshold))
        if found is None and self.threshold != 0.5:
            raise SettingsError(f"eval.threshold={self.threshold}: expected 0.5 or sensitivity:Q, where 0 < Q <= 1")
        return float(found[1]) if found else None


@dataclass(frozen=True)
class Stop:
    """When a run ends before its last round."""

    patience: Count | None = None
    """End after N evaluations without a better mean primary metric on validation data; null disables."""


@dataclass(frozen=True)
class Checkpoint:
    """When the state of a run is saved."""

    every: CountOrZero = 0
    """Save a checkpoint every N rounds, and after the last one; 0: after the last one only."""
    minutes: Annotated[float, Ge(0)] = 10.0
    """Save a checkpoint also every N minutes, at the end of a round; 0 disables."""
    keep: Count = 1
    """Number of newest checkpoints to keep; the best one by validation stays too."""
    best: bool | Literal["auto"] = "auto"
    """Save a checkpoint also when the mean primary metric on validation data improves; auto: of a table
    or texts with at most 200 clients."""


@dataclass(frozen=True)
class Faults:
    """Simulated dropouts and stragglers, drawn from the seed for every client and round."""

    dropout: Probability = 0.0
    """Probability that a client does not reply in a round; its state stays unchanged."""
    straggler: Probability = 0.0
    """Probability that a client does only a part of its local work in a round."""
    straggler_work: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Fraction of its mini-batches that a straggler trains on, in (0, 1)."""


@dataclass(frozen=True)
class Clock:
    """A virtual clock, which changes no result: a round takes as long as its slowest client."""

    step_s: Annotated[float, Ge(0)] | list[Annotated[float, Ge(0)]] | None = None
    """Seconds of an optimisation step: of all clients, or a list with those of each; null: 0."""
    down_mbps: Annotated[float, Gt(0)] | None = None
    """Megabits per second to a client; null: no time."""
    up_mbps: Annotated[float, Gt(0)] | None = None
    """Megabits per second from a client; null: no time."""
    spread: Annotated[float, Ge(0), Le(10)] = 0.0
    """Standard deviation over clients of the logarithm of these values, except for a list."""


@dataclass(frozen=True)
class Trace:
    """Messages written to disk for inspection."""

    rounds: list[Annotated[int, Ge(0), Le(LARGEST)]] = field(default_factory=list)
    """Rounds (from 1) whose messages and server state are written as safetensors."""


@dataclass(frozen=True)
class Tracking:
    """Additional records. Nothing here changes a result."""

    diagnostics_every: Count = 10
    """Write matrices (fusion weights, prototype similarity, confusion) every N rounds, and after the last one."""
    per_client: bool = False
    """Write accuracy, metrics and drift of every client to TensorBoard."""
    predictions: bool | Literal["auto"] = "auto"
    """Write the scores of every test row: true, false or auto (of tables with at most 100,000 test rows)."""
    loggers: list[Literal["csv", "wandb", "mlflow"]] = field(default_factory=list)
    """Log the scalars also with csv, wandb (Weights & Biases) or mlflow."""


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep (-m)."""

    parallel: Literal["auto"] | Annotated[int, Ge(1), Le(256)] = "auto"
    """Runs at the same time, with executor=inline; auto: one per CPU and 2 GiB of free memory, on GPUs one."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    method: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    shift: dict[str, Any] = field(default_factory=lambda: {"_target_": "pflsim.data.shifts.none"})
    partition: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    uplink: dict[str, Any] = field(default_factory=lambda: {"_target_": "pflsim.transforms.base.none"})
    attack: dict[str, Any] = field(default_factory=lambda: {"_target_": "pflsim.attacks.Attack", "fraction": 0.0})
    aggregator: dict[str, Any] = field(default_factory=lambda: {"_target_": "pflsim.servers.aggregators.none"})
    privacy: dict[str, Any] = field(default_factory=lambda: {"_target_": "pflsim.servers.privacy.none"})
    names: dict[str, str] = field(default_factory=dict)
    """The option chosen for each group on the command line; filled in, for names and records only."""
    clients: Annotated[int, Ge(1), Le(1_000_000)] = 10
    """Number of clients."""
    rounds: Annotated[int, Ge(1), Le(100_000)] = 20
    """Number of communication rounds."""
    fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the clients that participate in a round, in (0, 1]."""
    local_epochs: Epochs | None = None
    """Local epochs per round; null: 1, or local_steps."""
    local_steps: Epochs | None = None
    """Local optimiser steps per round, instead of local_epochs."""
    batch_size: Count = 20
    """Mini-batch size of local training."""
    accumulate_grad_batches: Count = 1
    """Mini-batches of an optimiser step, whose gradient is their mean by examples."""
    lr: Annotated[float, Gt(0), Le(1e30)] = 0.1
    """Learning rate of local training."""
    lr_schedule: Literal["constant", "exponential", "step", "cosine"] = "exponential"
    """Learning rate of round t: lr · lr_decay^(t−1), lr_decay every lr_step rounds (step), or cosine."""
    lr_decay: Annotated[float, Gt(0), Le(1)] = 1.0
    """Factor of lr_schedule=exponential and step, at most 1, which is a constant learning rate."""
    lr_step: Annotated[int, Ge(1), Le(100_000)] = 1
    """Rounds between two decays of lr_schedule=step."""
    lr_warmup: Annotated[int, Ge(0), Le(100_000)] = 0
    """The learning rate grows linearly in the first N rounds."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    task: TaskChoice = field(default_factory=TaskChoice)
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum of SGD, in [0, 1)."""
    weight_decay: Annotated[float, Ge(0), Le(1e30)] = 0.0
    """L2 penalty; of adamw, the decay of the parameters."""
    clip_grad_norm: Annotated[float, Gt(0), Le(1e30)] | None = None
    """Largest norm of a step's gradients, to which larger ones are scaled down."""
    augment: Literal["none", "crop_flip"] = "none"
    """Random variants of the images in local training: none or crop_flip (zero-padded crops and horizontal flips)."""
    precision: Literal["ieee", "tf32", "bf16"] = "ieee"
    """Convolutions and matrix products of the nets: ieee (float32), tf32 (on GPUs) or bf16 (autocast)."""
    buffers: Literal["aggregate", "local", "recalibrate"] = "aggregate"
    """Running statistics of normalisation layers: aggregate, local or recalibrate."""
    init: Literal["same", "per_client"] = "same"
    """Initial values of parameters that are never shared: same for all clients, or per_client."""
    lockstep: bool | Literal["auto"] = "auto"
    """Train clients of one architecture as a stack: true, false or auto; results differ by rounding only."""
    lockstep_clients: Count | None = None
    """Clients per stack; null: 5 on a CPU (1 with convolutions, up to 64 of a small model), 64 on a GPU."""
    head: str | None = None
    """Module of an own model that is its head, for example classifier.2; null: its last linear layer."""
    pretrained: Pretrained = field(default_factory=Pretrained)
    lora: dict[str, Any] = field(default_factory=dict)
    """Train adapters instead of the body's layers, {r: 8, targets: [query, value]}: arguments of peft.LoraConfig."""
    freeze: list[str] = field(default_factory=list)
    """Parameters of the model that are not trained or sent: names of parameters or modules, for example [body.*]."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """Seed of all random streams."""
    on_client_error: str = "retry(3)"
    """If a client fails or its actor dies: retry(N) times, then abort; drop it from the round; or abort."""
    on_nonfinite: Literal["abort", "drop", "keep"] = "abort"
    """If a client's loss or message is not finite: abort, drop the client from the round, or keep it."""
    executor: Literal["ray", "inline"] = "ray"
    """ray (clients on actors) or inline (everything in this process)."""
    progress: Literal["auto", "live", "plain", "quiet", "none"] = "auto"
    """Output: live display, plain (one line per round), quiet (result only), none; auto: live or plain."""
    ray_address: str | None = None
    """Ray cluster to join: auto or HOST:PORT; null: start Ray on this machine."""
    run_dir: str | None = None
    """Run folder, as out/${method}-${seed}; null: runs/<date-time>-<method>-<data>-s<seed>; a URL: a copy there."""
    sweep: Sweep = field(default_factory=Sweep)
    placement: Placement = field(default_factory=Placement)
    eval: Eval = field(default_factory=Eval)
    stop: Stop = field(default_factory=Stop)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    participation: Participation = field(default_factory=Participation)
    faults: Faults = field(default_factory=Faults)
    clock: Clock = field(default_factory=Clock)
    tracking: Tracking = field(default_factory=Tracking)
    trace: Trace = field(default_factory=Trace)

    @property
    def trained(self) -> int:
        """The number of clients that train, which are the first ones."""
        return self.clients - self.eval.newcomers


@dataclass(frozen=True, slots=True)
class OnError:
    """What to do when a client fails.

    Args:
        rule: retry, then end the run; drop the client from the round; or end the run.
        tries: maximum number of retries.
    """

    rule: Literal["retry", "drop", "abort"]
    tries: int = 0

    @classmethod
    def of(cls, text: str) -> OnError:
        """Parse `retry(N)`, `retry`, `drop` or `abort`.

        Raises:
            SettingsError: the text is none of these.
        """
        if text in ("drop", "abort"):
            return cls(text)
        found = re.fullmatch(r"retry(?:\((\d{1,6})\))?", text)
        if found is None:
            raise SettingsError(f"on_client_error={text}: expected retry(N) with a whole number N, drop or abort")
        return cls("retry", DEFAULT_RETRIES if found[1] is None else int(found[1]))

    @property
    def tries_without_drop(self) -> int:
        """Maximum number of retries of what is not a client and cannot be dropped."""
        return DEFAULT_RETRIES if self.rule == "drop" else self.tries


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key; an empty mapping and a range of `pflsim tune` are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping) and value and not {"low", "high"} <= {*value}
        found |= dotted(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return found


def swept(settings: Settings) -> dict[str, Any]:
    """Return the settings that vary in the sweep of a run, by the key on the command line; none outside a sweep."""
    values = {**dotted(asdict(settings)), **settings.names}
    return {key: values[key] for key in settings.names.get("sweep", "").split(",") if key in values}
