import json
import struct

import numpy as np
import torch
from run_files import read_message, read_server
from safetensors.numpy import load_file

from pflsim.messages import Prototypes, Uplink
from pflsim.records.trace import write_trace


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])["__metadata__"]


def full_message():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    means, counts = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 2, 0, 4])
    return Uplink(
        weights={"net.body.0.weight": base.T, "net.body.0.bias": base[0], "shared": base, "steps": torch.tensor(3)},
        prototypes=Prototypes(means, counts),
        extra={"psi/layer.0": torch.tensor(0.5, dtype=torch.float64), "none": torch.zeros(0, 3)},
        numbers={"loss": 0.1, "count": 7},
        client=3,
        num_examples=41,
    )  # fmt: skip


def test_an_uplink_comes_back_with_the_documented_names(tmp_path):
    sent = full_message()
    path = write_trace(tmp_path, 1, "up_003", sent, {"method": "pfedcfr", "client": 3, "num_examples": 41})
    assert path == tmp_path / "trace" / "round_0001" / "up_003.safetensors"
    back = read_message(path)
    assert (back.client, back.num_examples, back.numbers) == (3, 41, {"loss": 0.1, "count": 7.0})
    for section in ("weights", "extra"):
        ours, theirs = getattr(sent, section), getattr(back, section)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    assert torch.equal(back.prototypes.means, sent.prototypes.means)
    assert torch.equal(back.prototypes.counts, sent.prototypes.counts)
    assert header(path) == {"method": "pfedcfr", "round": "1", "client": "3", "num_examples": "41"}
    arrays = load_file(path)
    assert set(arrays) == {
        *("weights/net.body.0.weight", "weights/net.body.0.bias", "weights/shared", "weights/steps"),
        *("prototypes/means", "prototypes/counts", "extra/psi/layer.0", "extra/none", "numbers/loss", "numbers/count"),
    }
    assert arrays["numbers/loss"].shape == () and arrays["numbers/loss"].dtype == np.float64


def test_the_servers_numbers_keep_their_names_and_texts(tmp_path):
    zeta = torch.rand(3, 3, requires_grad=True)
    path = write_trace(tmp_path, 2, "server", {"zeta/net.body.0": zeta.T}, {"units": "net.body.0,net.head"})
    assert path.name == "server.safetensors"
    tensors, texts = read_server(path)
    assert torch.equal(tensors["zeta/net.body.0"], zeta.detach().T)
    assert texts == {"round": "2", "units": "net.body.0,net.head"}
