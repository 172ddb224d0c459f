"""Attacks by a part of the clients: on their training rows, on the changes that they send, or together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Le
from torch import Generator, Tensor

from pflsim.config.validate import Portion, Positive
from pflsim.data.federated import Examples, Shard
from pflsim.errors import SettingsError
from pflsim.fusion.means import uniform_mean
from pflsim.messages import Uplink
from pflsim.seeding import numpy_generator, torch_generator
from pflsim.types import Tensors

Half = Annotated[float, Ge(0), Le(0.5)]
From1 = Annotated[int, Ge(1)]


class Attack:
    """Base class of attacks, which does nothing: the clients of an attack are honest, and are not evaluated.

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.

    Attributes:
        from_round: the first round in which messages are changed.
        changes: whether the clients change what they send.
        colludes: whether the malicious clients of a round send the same weights, which depend on those of the others.
        predicts_classes: whether the clients must predict classes.
        needs_mean: whether the server must take a mean of the clients' models.
    """

    from_round = 1
    changes = colludes = predicts_classes = needs_mean = False

    def __init__(self, *, fraction: Half = 0.0):
        self.fraction = fraction

    def attackers(self, seed: int, clients: int) -> tuple[int, ...]:
        """Return the malicious ones of so many clients, ascending. Larger fractions contain smaller ones."""
        count = math.floor(self.fraction * clients + 1e-9)  # 0.3 · 10 is below 3
        return tuple(sorted(numpy_generator(seed, "attackers").permutation(clients)[:count].tolist()))

    def poisoned(self, examples: Examples, classes: int, seed: int, client: int) -> Examples:
        """Return the training examples of a malicious client."""
        return examples

    def changed(self, change: Tensors, generator: Generator, cohort: int) -> Tensors:
        """Return the change of the shared parameters that a malicious client sends in place of its own.

        Args:
            change: of its local training, in float64.
            generator: of the client and the round.
            cohort: the number of clients of the round.
        """
        return change

    def colluded(self, benign: Sequence[Tensors], known: Tensors, malicious: int) -> Tensors:
        """Return the weights that every malicious client of a round sends.

        Args:
            benign: the weights of the benign clients of the round, in float64.
            known: those of the global model, in float64.
            malicious: how many malicious clients there are in the round.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Attackers:
    """The malicious clients of a run.

    Args:
        attack: what they do.
        clients: their ids.
        seed: of the run.
        cohort: the mean number of clients of a round.
    """

    attack: Attack
    clients: frozenset[int]
    seed: int
    cohort: int

    def poisoned(self, own: Shard) -> Shard:
        """Return a client's data, with the training examples of the attack if it is malicious."""
        if own.client not in self.clients:
            return own
        return replace(own, train=self.attack.poisoned(own.train, own.num_classes, self.seed, own.client))

    def change(self, client: int, round_number: int) -> Callable[[Tensors], Tensors] | None:
        """Return the function from a client's change to what it sends; None: it sends its change."""
        if not self.attack.changes or client not in self.clients or round_number < self.attack.from_round:
            return None
        generator = torch_generator(self.seed, "attack", client, round_number)
        return lambda change: self.attack.changed(change, generator, self.cohort)

    def colluded(self, uplinks: Sequence[Uplink], known: Tensors, round_number: int) -> Sequence[Uplink]:
        """Return the uplinks of a round with the weights that colluding clients send; 0: of no training."""
        benign = [up.weights for up in uplinks if up.client not in self.clients]
        if not self.attack.colludes or round_number < self.attack.from_round or not 0 < len(benign) < len(uplinks):
            return uplinks
        values = [{name: value.double() for name, value in own.items()} for own in benign]
        known = {name: known.get(name, value).double() for name, value in benign[0].items()}
        sent = self.attack.colluded(values, known, len(uplinks) - len(benign))
        return [
            replace(up, weights={name: sent[name].to(value.dtype) for name, value in up.weights.items()})
            if up.client in self.clients
            else up
            for up in uplinks
        ]


class MakesAttack(Protocol):
    """Type of an attack with its settings bound."""

    def __call__(self) -> Attack:
        """Return the attack."""
        ...


class LabelFlip(Attack):
    """Train with the labels C − 1 − y.

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
    """

    predicts_classes = True

    def __init__(self, *, fraction: Half = 0.2):
        super().__init__(fraction=fraction)

    def poisoned(self, examples: Examples, classes: int, seed: int, client: int) -> Examples:
        """Flip the labels."""
        return replace(examples, y=classes - 1 - examples.y)


class RandomLabels(LabelFlip):
    """Train with random labels; two classes are exchanged (attack A1 of Li et al. 2021, Ditto).

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
    """

    def poisoned(self, examples: Examples, classes: int, seed: int, client: int) -> Examples:
        """Draw the labels."""
        if classes == 2:
            return super().poisoned(examples, classes, seed, client)
        generator = torch_generator(seed, "random_labels", client)
        return replace(examples, y=torch.randint(classes, examples.y.shape, generator=generator))


