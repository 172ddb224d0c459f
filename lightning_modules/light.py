"""Imports Lightning without packages that torchmetrics imports for plots and for metrics of images and audio.

It does nothing if Lightning or torchmetrics is imported already. Otherwise torchmetrics has no such metrics and plots
in this process, and Lightning is imported in half of the time and with 100 MB less memory.
"""

from __future__ import annotations

import gc
import importlib
import sys

from lightning_utilities.core import imports

UNUSED = frozenset({"matplotlib", "scipy", "torchvision", "transformers"})


def _import_lightning() -> None:
    met, available = imports.RequirementCache.__bool__, imports.package_available

    def is_met(cache: imports.RequirementCache) -> bool:
        name = (cache.requirement or cache.module or "").partition(">")[0].partition("[")[0].strip()
        return name not in UNUSED and met(cache)

    imports.RequirementCache.__bool__ = is_met  # type: ignore[method-assign]
    imports.package_available = lambda package_name: package_name not in UNUSED and available(package_name)
    collecting = gc.isenabled()
    gc.disable()  # imports make no garbage, but looking for it takes a fifth of their time
    try:
        importlib.import_module("lightning")
    finally:
        if collecting:
            gc.freeze()
            gc.enable()
        imports.RequirementCache.__bool__ = met  # type: ignore[method-assign]
        imports.package_available = available


if not {"lightning", "torchmetrics"}.intersection(sys.modules):
    _import_lightning()
