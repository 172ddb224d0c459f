"""The server of FedAS: the mean weighted by Fisher traces."""

from collections.abc import Sequence

import torch

from pflsim.fusion.means import column, weighted_mean
from pflsim.messages import Uplink
from pflsim.servers.fedavg import FedAvg, State

FISHER_TRACE = "fisher_trace"
"""Key of the trace among an uplink's numbers."""


class FedAS(FedAvg):
    """w ← Σ T_i/T · w_i over the clients of the round, with the Fisher traces T_i and T = Σ T_i (Yang et al. 2024).

    Notes:
        Traces that are not finite count as 0. If no trace is positive, all clients have equal weights. A client that
        does not report does not count. A round without uplinks keeps the model.
    """

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received bodies, weighted by the clients' Fisher traces."""
        if not uplinks:
            return state
        traces = torch.tensor([u.numbers[FISHER_TRACE] for u in uplinks], dtype=torch.float64)
        traces = torch.where(traces.isfinite(), traces, 0.0)
        traces = traces if traces.sum() > 0 else torch.ones_like(traces)
        sent = [u.weights for u, trace in zip(uplinks, traces.tolist(), strict=True) if trace]
        return State({key: weighted_mean(column(sent, key), traces[traces > 0]) for key in state.weights})
