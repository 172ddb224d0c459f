"""The settings of a run, as plain dataclasses: the schema that the command line and the YAML files are checked against.

Parts (method, data, partition, split, model) are mappings that name a class or function under `_target_` and give its
keyword-only arguments; the defaults of those live in the signatures (see `pflsim.config.components`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Placement:
    """Where clients live. Nothing here changes a result, except `threads`, `device` and `cpu_actors`."""

    clients_per_actor: int | str = "auto"
    """Clients per actor: a number, or "auto" (one while actors fit, else packed evenly by work)."""
    actors: int | None = None
    """Exactly this many client actors, instead of clients_per_actor."""
    cpus: int | None = None
    """CPUs that Ray may use, on a cluster the most of those that are free; null: all."""
    gpus: int = 0
    """GPUs that Ray may use; clients train on them when above 0."""
    actors_per_gpu: int | str = 1
    """How many client actors may share a GPU, each with as large a part of its memory; "auto": as many as fit, by what
    one client takes in a short dry run before the first round."""
    cpu_actors: int = 0
    """So many client actors on CPUs beside those on GPUs. Which client is on which device then decides the last digits
    of the results; it follows from the settings and the seed, and from nothing that a machine does."""
    gpu_speed: float = 8.0
    """With cpu_actors: how many times as fast as an actor on a CPU one on a GPU is reckoned, for dividing the work. The
    default is a guess; time a round with cpu_actors=0 on both to set it."""
    cpu_fallback: bool = False
    """Where there are fewer GPUs than asked for: true trains everything on CPUs, and says so; false is an error."""
    device: str = "auto"
    """auto (cuda where gpus > 0, else cpu), cpu or cuda."""
    threads: int = 1
    """Torch threads per client computation, the same inline and under Ray. Another number may change the last bits."""
    strategy: str = "pack"
    """On a cluster: pack fills one node after the other, the driver's first; spread uses all nodes alike."""
    nodes: int | None = None
    """On a cluster: begin when so many nodes are there, the driver's included; null: with those that are."""
    wait_s: float = 5.0
    """On a cluster: how many seconds to wait for nodes and for room on them, before giving up."""
    elastic: bool = False
    """On a cluster: use nodes that join from the next round on."""
    object_store_mb: int | None = None
    """Size of Ray's shared memory store on this machine, in MiB; null: as the data and the messages need."""


@dataclass
class Eval:
    """Who is evaluated when."""

    every: int = 1
    """Evaluate every so many rounds; the last round always."""
    on: str = "all"
    """all clients, or participants of the round."""
    received: bool = False
    """Judge the personal model both as the server sends it and after local training, whichever the method reports."""
    batch_size: int | None = None
    """Examples per forward pass; null: 128 on a CPU, 1024 on a GPU."""
    holdout_clients: int = 0
    """The last so many clients take no part in training; they join after the last round and are judged as newcomers."""
    finetune_epochs: int = 1
    """Local epochs of a newcomer before it is judged again."""


@dataclass
class Checkpoint:
    """When the state of a run is saved."""

    every: int = 0
    """Save after every so many rounds; the last round always."""
    minutes: float = 10
    """Save also at the end of a round when the last save, or the start, is so many minutes ago; 0: not for that."""
    keep: int = 1
    """How many checkpoints to keep, the newest ones; the one with the best mean validation accuracy stays as well."""


@dataclass
class Faults:
    """Absence and slowness that belong to the simulation, drawn from the seed for every client and round."""

    dropout: float = 0.0
    """Probability that a client of the round gets its message and is then not heard of; its state stays as it was."""
    straggler: float = 0.0
    """Probability that a client of the round does a share of its local work only."""
    straggler_work: float = 0.5
    """That share, in (0, 1): of each stretch of its training the first so many mini-batches, at least one."""


@dataclass
class Trace:
    """Which messages are written out for checking."""

    rounds: list[int] = field(default_factory=list)
    """Rounds (from 1) whose downlinks, uplinks and server numbers are written as safetensors."""


@dataclass
class Tracking:
    """What is written for looking at. Nothing here changes a result."""

    diagnostics_every: int = 10
    """Matrices (weights between clients, similarity of prototypes, confusion) every so many rounds; the last always."""
    per_client: bool = False
    """Curves of every client in TensorBoard: accuracy and drift. They are in per_client.csv in any case."""


@dataclass
class Settings:
    """One run."""

    method: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    partition: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """What the parts were called on the command line: group to option. Filled in; only for names and records."""
    clients: int = 10
    rounds: int = 20
    fraction: float = 1.0
    """Share of the clients that take part in a round, in (0, 1]."""
    local_epochs: int | None = None
    """Local epochs a round (default 1, when local_steps is not given either)."""
    local_steps: int | None = None
    """Local mini-batch steps a round, instead of local_epochs."""
    batch_size: int = 20
    lr: float = 0.1
    lr_decay: float = 1.0
    """The learning rate of round t is lr · lr_decay^(t−1)."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    buffers: str = "aggregate"
    """Running statistics of normalisation layers: aggregate, local or recalibrate."""
    init: str = "same"
    """Initial values of what is never shared: the same for all clients, or per_client. What is shared starts equal."""
    lockstep: bool | str = "auto"
    """Train clients of one architecture together, stacked, their step traced: auto (where the method can), true (must)
    or false (one by one). The results are the same but for rounding, and the same on every placement."""
    lockstep_clients: int | None = None
    """How many clients make a stack; null: about 5 taking part on a CPU (1 with convolutions), 64 on a GPU."""
    seed: int = 0
    on_client_error: str = "retry(3)"
    """When a client raises an error or its actor dies: retry(n) tries n times more, then ends the run; drop goes on
    without the client in that round; abort ends the run."""
    on_nonfinite: str = "abort"
    """When a client's loss or message is not finite: abort ends the run, drop goes on without the client in that round,
    keep lets it be fused."""
    executor: str = "ray"
    """ray (clients on actors) or inline (everything in this process)."""
    progress: str = "auto"
    """What the terminal shows: live (a display that stays up to date), plain (a line a round), quiet (the result only),
    auto (live on a terminal, else plain)."""
    ray_address: str | None = None
    """A Ray cluster to join: auto (the one this machine is a node of) or HOST:PORT; null: a Ray of our own, here."""
    run_dir: str | None = None
    """Folder of the run; null: runs/<date-time>-<method>-<data>-s<seed>. With a URL (s3://...) the run works there too
    and is kept the same at the URL, through fsspec."""
    placement: Placement = field(default_factory=Placement)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    faults: Faults = field(default_factory=Faults)
    tracking: Tracking = field(default_factory=Tracking)
    trace: Trace = field(default_factory=Trace)
