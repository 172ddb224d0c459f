"""Random crops and flips against slices in numpy, and where they are used."""

from typing import Any

import numpy as np
import torch
from support import World, dataset, play, same, trained_states, world

from lightning_modules.lockstep.stacks import stacks
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedproto import FedProto
from lightning_modules.training import Training
from pflsim.config.settings import Settings
from pflsim.data.federated import ROW_BITS, CropFlip, Examples
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.seeding import torch_generator
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.pfedpm import PFedPM as PrototypeServer

IMAGES = dataset(shape=(2, 8, 16))


def numpy_variant(image: np.ndarray, down: int, right: int, flip: bool) -> np.ndarray:
    """The image moved up by `down` and left by `right` pixels, negative ones down and right, with zeros behind it."""
    _, height, width = image.shape
    moved = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                moved[:, row, column] = image[:, row + down, column + right]
    return moved[:, :, ::-1] if flip else moved


def test_every_variant_is_a_crop_of_numpy() -> None:
    crop, seen = CropFlip((8, 16), torch.Generator()), set()
    assert crop.padding == (1, 2) and CropFlip((64, 20), torch.Generator()).padding == (4, 3)
    image = torch.arange(1, 2 * 8 * 16 + 1, dtype=torch.uint8).view(1, 2, 8, 16)
    numbers = torch.arange(2 * 3 * 5)
    for number, got in enumerate(crop.variants(image.expand(len(numbers), -1, -1, -1), numbers).numpy()):
        rest, flip = divmod(number, 2)
        i, j = divmod(rest, 5)
        down, right = (0, 1, -1)[i], (0, 1, 2, -2, -1)[j]
        assert np.array_equal(got, numpy_variant(image[0].numpy(), down, right, bool(flip)))
        seen.add(got.tobytes())
    assert len(seen) == 30


def test_batches_have_the_drawn_variants_and_their_normalisation() -> None:
    def examples(generator: torch.Generator) -> Examples:
        x, y = torch.from_numpy(IMAGES.x), torch.from_numpy(IMAGES.y)
        return Examples(x, y, 255.0, (0.5, 0.25), (2.0, 4.0), CropFlip((8, 16), generator))

    order = torch.tensor([4, 9, 2, 4, 30] * 8)
    numbers = examples(torch_generator(0, "augment", 1, 1)).vary(order)
    assert torch.equal(numbers, examples(torch_generator(0, "augment", 1, 1)).vary(order))
    assert not torch.equal(numbers, examples(torch_generator(0, "augment", 1, 2)).vary(order))
    inputs, labels = examples(torch.Generator()).batch(numbers)
    assert np.array_equal(labels, IMAGES.y[order])
    for row, number, got in zip(order.tolist(), (numbers >> ROW_BITS).tolist(), inputs.numpy(), strict=True):
        i, j = divmod(number // 2, 5)
        stored = numpy_variant(IMAGES.x[row], (0, 1, -1)[i], (0, 1, 2, -2, -1)[j], bool(number % 2))
        mean, std = np.array([0.5, 0.25])[:, None, None], np.array([2.0, 4.0])[:, None, None]
        assert np.abs(got - (stored / 255 - mean) / std).max() < 1e-6
    assert len(set((numbers >> ROW_BITS).tolist())) > 10


def trained(w: World, clients: tuple[int, ...]) -> dict[int, Any]:
    """States of these clients after they trained."""
    executor = w.inline()
    found = trained_states(executor, executor.run(TrainTask(1), executor.send(clients)))
    return {client: found[client] for client in clients}


def augmented(**given: Any) -> World:
    training = Training(lr=0.1, batch_size=4, local_epochs=2)
    return world(FedAvg, FedAvgServer(), training=training, **{"data": IMAGES, "augment": "crop_flip", **given})


def test_a_client_gets_the_same_variants_whoever_trains_beside_it() -> None:
    together, alone = trained(augmented(), (0, 1, 2, 3)), trained(augmented(), (2,))
    assert same({2: together[2]}, alone)
    assert same({2: alone[2]}, {2: trained(augmented(), (3, 2, 0))[2]})
    assert not same(alone, trained(augmented(augment="none"), (2,)))
    assert not same(alone, trained(augmented(seed=1), (2,)))


def test_lockstep_trains_on_the_variants_of_the_loop() -> None:
    loop = augmented()
    found = stacks(Settings(lockstep=True), "fedavg", loop.factory.build(), "cpu", [12, 7, 20, 9])
    assert found and len(found[0]) == 4
    stacked = trained(augmented(stacks=found), (0, 1, 2, 3))
    torch.testing.assert_close(stacked, trained(loop, (0, 1, 2, 3)), rtol=1e-4, atol=1e-5)


def test_evaluation_and_class_means_see_the_stored_images() -> None:
    """At a learning rate of nearly 0, only what sees other images can differ."""

    def outcome(augment: str) -> tuple[Any, Any, Any]:
        training = Training(lr=1e-30, batch_size=4)
        executor = world(FedProto, PrototypeServer(), training=training, data=IMAGES, augment=augment).inline()
        result, _ = play(executor, 1, (0, 1))
        rows = executor.evaluate(EvalRequest("personal", "trained", (0, 1), ("train", "test")))
        return result.reports, executor.server_numbers(), rows

    plain, varied = outcome("none"), outcome("crop_flip")
    assert plain[0][0].losses != varied[0][0].losses
    assert all(torch.equal(plain[1][name], varied[1][name]) for name in plain[1])
    assert plain[2] == varied[2]
