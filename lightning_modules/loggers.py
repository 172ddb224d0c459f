"""Lightning's loggers for the scalars of a run (`tracking.loggers`)."""

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger

PROJECT = "pflsim"
"""The project of Weights & Biases without `WANDB_PROJECT`, and the experiment of MLflow."""


def logger_makers(names: Iterable[str], folder: Path) -> dict[str, Callable[[], Logger]]:
    """Return functions that create the loggers of a run, by name.

    Args:
        names: `csv` writes csv/metrics.csv in the run folder. `wandb` and `mlflow` write a run with the name of the
            folder to Weights & Biases or MLflow, as their environment variables say (`WANDB_MODE`,
            `MLFLOW_TRACKING_URI`, ...); local files are in wandb/ and mlruns/ beside the folder.
        folder: the run folder.
    """
    return {name: partial(_MAKERS[name], folder) for name in names}


def _csv(folder: Path) -> Logger:
    shutil.rmtree(folder / "csv", ignore_errors=True)  # of an earlier session, whose rounds are logged again
    return CSVLogger(folder, name="csv", version="", flush_logs_every_n_steps=1)


def _wandb(folder: Path) -> Logger:
    here, project = folder.resolve(), os.environ.get("WANDB_PROJECT", PROJECT)
    options = {"console": "off", "silent": True}
    return _Wandb(here.name, save_dir=here.parent, id=here.name, project=project, settings=options)


class _Wandb(WandbLogger):
    def finalize(self, status: str) -> None:
        """End the run, so that the next run of a sweep gets its own."""
        self.experiment.finish(exit_code=int(status != "success"))


def _mlflow(folder: Path) -> Logger:
    here = folder.resolve()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses mlruns/ without it
    uri = os.environ.get("MLFLOW_TRACKING_URI", (here.parent / "mlruns").as_uri())
    return MLFlowLogger(PROJECT, here.name, tracking_uri=uri)


_MAKERS: dict[str, Callable[[Path], Logger]] = {"csv": _csv, "wandb": _wandb, "mlflow": _mlflow}
