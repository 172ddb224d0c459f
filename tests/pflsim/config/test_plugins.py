"""Methods, partitions and data of installed packages."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pflsim.config import plugins
from pflsim.config.compose import CONFIGS, composed, config_folders, to_settings
from pflsim.config.help import groups_in
from pflsim.errors import SettingsError
from pflsim.records.environment import versions
from pflsim.records.own_code import code_digests

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = ROOT / "examples" / "plugin"
PARTITION = """
import numpy as np

def halves(labels: np.ndarray, num_classes: int, clients: int, rng: np.random.Generator, client_ids: np.ndarray | None,
           *, first: int = 10) -> list[np.ndarray]:
    return np.array_split(np.arange(first), clients)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """site-packages with the template, and a package with a partition and a name that pflsim has."""
    site = tmp_path / "site-packages"
    info = site / "others-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 2.0\n")
    names = "[pflsim.methods]\nother_prox = body_prox:BodyProx\nfedavg = body_prox:BodyProx\n"
    (info / "entry_points.txt").write_text(f"{names}[pflsim.partitions]\nhalves = others_rows:halves\n")
    (site / "others_rows.py").write_text(PARTITION)
    (site / "body_prox.py").write_text((TEMPLATE / "body_prox.py").read_text())
    monkeypatch.syspath_prepend(str(site))
    plugins.provided.cache_clear()
    yield site
    plugins.provided.cache_clear()
    for name in ("body_prox", "others_rows"):
        sys.modules.pop(name, None)


def test_names_of_packages(installed: Path) -> None:
    """A run has the name and the settings; help and versions list them; a change of the package is one of own code."""
    folders = config_folders([])
    assert "other_prox" in groups_in(folders)["method"]
    given = {"method": "other_prox", "method.mu": 0.5, "partition": "halves", "partition.first": 12, "clients": 3}
    settings = to_settings(composed(given, folders))
    assert (settings.names["method"], settings.names["partition"]) == ("other_prox", "halves")
    assert settings.method["client"] == {"_target_": "body_prox.BodyProx"} and settings.method["mu"] == 0.5
    assert settings.partition == {"_target_": "others_rows.halves", "first": 12}
    assert versions()["others"] == "2.0"
    before = code_digests(settings)
    assert before.keys() == {"body_prox", "others_rows"}
    (installed / "body_prox.py").write_text((TEMPLATE / "body_prox.py").read_text().replace("0.1", "0.2"))
    assert code_digests(settings)["body_prox"] != before["body_prox"]


def test_a_name_of_pflsim(installed: Path, tmp_path: Path) -> None:
    """A name that a package and a config file have is refused, whichever folder the file is in."""
    (tmp_path / "own" / "method").mkdir(parents=True)
    (tmp_path / "own" / "method" / "other_prox.yaml").write_text((CONFIGS / "method" / "fedavg.yaml").read_text())
    for name, folder in (("fedavg", []), ("other_prox", [tmp_path / "own"])):
        with pytest.raises(SettingsError, match=f"method={name}: others and .*{name}.yaml"):
            composed({"method": name}, config_folders(folder))
    other = installed / "more-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text(
        "[pflsim.methods]\nother_prox = more:Own\nmore.fedavg = body_prox:BodyProx\n"
    )
    plugins.provided.cache_clear()
    with pytest.raises(SettingsError, match="(others and more|more and others) have a method"):
        composed({"method": "other_prox"}, config_folders([]))
    assert composed({"method": "more.fedavg"}, config_folders([])).config["names"]["method"] == "more.fedavg"
    assert composed({"method": "body_prox.BodyProx"}, config_folders([])).config["names"]["method"] == "BodyProx"


@pytest.mark.slow
def test_the_template(tmp_path: Path) -> None:
    """The package of examples/plugin installs, and its method runs on Ray and passes check-method."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "site", TEMPLATE], check=True, capture_output=True, timeout=300)
    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def launch(*words: str) -> str:
        command = [sys.executable, ROOT / "launch.py", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "body_prox" in launch("--help")
    launch("method=body_prox", "method.mu=0.5", "clients=2", "rounds=1", "executor=ray", "placement.actors=1")
    assert "all checks passed" in launch("check-method", "body_prox")
