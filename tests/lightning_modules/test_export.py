"""Models of finished runs: loaded with `pflsim.load_model`, and written by `export`."""

from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support import check_loaded, examples_of, refusing

import pflsim
from pflsim.analysis.runs import Run
from pflsim.cli import main
from pflsim.errors import SettingsError
from pflsim.records.evaluation import Scope

pytestmark = pytest.mark.slow

SMALL = ["data=digits", "clients=4", "rounds=2", "executor=inline", "batch_size=16", "lr=0.05", "lockstep=false"]
CNN_BN = ["model=cnn_bn", "model.channels=[4]", "model.padding=2"]
GLOBAL = Scope("global", "test", "received")


def made(folder: Path, *overrides: str) -> Run:
    return pflsim.run(overrides=[*SMALL, "progress=none", f"run_dir={folder}", *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=pfedpm", "model=pfedpm_cnn_mh", "model.padding=2"],
        ["method=r_pfedpm", "model=pfedpm_cnn_mh", "model.padding=2"],
        ["method=fedproto", "model.variants=[{hidden:[7,5]},{hidden:[5]}]", "method.predict=head"],
        ["method=fedavg", *CNN_BN, "buffers=recalibrate"],
        ["method=fedavg", *CNN_BN, "buffers=local"],
        ["method=fedbn", *CNN_BN, "data.standardize=true", "init=per_client"],
        ["method=per_fedavg", "eval.received=true", "fraction=0.5", "rounds=1"],
        ["method=pfedhn", "fraction=0.5", "seed=3"],
        ["method=fedfcd", "method.decision_fusion=false", "faults.straggler=0.5", "precision=bf16"],
        ["method=fedproto", "optimizer=adam", "optimizer.keep=true", "lr=0.01"],
        ["method=ditto", "uplink=topk"],
    ],
    ids=" ".join,
)
def test_kinds_of_models(overrides: list[str], tmp_path: Path) -> None:
    check_loaded(made(tmp_path / "run", *overrides), *range(4))


def test_neither_the_data_nor_the_run_s_other_clients_are_needed(tmp_path: Path) -> None:
    """FedBABU adapts its model to the examples of a client; a resumed run stores that as a straight one does."""
    rng, file = np.random.default_rng(0), tmp_path / "data.npz"
    labels = np.arange(200) % 4
    x = rng.normal(labels[:, None], 1, (200, 6)).astype(np.float32)
    np.savez(file, x_train=x[:150], y_train=labels[:150], x_test=x[150:], y_test=labels[150:])
    data = ["data=npz", f"data.path={file}", "data.standardize=true", "model.hidden=[8]", "method=fedbabu"]
    straight = made(tmp_path / "straight", *data)
    resumed = pflsim.resume(made(tmp_path / "resumed", *data, "rounds=1"), rounds=2, progress="none")
    tests = examples_of(straight)
    file.unlink()
    for private in (straight.folder / "checkpoints" / "round_0002").glob("*_000.pt"):
        private.unlink()
    check_loaded(straight, 1, 2, tests=tests)
    check_loaded(resumed, 1, 2, tests=tests)


def test_the_server_s_model_and_other_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", "method=ditto", "rounds=3", "checkpoint.every=1", "checkpoint.keep=3")
    check_loaded(run, 1, scope=GLOBAL)
    inputs = examples_of(run)[1].x
    with torch.inference_mode():
        first, last, best = (pflsim.load_model(run, 1, r)(inputs) for r in (1, "last", "best"))
        alone, on_client = (pflsim.load_model(run, client, model="global")(inputs) for client in (None, 1))
    assert torch.equal(alone, on_client) and not torch.equal(alone, last)
    assert not torch.equal(first, last) and best.shape == last.shape
    capsys.readouterr()
    assert (line := run.at("best_val")) and pflsim.load_model(run, 1).about["round"] == line.round == 2
    assert not capsys.readouterr().err
    rmtree(run.folder / "checkpoints" / "round_0002")
    assert pflsim.load_model(run, 1).about["round"] == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert "round 3 " in said and "round 2 " in said and "checkpoint.best=true" in said


