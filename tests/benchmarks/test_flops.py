"""Operations are counted right, and the machine's rate is a rate."""

from __future__ import annotations

import pytest

from benchmarks.flops import forward_flops, step_flops
from benchmarks.machine import rates
from lightning_modules.nets.cnn import Cnn
from lightning_modules.nets.mlp import Mlp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("batch", [1, 10])
def test_an_mlp(batch: int) -> None:
    """Two products for the first layer (its inputs need no gradient) and three for the second, 2·B·in·out each."""
    net = Mlp((1, 28, 28), 10)
    assert step_flops(net, (1, 28, 28), batch) == 2 * batch * (2 * 784 * 100 + 3 * 100 * 10)
    assert forward_flops(net, (1, 28, 28), batch) == 2 * batch * (784 * 100 + 100 * 10)


def test_a_cnn() -> None:
    """As the MLP: a convolution is a product for each of its output's places."""
    net = Cnn((1, 28, 28), 10)
    first, second, hidden, head = 24 * 24 * 25 * 32, 8 * 8 * 25 * 32 * 64, 4 * 4 * 64 * 512, 512 * 10
    assert forward_flops(net, (1, 28, 28), 10) == 20 * (first + second + hidden + head)
    assert step_flops(net, (1, 28, 28), 10) == 20 * (2 * first + 3 * (second + hidden + head))


def test_rates_of_the_machine() -> None:
    found = rates(seconds=0.01, sizes=(64, 96))
    assert found.keys() == {"one", "two"} and min(found.values()) > 0
