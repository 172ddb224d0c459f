"""FedAvg in Flower's simulation: `python flower.py CASE OUT` in an environment with flwr[simulation]."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers import nets

CASE, OUT = sys.argv[1:3] if len(sys.argv) > 2 else ("", "")


def client_app(path: str) -> ClientApp:
    """Return the client's program: it loads the weights of the message into a new model."""
    app = ClientApp()

    def loaded(message: Message) -> torch.nn.Module:
        net = nets.MAKE[nets.work(path)["model"]]()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return net

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net, client = loaded(message), int(context.node_config["partition-id"])
        examples = nets.train(net, nets.work(path), client)
        if nets.work(path)["both"]:
            nets.evaluate(net, nets.work(path), client)
        metrics = MetricRecord({"num-examples": examples})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        correct, total = nets.evaluate(loaded(message), nets.work(path), int(context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": total, "accuracy": correct / max(total, 1)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Timed(FedAvg):
    """FedAvg that ends a round after the evaluation's results are in."""

    clock: nets.Clock

    def aggregate_evaluate(self, server_round, replies):  # noqa: ANN001, ANN201, D102
        metrics = super().aggregate_evaluate(server_round, replies)
        self.clock.end(float(metrics["accuracy"]) if metrics else float("nan"))
        return metrics


def main() -> None:
    """Run the case's rounds with one processor for each client."""
    case = nets.work(CASE)
    server, clients = ServerApp(), len(case["train"])

    @server.main()
    def run(grid: Grid, context: Context) -> None:  # noqa: ARG001
        share = case["fraction"]
        strategy = Timed(share, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=clients)
        strategy.clock = nets.Clock(Path(OUT))
        strategy.start(grid, ArrayRecord(nets.MAKE[case["model"]]().state_dict()), case["rounds"])

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client_app(CASE), clients, backend_config=resources)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
