"""From the config of a component to the object."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import pytest
from support import refusing

from pflsim.config.components import bind, bind_method, check_component, parameters_of, resolve, settings_of
from pflsim.errors import SettingsError

NUMBERS = itertools.count()
COMPONENTS = """
    from typing import Literal
    from lightning_modules.nets.net import Net
    def box(width, *, height: int = 2, colours: tuple[str, ...] = ("red",), kind: Literal["big", "small"] = "big",
            scale: float = 1.0, size: float | int = 1) -> Net:
        return width, height, colours, kind
    def needy(*, path: str): return path
    class Client:
        def __init__(self, net, *, lam: float = 1.0, alpha: float, unit: Literal["module", "tensor"]):
            self.got = net, lam, alpha, unit
    class Server:
        def fuse(self): ...
        def __init__(self, *, alpha: float = 5.0, sigma: float = 7.0, unit: Literal["module", "tensor"] = "module"):
            self.got = alpha, sigma, unit
    class Twice:
        def __init__(self, *, lam: float = 1.0): ...
    CONSTANT = 3
    class Outer:
        class Inner: ...
        @classmethod
        def made(cls): ...
        def state_dict(self): ...
        def __call__(self): ...
    outer = Outer()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of made-up components, under a name of its own."""
    name = f"components_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(dedent(COMPONENTS))
    monkeypatch.syspath_prepend(tmp_path)
    return name


def method(module: str, client: str = "Client", server: str = "Server", **settings: object) -> dict[str, object]:
    sides = {"client": {"_target_": f"{module}.{client}"}, "server": {"_target_": f"{module}.{server}"}}
    return {**sides, **settings}


def test_bind_fills_in_the_settings(module: str) -> None:
    made = bind({"_target_": f"{module}.box", "colours": ["blue", "green"], "kind": "small"})
    assert made(9) == (9, 2, ("blue", "green"), "small")
    assert pickle.loads(pickle.dumps(made))(9) == made(9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heigth": 3}, r"model\.heigth.*model\.height\?"),
        ({"kind": "bigg"}, r"model\.kind='bigg'.*big or small"),
        ({"width": 3}, r"model\.width"),
        ({"height": True}, r"model\.height=true"),
        ({"scale": float("nan")}, r"model\.scale=nan"),
        ({"variants": [{"height": 3}, {"height": "x"}]}, r"model\.variants\[1\].*model\.height='x'"),
        ({"height": 3, "common": {"height": "x"}}, r"model\.common.*model\.height='x'"),
    ],
)
def test_what_is_refused(module: str, settings: dict[str, object], message: str) -> None:
    with refusing(match=message):
        check_component({"_target_": f"{module}.box", **settings}, "model")


def test_values_become_the_types_of_their_settings(module: str) -> None:
    checked = check_component({"_target_": f"{module}.box", "scale": 2, "size": 3, "colours": ("blue",)}, "model")
    assert checked == {"_target_": f"{module}.box", "scale": 2.0, "size": 3, "colours": ["blue"]}
    assert type(checked["scale"]) is float and type(checked["size"]) is int


OWN = """
    from __future__ import annotations
    from typing import TYPE_CHECKING, Literal, Optional
    import torch
    from jaxtyping import Float
    if TYPE_CHECKING:
        from nowhere import Thing
    class Base:
        def __init__(self, num_classes, width=8, rate=0.5, *more, names=("a",), act=torch.relu, thing: Thing = 2,
                     table: torch.Tensor = None, kind: Literal["p", "q"] = "p", depth: int = None, **rest): ...
    class Child(Base): ...
