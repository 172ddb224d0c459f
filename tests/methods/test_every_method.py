"""Every method in unusual surroundings: it works, or is refused before the first round."""

from __future__ import annotations

import pytest
from support import METHOD_PARAMS, prepared

from lightning_modules.contract.checks import newcomers_join
from pflsim.errors import SettingsError


@pytest.mark.parametrize("odd", [["precision=bf16"], ["model=tabular_mlp", "model.hidden=[]", "data=wine"]])
@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_rounds_and_newcomers(method: str, odd: list[str]) -> None:
    few = ["clients=4", "partition=iid", "split.validation=0.2", "rounds=2", "batch_size=8"]
    try:
        prepared(f"method={method}", *few, *odd)
    except SettingsError as error:
        assert "body" in str(error)
        return
    newcomers_join(lambda *more: prepared(f"method={method}", *few, *odd, *more))
