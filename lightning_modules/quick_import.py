"""Imports Lightning without the compiler of PyTorch, and without what torchmetrics imports for images, audio and plots.

It does nothing if Lightning or torchmetrics is imported already. Otherwise, in this process, torchmetrics has no such
metrics and plots, and Lightning's Trainer does not recognise compiled modules.
"""

import gc
import importlib
import sys
from types import ModuleType

from lightning_utilities.core import imports
from torch import nn

UNUSED = frozenset({"matplotlib", "scipy", "torchvision", "transformers"})
COMPILER = "torch._dynamo"


def _import_lightning() -> None:
    met, available = imports.RequirementCache.__bool__, imports.package_available

    def is_met(cache: imports.RequirementCache) -> bool:
        name = (cache.requirement or cache.module or "").partition(">")[0].partition("[")[0].strip()
        return name not in UNUSED and met(cache)

    imports.RequirementCache.__bool__ = is_met  # type: ignore[method-assign]
    imports.package_available = lambda package_name: package_name not in UNUSED and available(package_name)
    stub = ModuleType(COMPILER)
    vars(stub).update(
        OptimizedModule=type("OptimizedModule", (nn.Module,), {}), disable=lambda function, *_, **__: function
    )
    replaced = sys.modules.setdefault(COMPILER, stub) is stub
    collecting = gc.isenabled()
    gc.disable()  # imports make no garbage, but looking for it takes a fifth of their time
    try:
        importlib.import_module("lightning")
    finally:
        if collecting:
            gc.freeze()
            gc.enable()
        if replaced:
            del sys.modules[COMPILER]
        imports.RequirementCache.__bool__ = met  # type: ignore[method-assign]
        imports.package_available = available


if not {"lightning", "torchmetrics"}.intersection(sys.modules):
    _import_lightning()
