"""FedBABU: a shared body trained under a head that stays as it is initialised."""

from typing import Literal

from lightning_modules.base import ClientModule
from lightning_modules.loop import train_phase
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import CountOrZero
from pflsim.data.federated import Shard
from pflsim.params import BODY, HEAD, NET


class FedBABU(ClientModule):
    """Minimises F(body, head₀) over the shared body; head₀ is the initial head of all clients (Oh et al. 2022, Alg. 1).

    Reported model: personal, as received, after `finetune_epochs` of SGD on a copy. The copy is discarded.

    Args:
        net: body and head.
        training: the run's local training settings, for fine-tuning too.
        finetune_epochs: epochs of fine-tuning before each evaluation; 0 reports the mean body with the initial head.
        finetune: what is fine-tuned: the head, the body or both.

    Notes:
        While the head alone is fine-tuned, the body is in evaluation mode, so its running statistics do not change.
    """

    lockstep = True
    private_steps = True
    shared = BODY
    equal_start = HEAD
    reported_phase = "received"

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        finetune_epochs: CountOrZero = 5,
        finetune: Literal["head", "body", "both"] = "both",
    ):
        super().__init__(net, training)
        self.finetune_epochs = finetune_epochs
        self.finetuned = {"head": HEAD, "body": BODY, "both": NET}[finetune]

    def schedule(self) -> Schedule:
        """Return one phase that trains the body."""
        return (Phase(trainable=BODY),)

    def before_evaluation(self, shard: Shard) -> None:
        """Fine-tune the model on the client's training examples."""
        objective = "head_objective" if self.finetuned is HEAD else "objective"
        if self.finetune_epochs:
            train_phase(self, Phase("finetune", objective, self.finetuned, epochs=self.finetune_epochs), shard.train)
