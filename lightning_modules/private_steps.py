"""DP-SGD: steps on Poisson batches, with clipped gradients of examples and noise (Abadi et al. 2016, Algorithm 1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.lockstep.tracing import AsForward
from lightning_modules.phases import Phase, Stage
from pflsim.config.components import component_name
from pflsim.config.settings import Settings
from pflsim.data.federated import Examples
from pflsim.errors import SettingsError
from pflsim.privacy_of_examples import ExamplePrivacy, rounded_up
from pflsim.seeding import torch_generator
from pflsim.servers.privacy import Privacy
from pflsim.tasks.task import in_float32

CHUNK_BYTES = 2**26
"""Most bytes of the gradients of examples that are computed at once; at least one example is."""


@dataclass(frozen=True, slots=True)
class PrivateSteps:
    """How the clients of a run train with privacy=example.

    Args:
        privacy: clip norm and δ.
        seed: of the run.
        noise: noise multiplier σ of each client that trains.
        sampling: upper bounds of the probability of an example to be in a batch, by client.
        steps: number of noisy gradients in a round, by client.
    """

    privacy: ExamplePrivacy
    seed: int
    noise: tuple[float, ...]
    sampling: tuple[float, ...]
    steps: tuple[int, ...]

    @property
    def about(self) -> dict[str, Any]:
        """What determines ε, besides the rounds of each client."""
        lists = {name: [*getattr(self, name)] for name in ("noise", "sampling", "steps")}
        return {"unit": "example", "delta": self.privacy.delta, "clip": self.privacy.clip, **lists}

    def of(self, client: int, round_number: int) -> NoisySteps:
        """Return the steps of a client in a round."""
        generator = torch_generator(self.seed, "privacy", client, round_number)
        return NoisySteps(self.privacy.clip, self.noise[client], generator, self.steps[client])


@dataclass(slots=True)
class NoisySteps:
    """Takes the steps of a stage, each with a Poisson batch of its own.

    Args:
        clip: C, the largest norm of an example's gradient, over all parameters of the phase.
        noise: σ.
        generator: draws the noise.
        left: how many noisy gradients the accountant counts in the rest of the round.
    """

    clip: float
    noise: float
    generator: torch.Generator
    left: float = math.inf

    def __call__(
        self, module: ClientModule, stage: Stage, examples: Examples, batches: torch.Generator, work: float = 1.0
    ) -> Iterator[list[Terms]]:
        """Train a stage for as many steps as without privacy; yield the loss terms of all phases.

        The phases of a stage have batches of their own: two steps on one batch spend more than on independent ones.

        Args:
            module: see `lightning_modules.loop.train`.
            stage: its phases and its length.
            examples: see there.
            batches: draws the batches; each row is in one with probability min(1, B/n).
            work: see there.
        """
        n, size = len(examples), module.training_settings.step_size
        steps = [module.make_step(phase) for phase in stage.phases]

        def batch() -> Batch:
            drawn = torch.rand(n, generator=batches, dtype=torch.float64) * n < size
            return examples.batch(examples.vary(drawn.nonzero().flatten()))

        for _ in range(math.ceil(work * stage.batches(-(-n // size)))):
            self.left -= len(steps)
            if self.left < 0:
                raise SettingsError("privacy=example: the schedule has more steps than in round 1, which are counted")
            yield [module.optimise(batch(), step, partial(self.compute_gradients, module)) for step in steps]

    def compute_gradients(
        self, module: ClientModule, batch: Batch, phase: Phase, parameters: Sequence[nn.Parameter]
    ) -> Terms:
        """Store (Σ gᵢ·min(1, C/‖gᵢ‖) + N(0, σ²C²I)) / B in `.grad`, with the run's B; return the mean loss terms.

        gᵢ is the gradient of the phase's objective on example i alone. An empty batch has noise, and no loss terms.
        """
        (inputs, targets), names = batch, phase.trainable.parameters(module)
        objective, values = AsForward(module, phase.objective), [p.detach() for p in parameters]

        def loss(values: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Terms]:
            named = {f"module.{name}": value for name, value in zip(names, values, strict=True)}
            terms: Terms = functional_call(objective, named, ((x[None], y[None]),))
            return torch.stack(list(terms.values())).sum(), terms

        each, sums = vmap(grad(loss, has_aux=True), (None, 0, 0), randomness="different"), dict[str, Tensor]()
        chunk = max(1, CHUNK_BYTES // sum(value.nbytes for value in values))
        totals = [torch.empty_like(value) for value in values]  # fused optimisers assume the same strides
        for total in totals:
            normal = torch.randn(total.shape, generator=self.generator, dtype=total.dtype)
            total.copy_(self.noise * self.clip * normal)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the other kernels
            for first in range(0, len(targets), chunk):
                rows = slice(first, first + chunk)
                gradients, terms = each(values, inputs[rows], targets[rows])
                norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradients]).norm(dim=0)
                scales = (self.clip / norms).clamp_max(1)
                for total, gradient in zip(totals, gradients, strict=True):  # not as a product in low precision
                    total += gradient.mul_(scales.view(-1, *[1] * total.dim())).sum(0)
                for name, value in terms.items():
                    added = in_float32(value).sum()
                    sums[name] = sums[name] + added if name in sums else added
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / module.training_settings.step_size
        return {name: total / len(targets) for name, total in sums.items()}


def private_steps(
    privacy: Privacy,
    variants: Sequence[ClientModule],
    sizes: Sequence[int],
    cohorts: Collection[Sequence[int]],
    settings: Settings,
) -> tuple[PrivateSteps | None, Settings]:
    """Return how clients train with privacy=example, and the settings with the noise; None with other kinds.

    Args:
        privacy: the kind of privacy.
        variants: a client of each variant of the model; client i has variant i mod len(variants).
        sizes: number of training examples of each client that trains.
        cohorts: the clients of each round.
        settings: of the run.

    Raises:
        SettingsError: the method, the model or a setting rules it out, δ is too large, or the noise exceeds the budget.
    """
    if not isinstance(privacy, ExamplePrivacy):
        return None, settings
    for module in variants:
        _check(module, settings)
    if privacy.delta * max(sizes) >= 1:
        most = f"1/n = {1 / max(sizes):.3g}, with n of the client with the most examples"
        raise SettingsError(f"privacy.delta={privacy.delta:g}: expected below {most}")
    size, steps = variants[0].training_settings.step_size, list[int]()
    for client, n in enumerate(sizes):
        stages = variants[client % len(variants)].stages()
        steps.append(sum(len(stage.phases) * stage.batches(-(-n // size)) for stage in stages))
    sampling = [rounded_up(min(1.0, size / max(n, 1))) for n in sizes]
    rounds = Counter(client for cohort in cohorts for client in cohort)
    noise = privacy.calibrated(sampling, [rounds[client] * own for client, own in enumerate(steps)])
    if privacy.noise is None:
        settings = replace(settings, privacy={**settings.privacy, "noise": noise})
    return PrivateSteps(privacy, settings.seed, (*noise,), (*sampling,), (*steps,)), settings


def _check(module: ClientModule, settings: Settings) -> None:
    """Refuse what uses examples otherwise than through their own gradients."""
    kind, weights = type(module), settings.task.class_weights
    steps = "gradients", "compute_gradients", "optimise", "make_step"
    own = [name for name in steps if getattr(kind, name) is not getattr(ClientModule, name)]
    if own or not (vars(kind).get("private_steps") and module.private_steps):
        raise SettingsError(
            f"privacy=example: method={component_name(settings, 'method')} uses examples otherwise than through their "
            "gradients, or does not say that it does not (private_steps); use fedavg, ditto or fedrep, for example"
        )
    problems = {
        "a model without batch normalisation, which mixes examples": module.smallest_batch > 1,
        "lockstep=auto or false": settings.lockstep is True,
        "task.class_weights=none, since a mean over a batch divides by them": weights != "none",
        "faults.straggler=0": settings.faults.straggler > 0,
        "optimizer.keep=false": settings.optimizer.keep,
    }
    for needed in (needed for needed, missing in problems.items() if missing):
        raise SettingsError(f"privacy=example needs {needed}")
