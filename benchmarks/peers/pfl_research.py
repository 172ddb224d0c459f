"""FedAvg in pfl-research: `python pfl_research.py CASE OUT` in an environment with pfl[pytorch]."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel

from benchmarks.peers import nets

CASE, OUT = sys.argv[1:3]


class Net(torch.nn.Module):
    """The model with the two functions that pfl calls."""

    def __init__(self, name: str):
        super().__init__()
        self.net = nets.MAKE[name]()

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        """Return the mean cross-entropy."""
        self.train(not is_eval)
        return torch.nn.functional.cross_entropy(self.net(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor, is_eval: bool = True) -> dict[str, Weighted]:  # noqa: ARG002
        """Return the accuracy."""
        self.eval()
        return {"accuracy": Weighted(int((self.net(inputs).argmax(1) == labels).sum()), len(labels))}


class Rounds(TrainingProcessCallback):
    """Evaluates the mean on every client's test examples at the end of a round."""

    def __init__(self, clock: nets.Clock, case: dict):
        self.clock, self.case = clock, case

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: ANN001, ANN201, ARG002, D102
        net = model.pytorch_model.net
        counts = [nets.evaluate(net, self.case, client) for client in range(len(self.case["test"]))]
        self.clock.end(sum(c for c, _ in counts) / sum(n for _, n in counts))
        return False, type(aggregate_metrics)()


def main() -> None:
    """Run the case's rounds in this process."""
    case = nets.work(CASE)
    torch.set_num_threads(2)
    clients = list(range(len(case["train"])))

    def user(client: int) -> Dataset:
        inputs, labels = case["train"][client]
        return Dataset([inputs, labels], user_id=str(client), train_kwargs={"is_eval": False})

    cohort = max(1, round(case["fraction"] * len(clients)))
    sampler = get_user_sampler("minimize_reuse", clients)
    backend = SimulatedBackend(FederatedDataset(user, sampler), FederatedDataset(user, sampler))
    net = Net(case["model"])
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    training = NNTrainHyperParams(case["batch_size"], case["epochs"], case["lr"])
    limits = NNAlgorithmParams(case["rounds"], case["rounds"] + 1, cohort, None)
    rounds = Rounds(nets.Clock(Path(OUT)), case)
    FederatedAveraging().run(limits, backend, model, training, NNEvalHyperParams(128), [rounds])


if __name__ == "__main__":
    main()
