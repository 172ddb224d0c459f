import json
import struct

import numpy as np
import torch
from run_files import read_message, read_server
from safetensors.numpy import load_file

from pflsim.messages import Message, Prototypes, Uplink
from pflsim.records.trace import write_message, write_server


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


def test_an_uplink_comes_back_as_it_was_views_and_scalars_included(tmp_path):
    sent = full_message()
    path = write_message(tmp_path, 1, "up", 3, sent, "pfedcfr", 41)
    assert path == tmp_path / "trace" / "round_0001" / "up_003.safetensors"
    back = read_message(path)
    assert isinstance(back, Uplink)
    assert (back.client, back.num_examples, back.numbers) == (3, 41, {"loss": 0.1, "count": 7.0})
    for section in ("weights", "extra"):
        ours, theirs = getattr(sent, section), getattr(back, section)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    assert sent.prototypes is not None
    assert back.prototypes is not None
    assert torch.equal(back.prototypes.means, sent.prototypes.means)
    assert torch.equal(back.prototypes.counts, sent.prototypes.counts)
    assert [p.name for p in path.parent.iterdir()] == ["up_003.safetensors"]


def test_names_and_header_are_the_documented_ones(tmp_path):
    path = write_message(tmp_path, 12, "up", 3, full_message(), "pfedcfr", 41)
    assert header(path) == {"method": "pfedcfr", "round": "12", "client": "3", "num_examples": "41"}
    arrays = load_file(path)
    assert set(arrays) == {
        *("weights/net.body.0.weight", "weights/net.body.0.bias", "weights/shared", "weights/steps"),
        *("prototypes/means", "prototypes/counts", "extra/psi/layer.0", "extra/none", "numbers/loss", "numbers/count"),
    }
    assert arrays["numbers/loss"].shape == ()
    assert arrays["numbers/loss"].dtype == np.float64


def test_numpy_recomputes_a_fusion_from_the_files_alone(tmp_path):
    generator = torch.Generator().manual_seed(1)
    sent = [{"net.w": torch.randn(3, 2, generator=generator, dtype=torch.float64)} for _ in range(4)]
    for client, weights in enumerate(sent):
        uplink = Uplink(weights, client=client, num_examples=10 + client)
        write_message(tmp_path, 1, "up", client, uplink, "fedavg", 10 + client)
    total = sum(10 + client for client in range(4))
    fused = torch.stack([w["net.w"] * (10 + client) for client, w in enumerate(sent)]).sum(0) / total
    write_message(tmp_path, 2, "down", 0, Message({"net.w": fused}), "fedavg", 10)

    ups = sorted((tmp_path / "trace" / "round_0001").glob("up_*.safetensors"))
    n = np.array([int(header(path)["num_examples"]) for path in ups])
    stacked = np.stack([load_file(path)["weights/net.w"] for path in ups])
    down = load_file(tmp_path / "trace" / "round_0002" / "down_000.safetensors")
    np.testing.assert_allclose(down["weights/net.w"], np.einsum("k,kij->ij", n / n.sum(), stacked), rtol=1e-12)


def test_the_servers_numbers_keep_their_names_and_texts(tmp_path):
    zeta = torch.rand(3, 3, requires_grad=True)
    path = write_server(tmp_path, 2, {"zeta/net.body.0": zeta.T}, {"units": "net.body.0,net.head"})
    assert path.name == "server.safetensors"
    tensors, texts = read_server(path)
    assert torch.equal(tensors["zeta/net.body.0"], zeta.detach().T)
    assert texts == {"round": "2", "units": "net.body.0,net.head"}
