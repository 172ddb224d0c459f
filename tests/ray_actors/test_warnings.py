"""Results that are doubtful: a warning on standard error, in run.log, in summary.json and in the report, once."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import METHOD_PARAMS, prepared

from pflsim import cli
from pflsim.analysis.report.page import page
from pflsim.records.summary import RunMeta
from pflsim.records.tracker import Tracker
from pflsim.types import RoundRecord, TrainReport

SMALL = ["clients=3", "rounds=2", "executor=inline", "progress=quiet", "batch_size=50"]


@pytest.mark.parametrize("method", METHOD_PARAMS)
@pytest.mark.parametrize("model", ["mlp", "cnn_bn"])
@pytest.mark.slow
def test_no_method_warns_about_a_model_with_all_parts(method: str, model: str) -> None:
    sizes = ["model.hidden=[4]"] if model == "mlp" else ["model.channels=[2]", "model.kernel=3", "model.hidden=4"]
    expected = 1 if (method, model) == ("fedbn", "mlp") else 0  # no normalisation layers
    assert len(prepared(*SMALL, f"method={method}", f"model={model}", *sizes).warnings) == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("method=fedper model.hidden=[]", "trains alone"),
        ("method=fedper method.base=0", "trains alone"),
        ("method=fedper method.base=1.0", "all parameters are shared"),
        ("method=fedbn model.hidden=[4]", "all parameters are shared"),
        ("method=fedbn model.hidden=[4] uplink=topk", "all parameters are shared"),  # whose rest a client keeps
        ("method=fedgh model.hidden=[]", "all parameters are shared"),
    ],
)
def test_a_method_that_equals_another_with_this_model(line: str, said: str) -> None:
    (warning,) = prepared(*SMALL, *line.split()).warnings
    assert said in warning and warning.startswith(line.partition(" ")[0].removeprefix("method="))


def report(number: int, **losses: float) -> RoundRecord:
    return RoundRecord(number, (0,), (TrainReport(0, 10, 5, losses),), {}, (), {"train": 1.0})


@pytest.mark.parametrize(
    ("losses", "warns"),
    [
        ({"ce": 99 * math.log(4)}, False),
        ({"ce": 101 * math.log(4)}, True),
        ({"head/ce": 1e17}, True),
        ({"ce": math.inf}, True),
        ({"ce": math.nan}, True),
        ({"ce": 1.0, "prox": 1e17}, False),  # a penalty has no natural size
        ({}, False),
    ],
)
def test_training_that_explodes(tmp_path: Path, losses: dict[str, float], warns: bool) -> None:
    meta = RunMeta("fedavg", "digits", "iid", "abc", "mlp", 1, 3, 0, classes=4)
    with closing(Tracker(tmp_path, meta)) as tracker:
        for number in (1, 2):
            tracker.round(report(number, **losses))
    found = json.loads((tmp_path / "summary.json").read_text()).get("warnings", [])
    assert len(found) == warns
    with closing(Tracker(tmp_path, meta, resume_after=1)) as tracker:
        tracker.round(report(2, **losses))
    assert json.loads((tmp_path / "summary.json").read_text()).get("warnings", []) == found


@pytest.mark.slow
def test_where_a_warning_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is stopped at its end and resumed: nothing is said twice."""
    folder = tmp_path / "run"
    options: list[Any] = ["method=fedbn", "model.hidden=[4]", "lr=1000", "on_nonfinite=keep", f"run_dir={folder}"]
    assert cli.main([*SMALL, *options]) == 0
    said = capsys.readouterr().err
    found = json.loads((folder / "summary.json").read_text())["warnings"]
    assert [warning.partition(" ")[0] for warning in found] == ["fedbn", "training"]
    for warning in found:
        assert said.count(warning) == (folder / "run.log").read_text().count(warning) == 1
        assert warning.partition(" ")[2] in page([folder])  # the page has the method's display name
    assert cli.main([f"resume={folder}", "rounds=3"]) == 0
    assert not capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["warnings"] == found