"""


def test_all_parameters_of_an_own_model_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any value fits where the signature has no type, or one that is none of a setting."""
    (tmp_path / "own_model_settings.py").write_text(dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    for target in ("own_model_settings.Base", "own_model_settings.Child"):
        found = settings_of({"": target}, "model", ["rest", "act"])
        assert {name: (p.annotation, p.default) for name, p in found.items()} == {
            "variants": (list[dict[str, Any]], []), "width": (int, 8), "rate": (float, 0.5),
            "names": (Any, ("a",)), "act": (Any, ...), "thing": (Any, 2), "table": (Any, None),
            "kind": (Literal["p", "q"], "p"), "depth": (int | None, None), "rest": (Any, ...),
        }  # fmt: skip
    assert "act" not in settings_of({"": "own_model_settings.Base"}, "model")
    with pytest.raises(SettingsError, match=r"model\.width=x|model\.width='x'"):
        check_component({"_target_": "own_model_settings.Base", "width": "x"}, "model")


@pytest.mark.parametrize("given", [{"alpha": 3.0, "unit": "tensor"}, {}])
def test_each_side_of_a_method_gets_what_it_names(module: str, given: dict[str, object]) -> None:
    """A default reaches the side that does not declare it."""
    client, server = bind_method(method(module, **given))
    alpha, unit = given.get("alpha", 5.0), given.get("unit", "module")
    assert client("net").got == ("net", 1.0, alpha, unit) and server().got == (alpha, 7.0, unit)


def test_a_method_has_one_place_per_default(module: str) -> None:
    both = {"client": f"{module}.Client", "server": f"{module}.Twice"}
    with pytest.raises(SettingsError, match="Twice.*'lam'"):
        settings_of(both)


def test_settings_of_a_method_are_flat(module: str) -> None:
    node = method(module)
    node["client"] = {"_target_": f"{module}.Client", "lam": 2.0}
    with pytest.raises(SettingsError, match=r"method\.client\.lam: write method\.lam"):
        bind_method(node)
    with pytest.raises(SettingsError, match=r"method .*client\._target_ .*server\._target_"):
        bind_method({"_target_": f"{module}.box"})
    with pytest.raises(SettingsError, match="_target_"):
        bind(method(module, alpha=1.0))


def test_resolve_names_what_is_near(module: str) -> None:
    with pytest.raises(SettingsError, match=r"Clent.* Client\?"):
        resolve(f"{module}.Clent")
    with pytest.raises(SettingsError, match="CONSTANT"):
        resolve(f"{module}.CONSTANT")
    with pytest.raises(SettingsError, match=r"model=lightning_modules.nets.mlpp.Mlp: "):
        resolve("lightning_modules.nets.mlpp.Mlp", key="model")
    for target in ("nowhere", "nowhere.Thing", "", "json.loads"):
        with pytest.raises(SettingsError, match="^_target_="):
            resolve(target)


def test_names_inside_classes(module: str) -> None:
    assert resolve(f"{module}.Outer.Inner").__qualname__ == "Outer.Inner"
    assert resolve(f"{module}.Outer.made").__name__ == "made"
    for name, message in {"Outer.Iner": "Outer has no class or function Iner", "outer": "found Outer"}.items():
        with pytest.raises(SettingsError, match=message):
            resolve(f"{module}.{name}", key="model._target_")


def test_a_function_that_is_named_as_its_module(here: Path) -> None:
    """`from many.alexnet import alexnet` is the function also after `import many.alexnet`."""
    (here / "many").mkdir()
    (here / "many" / "__init__.py").write_text("from many.alexnet import alexnet\n")
    (here / "many" / "alexnet.py").write_text("def alexnet(num_classes: int = 10): ...\n")
    for target in ("many.alexnet.alexnet", "many.alexnet"):
        assert parameters_of(resolve(target), every=True).keys() == {"num_classes"}


def test_an_error_inside_a_module_is_not_taken_for_a_missing_target(here: Path) -> None:
    (here / "broken_part.py").write_text("import surely_not_installed\ndef f(): ...\n")
    with pytest.raises(SettingsError, match=r"surely_not_installed.*broken_part\.py, line 1"):
        resolve("broken_part.f")
