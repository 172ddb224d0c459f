"""What happens to the messages of a run: transforms of uplinks, attacks, aggregation and privacy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_modules.base import ClientModule
from pflsim.attacks import Attack, Attackers, MakesAttack
from pflsim.config.components import bind, component_name
from pflsim.config.settings import Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, shard
from pflsim.errors import SettingsError, own_errors
from pflsim.progress import doing
from pflsim.servers.aggregators import Aggregator, MakesAggregator
from pflsim.servers.base import MeanRule, ServerRule
from pflsim.servers.privacy import ClientPrivacy, MakesPrivacy, Privacy, Release
from pflsim.transforms.base import MakesTransform, Transform


@dataclass(frozen=True, slots=True)
class MessageParts:
    """The components of a run that change messages.

    Args:
        uplink: transforms what clients send; None: nothing does.
        attack: what malicious clients do.
        aggregator: of the server; None: the rule takes its own mean.
        privacy: the kind of differential privacy.
    """

    uplink: Transform | None
    attack: Attack
    aggregator: Aggregator | None
    privacy: Privacy

    @classmethod
    def of(cls, settings: Settings) -> MessageParts:
        """Return those of the settings.

        Raises:
            SettingsError: one of them cannot be made.
        """

        def made(name: str, kind: Any) -> Any:
            with own_errors(name):
                return bind(getattr(settings, name), name, kind)()

        uplink, attack = made("uplink", MakesTransform), made("attack", MakesAttack)
        aggregator, privacy = made("aggregator", MakesAggregator), made("privacy", MakesPrivacy)
        some = None if type(aggregator) is Aggregator else aggregator
        return cls(None if type(uplink) is Transform else uplink, attack, some, privacy)

    def attackers(self, settings: Settings, dataset: Dataset, partition: Partition) -> Attackers | None:
        """Return the malicious clients; None if there are none.

        Raises:
            SettingsError: they cannot attack this task or these data.
        """
        clients, first = self.attack.attackers(settings.seed, settings.trained), self.attack.from_round
        if not clients and self.attack.fraction:
            number = f"attack.fraction={self.attack.fraction:g} of {settings.trained} clients"
            raise SettingsError(f"{number} is no malicious client; use at least {1 / settings.trained:.3g}")
        if first > settings.rounds:
            raise SettingsError(f"attack.from_round={first}: the last round is {settings.rounds}")
        if not clients:
            return None
        name = f"attack={component_name(settings, 'attack')}"
        if self.attack.predicts_classes and dataset.task != "classification":
            raise SettingsError(f"{name} changes labels, and there are none: the task is {dataset.task}")
        cohort = max(1, round(settings.fraction * settings.trained))
        found = Attackers(self.attack, frozenset(clients), settings.seed, cohort)
        with own_errors(name):
            found.poisoned(shard(dataset, partition, clients[0]))
        return found

    def give(
        self, rule: ServerRule[Any], module: ClientModule, attackers: Attackers | None, settings: Settings
    ) -> Settings:
        """Give a rule what changes messages at the server; return the settings, with the noise of privacy=client.

        Raises:
            SettingsError: the settings of privacy=client contradict the run.
        """
        rule.attackers = attackers if self.attack.colludes else None
        if isinstance(rule, MeanRule):
            rule.aggregator, privacy = self.aggregator, self.privacy
            if isinstance(privacy, ClientPrivacy) and any(module.shared_parameters()):
                settings = replace(settings, privacy={**settings.privacy, "noise": _noise(privacy, settings)})
                expected = settings.fraction * settings.trained
                how = settings.privacy["noise"], privacy.delta, settings.fraction
                rule.privacy = Release(privacy.clip, *how, expected, settings.seed, privacy.adapt)
        return settings


def _noise(privacy: ClientPrivacy, settings: Settings) -> float:
    """Return the noise multiplier of a run, for which the clients must be drawn as the accountant supposes."""
    how, clients = settings.participation, settings.trained
    if settings.fraction < 1 and how.sampling != "poisson":
        raise SettingsError("privacy=client needs participation.sampling=poisson, or fraction=1")
    for key, value in (("spread", 0), ("cycle", 1), ("last", "sampled")):
        if (found := getattr(how, key)) != value:
            raise SettingsError(f"participation.{key}={found}: privacy=client needs {value}")
    if privacy.delta >= 1 / clients:
        raise SettingsError(f"privacy.delta={privacy.delta:g}: expected below 1/N = {1 / clients:g}")
    if privacy.noise is not None:
        return privacy.calibrated(settings.fraction, settings.rounds)
    before = doing("calibrating the noise of privacy=client")
    noise = privacy.calibrated(settings.fraction, settings.rounds)
    doing(before)
    return noise
