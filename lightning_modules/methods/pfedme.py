"""pFedMe: personal models by Moreau envelopes."""

from torch import Tensor, nn
from torch.func import functional_call

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Count
from pflsim.config.validate import Positive, stable_penalty
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.params import Selector, load


class PFedMe(ClientModule):
    """Trains a personal model θ near the global model w (T Dinh et al. 2020, eq. 7, Algorithm 1).

    On each mini-batch D, K steps θ ← θ − η_p·∇_θ[F(θ; D) + λ/2·‖θ − w‖²] minimise eq. 7 approximately, followed by
    w ← w − η·λ·(w − θ) (Algorithm 1, line 8). η is the run's learning rate. w is shared, θ is private. Reported model:
    θ, after local training; the global model is w.

    Args:
        net: body and head; its parameters are w.
        training: the run's local training settings.
        lam: λ > 0, with η_p·λ ≤ 2 and η·λ ≤ 1; a larger value keeps θ nearer to w. None: 15, as in the authors'
            commands, or 1/η if that is less.
        inner_steps: K ≥ 1.
        personal_lr: η_p > 0, constant over the rounds; at most 2/λ, above which θ diverges.

    Raises:
        SettingsError: θ would diverge, or a step of w would go beyond θ.

    Notes:
        - θ starts each round from the received w, and each mini-batch from its current value, as in the authors'
          experiments; the paper does not specify the start.
        - Momentum, weight decay and lr_decay of the run apply to w only.
        - Running statistics of normalisation layers come from θ's forward passes and serve both θ and w.
    """

    lockstep = True

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: Positive | None = None,
        inner_steps: Count = 5,
        personal_lr: Positive = 0.09,
    ):
        super().__init__(net, training)
        training.require_sgd("pfedme")
        lr = training.lr
        self.lam = min(15.0, 1 / lr) if lam is None else lam
        self.personal_lr = personal_lr
        stable_penalty("method.lam", self.lam, personal_lr, rate="method.personal_lr")
        if lr * self.lam > 1 + 1e-9:
            raise SettingsError(
                f"method.lam={self.lam:g}: a step of w covers lr*lam = {lr * self.lam:.4g} of the distance to θ and "
                f"overshoots it; with lr={lr:.4g} set method.lam to at most 1/lr = {1 / lr:.4g}"
            )
        self.inner_steps = inner_steps
        self.theta = nn.ParameterDict({name: nn.Parameter(w.detach().clone()) for name, w in _dotless(net).items()})

    def personal(self) -> dict[str, Tensor]:
        """Return θ by the names, and in the order, of the net's parameters."""
        names = (name for name, _ in self.net.named_parameters())
        return {name: self.theta[key] for name, key in zip(names, _dotless(self.net), strict=True)}

    def receive(self, downlink: Message) -> None:
        """Set w and θ to the server's model."""
        super().receive(downlink)
        load(self.theta, _dotless(self.net))

    def schedule(self) -> Schedule:
        """Return one stage in which θ takes K steps and w one on each mini-batch."""
        personal = Phase("personal", trainable=Selector(("theta",)), lr=self.personal_lr, plain=True)
        return (Alternate((*[personal] * self.inner_steps, Phase("global", "distance")), every="batch"),)

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of θ and its penalty towards w (eq. 7)."""
        inputs, labels = batch
        pairs = zip(self.personal().values(), self.net.parameters(), strict=True)
        return {self.loss_name: self.task_loss(self.predict(inputs), labels), "prox": proximal(pairs, self.lam)}

    def distance(self, batch: Batch) -> Terms:
        """Return λ/2·‖w − θ‖², whose gradient is that of the Moreau envelope (Algorithm 1, line 8)."""
        del batch
        pairs = zip(self.net.parameters(), self.personal().values(), strict=True)
        return {"prox": proximal(pairs, self.lam)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of the personal model θ."""
        return functional_call(self.net, self.personal(), (inputs,))

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of the global model w."""
        return self.net(inputs)


def _dotless(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by names without dots, as ParameterDict requires."""
    return {name.replace(".", "/"): value for name, value in net.named_parameters()}