def test_the_best_round_is_the_report_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `checkpoint.best` it is saved and exported; otherwise it is named."""
    settings = ("method=ditto", "rounds=30", "lr=0.3", "stop.patience=1")
    run, other = made(tmp_path / "run", *settings, "checkpoint.best=true"), made(tmp_path / "other", *settings)
    line = run.at("best_val")
    assert line is not None and line.round < (last := run.done) < 30
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {
        f"round_{n:04d}" for n in (line.round, last)
    }
    assert pflsim.load_model(run, 1, "best").about["round"] == line.round
    assert (
        main(["export", str(run.folder), "--client", "1"]) == main(["export", str(other.folder), "--client", "1"]) == 0
    )
    for folder, expected in ((run.folder, line.round), (other.folder, last)):
        with safe_open(folder / "export" / "client_1.safetensors", "pt") as file:
            assert file.metadata()["round"] == str(expected)
    assert "checkpoint.best=true" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=rf"round {line.round} .*checkpoint.best=true.* rounds {last}"):
        pflsim.load_model(other, 1, "best")
    with pytest.raises(SettingsError, match="checkpoint.best=true needs validation"):
        made(tmp_path / "none", "checkpoint.best=true", "split.validation=0")


def test_the_files_of_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")  # as a run on a GPU leaves it
    run = made(tmp_path / "run", "method=ditto", "model.hidden=[8]")
    folder, inputs = tmp_path / "out of it", examples_of(run)[3].x
    for options in (["--client", "2, 3"], ["--client", "3", "--model", "global"], []):
        assert main(["export", str(run.folder), *options, "--out", str(folder)]) == 0
    names = ("client_2", "client_3", "client_3_global", "global")
    assert {path.name for path in folder.iterdir()} == {f"{n}.{kind}" for n in names for kind in ("pt2", "safetensors")}
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert str(folder / "global.pt2") in capsys.readouterr().out
    model = pflsim.load_model(run, 3)
    with refusing("method=ditto", "model=", "pflsim.export"):
        model.save_pretrained(folder)
    with torch.inference_mode():
        assert torch.equal(torch.export.load(folder / "client_3.pt2").module()(inputs), model(inputs))
    with safe_open(folder / "client_3.safetensors", "pt") as file:
        about, state = file.metadata(), model.client.state_dict()
        assert (about["method"], about["client"], about["round"], about["scale"]) == ("ditto", "3", "2", "16.0")
        assert set(file.keys()) == set(state) and all(torch.equal(file.get_tensor(key), state[key]) for key in state)
    (tmp_path / "file").touch()
    assert main(["export", str(run.folder), "--client", "2", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_what_a_run_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", "method=fedper", "eval.holdout_clients=1", "clients=5", "split.validation=0")

    def refused(*words: str, folder: Path = run.folder, **options: object) -> None:
        with refusing(*words):
            pflsim.load_model(folder, **options)  # type: ignore[arg-type]

    refused("0 to 3", client=9)
    refused("0 to 3", "joined", client=4)
    refused("net.head", "client")  # FedPer shares the body
    refused("personal", model="personal")
    refused("rounds 2", client=0, round=1)
    refused("best", "last", client=0, round="x")
    refused("validation", client=0, round="best")
    refused("none", folder=tmp_path / "none", client=0)
    assert main(["export", str(run.folder), "--client", "x"]) == 2
    assert "--client x" in capsys.readouterr().err
    private = run.folder / "checkpoints" / "round_0002" / "clients_000000.pt"
    private.write_bytes(private.read_bytes()[:-1])
    refused("clients_000000.pt", client=0)
    record = run.folder / "partition.json"
    record.write_text(record.read_text().replace('"inputs"', '"before"'))
    refused("partition.json", "inputs", client=1)
    recalibrated = made(tmp_path / "other", "method=ditto", *CNN_BN, "buffers=recalibrate", "rounds=1")
    refused("global", "ditto", folder=recalibrated.folder, client=1, model="global")
    refused("no global model", folder=made(tmp_path / "proto", "method=fedproto", "rounds=1").folder)