class Backdoor(LabelFlip):
    """Train with a white square in the bottom right corner of images of other classes, and a label for it.

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
        ratio: of the training images of other classes that get the square, in (0, 1].
        target: the label of images with the square.
        size: of the square in pixels.
        boost: times the change that is sent.
    """

    def __init__(
        self, *, fraction: Half = 0.2, ratio: Portion = 0.5, target: Annotated[int, Ge(0)] = 0, size: From1 = 3,
        boost: Positive = 1.0,
    ):  # fmt: skip
        super().__init__(fraction=fraction)
        self.ratio, self.target, self.size, self.boost = ratio, target, size, boost
        self.changes = boost != 1

    def poisoned(self, examples: Examples, classes: int, seed: int, client: int) -> Examples:
        """Draw the square into some images."""
        if self.target >= classes:
            raise SettingsError(f"attack.target={self.target}: the classes are 0 to {classes - 1}")
        others = (examples.y != self.target).nonzero()[:, 0]
        order = torch.randperm(len(others), generator=torch_generator(seed, "backdoor", client))
        rows = others[order[: math.floor(self.ratio * len(others) + 1e-9)]]
        x, y = examples.x.clone(), examples.y.clone()
        x[rows], y[rows] = self.with_square(x[rows], examples.scale), self.target
        return replace(examples, x=x, y=y)

    def with_square(self, x: Tensor, scale: float) -> Tensor:
        """Return images [n, C, H, W] with the square.

        Raises:
            SettingsError: the examples are no images, or too small.
        """
        if x.dim() != 4 or min(x.shape[2:]) < self.size:
            raise SettingsError(f"attack=backdoor needs images of at least {self.size} pixels, found {[*x.shape[1:]]}")
        x = x.clone()
        x[..., -self.size :, -self.size :] = scale
        return x

    def changed(self, change: Tensors, generator: Generator, cohort: int) -> Tensors:
        """Scale the change."""
        return {name: self.boost * value for name, value in change.items()}


class RandomUpdate(Attack):
    """Send normal random numbers (attack A2 of Li et al. 2021, Ditto).

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
        tau: their standard deviation; null: that of the values of the honest change.
        from_round: the first round of the attack.
    """

    changes = True

    def __init__(self, *, fraction: Half = 0.2, tau: Positive | None = None, from_round: From1 = 1):
        super().__init__(fraction=fraction)
        self.tau, self.from_round = tau, from_round

    def changed(self, change: Tensors, generator: Generator, cohort: int) -> Tensors:
        """Draw the change."""
        values = torch.cat([value.flatten() for value in change.values()])
        tau = values.std(correction=0) if self.tau is None else self.tau
        drawn = {name: torch.randn(v.shape, generator=generator, dtype=v.dtype) for name, v in change.items()}
        return {name: tau * value for name, value in drawn.items()}


class SignFlip(Attack):
    """Send the opposite of the change.

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
        scale: times the change, above 0.
        from_round: the first round of the attack.
    """

    changes = True

    def __init__(self, *, fraction: Half = 0.2, scale: Positive = 1.0, from_round: From1 = 1):
        super().__init__(fraction=fraction)
        self.scale, self.from_round = scale, from_round

    def changed(self, change: Tensors, generator: Generator, cohort: int) -> Tensors:
        """Turn the change round."""
        return {name: -self.scale * value for name, value in change.items()}


class Replacement(RandomLabels):
    """Train with random labels, and send a multiple of the change (attack A3 of Li et al. 2021, Ditto).

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
        boost: times the change; null: the number of clients of the round.
        from_round: the first round in which the change is multiplied.
    """

    changes = True

    def __init__(self, *, fraction: Half = 0.2, boost: Positive | None = None, from_round: From1 = 1):
        super().__init__(fraction=fraction)
        self.boost, self.from_round = boost, from_round

    def changed(self, change: Tensors, generator: Generator, cohort: int) -> Tensors:
        """Scale the change."""
        return {name: (self.boost or cohort) * value for name, value in change.items()}


class Alie(Attack):
    """Send the benign clients' mean minus z of their standard deviations (Baruch et al. 2019, "A little is enough").

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
        z: standard deviations; null: `largest_z` of the round.
        from_round: the first round of the attack.
    """

    colludes = True

    def __init__(self, *, fraction: Half = 0.2, z: Positive | None = 1.5, from_round: From1 = 1):
        super().__init__(fraction=fraction)
        self.z, self.from_round = z, from_round

    def colluded(self, benign: Sequence[Tensors], known: Tensors, malicious: int) -> Tensors:
        """Return μ − zσ of every value, where σ divides by n − 1, and is 0 for one benign client."""
        z = largest_z(len(benign) + malicious, malicious) if self.z is None else self.z
        found = {}
        for name in known:
            values = torch.stack([each[name] for each in benign])
            spread = values.std(0) if len(benign) > 1 else torch.zeros_like(values[0])
            found[name] = values.mean(0) - z * spread
        return found


class Ipm(Attack):
    """Send a negative multiple of the mean of the benign changes (inner product manipulation, Xie et al. 2020).

    Args:
        fraction: of the clients that train which are malicious, from 0 to 0.5; their number is rounded down.
        scale: times the mean, above 0.
        from_round: the first round of the attack.
    """

    colludes = needs_mean = True

    def __init__(self, *, fraction: Half = 0.2, scale: Positive = 2.0, from_round: From1 = 1):
        super().__init__(fraction=fraction)
        self.scale, self.from_round = scale, from_round

    def colluded(self, benign: Sequence[Tensors], known: Tensors, malicious: int) -> Tensors:
        """Return w − scale · (mean − w)."""
        means = {name: uniform_mean([each[name] for each in benign]) for name in known}
        return {name: value - self.scale * (means[name] - value) for name, value in known.items()}


def largest_z(clients: int, malicious: int) -> float:
    """Return the largest z that a majority of honest clients can hide: Φ⁻¹((n − f − s)/(n − f)), s = ⌊n/2⌋ + 1 − f.

    It is 0 at least; then the attack sends the mean.
    """
    honest, needed = clients - malicious, clients // 2 + 1 - malicious
    share = (honest - needed) / honest
    return max(NormalDist().inv_cdf(share), 0.0) if 0 < share < 1 else 0.0
