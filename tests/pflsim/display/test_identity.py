"""Colours and marks of methods: contrast, distances, also for colour-blind readers, and rows that stay."""

import warnings
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from made_runs import made

from pflsim.analysis.comparison import compare
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import Run
from pflsim.analysis.tables import records, render
from pflsim.config.compose import CONFIGS
from pflsim.display.identity import DASHES, MARKS, OWN, Identity, identity, listed_identities

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import colour
    from colour.blindness import matrix_cvd_Machado2009
    from colour.models import eotf_inverse_sRGB, eotf_sRGB

PAGES = {"light": "#ffffff", "dark": "#15171b"}


def rgb(text: str) -> np.ndarray:
    return np.array([int(text[k : k + 2], 16) for k in (1, 3, 5)]) / 255


def lab(text: str, seen_by: np.ndarray) -> np.ndarray:
    """Return CIELAB of a colour as seen by a person, given as a matrix on linear RGB."""
    seen = eotf_inverse_sRGB(np.clip(seen_by @ eotf_sRGB(rgb(text)), 0, 1))
    return colour.XYZ_to_Lab(colour.sRGB_to_XYZ(seen))


def luminance(text: str) -> float:
    return float(eotf_sRGB(rgb(text)) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("page", sorted(PAGES))
def test_colours_stand_out_from_the_page(page: str) -> None:
    ground = luminance(PAGES[page])
    shades = {getattr(i, page) for i in listed_identities().values()} | {pair[page == "dark"] for pair in OWN}
    for shade in sorted(shades):
        high, low = sorted((luminance(shade), ground), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, shade


@pytest.mark.parametrize("page", sorted(PAGES))
@pytest.mark.parametrize("defect", [None, "Deuteranomaly", "Protanomaly"])
def test_methods_with_the_same_mark_have_different_colours(page: str, defect: str | None) -> None:
    seen_by = np.eye(3) if defect is None else matrix_cvd_Machado2009(defect, 1.0)
    for a, b in combinations(listed_identities().values(), 2):
        if a.mark == b.mark:
            near = colour.delta_E(lab(getattr(a, page), seen_by), lab(getattr(b, page), seen_by), method="CIE 2000")
            assert near >= 9, (a.name, b.name)
    own = [pair[page == "dark"] for pair in OWN]
    others = own if defect else [*own, *(getattr(i, page) for i in listed_identities().values())]
    for a, b in product(own, others):
        if a != b:
            assert colour.delta_E(lab(a, seen_by), lab(b, seen_by), method="CIE 2000") >= 9, (a, b)


def test_every_method_has_a_row() -> None:
    known = listed_identities()
    assert {path.stem for path in Path(CONFIGS, "method").glob("*.yaml")} <= {*known}
    assert len({(i.light, i.mark) for i in known.values()}) == len(known)
    assert {i.mark for i in known.values()} <= {*MARKS} and {i.dash for i in known.values()} <= {*DASHES}


def test_rows_do_not_change() -> None:
    known = listed_identities()
    row = Identity("pfedcfr", "pFedCFR", "fusion", "#0275c8", "#74adfe", "circle", "solid")
    assert known["pfedcfr"] == row
    assert [*known][:4] == ["local", "fedavg", "fedprox", "scaffold"] and [*known][48] == "fedalp"
    assert known["fedalp"].light == "#eb5463" and known["ifca"].mark == "hexagon" and known["ditto"].dash == "solid"


def test_methods_without_a_row() -> None:
    own = identity("mine.fedpac.FedPAC")
    assert (own.display, own.family) == ("FedPAC", "own") and own == identity("mine.fedpac.FedPAC")
    assert identity("ditto+fedadam").display == "Ditto+FedAdam"
    looks = {(i.light, i.mark) for i in map(identity, map(str, range(500)))}
    assert len(looks) == len(OWN) * len(MARKS)


def runs(folder: Path, method: str, rights: list[list[int]], **settings: object) -> list[Run]:
    """A run of each seed."""
    return [
        made(folder / f"{method}{seed}", [[(right, 100) for right in own]], method=method, seed=seed, **settings)
        for seed, own in enumerate(rights)
    ]


def test_equal_values_on_every_client_and_seed(tmp_path: Path) -> None:
    base = [[50, 60, 70], [55, 65, 75]]
    other = [[50, 60, 70], [55, 65, 74]]
    found = compare(
        group_runs(
            [
                run
                for name, rights in {
                    "local": base,
                    "a": other,
                    "b": base,
                    "c": other,
                    "d": [[70, 60, 50], base[1]],
                }.items()
                for run in runs(tmp_path, name, rights)
            ]
        )
    )
    assert found.identical == (("Local", "b"), ("a", "c"))
    assert [record["identical_to"] for record in records(found)] == ["b", "c", "local", "a", ""]
    assert "every seed: Local and b\n" in render([found], "text")


def test_what_cannot_be_told_apart_from_the_best(tmp_path: Path) -> None:
    """Three clients of 24 show nothing (p = 1/4), all 24 do; what comes after the first clear one does not count."""
    base = np.random.default_rng(0).integers(40, 50, 24)
    below = {"best": [0] * 24, "level": [1] * 3 + [0] * 21, "next": [1] * 24, "noisy": [-24, 23, -20, 27] * 6}
    methods = {"local": base, **{name: base + 20 - np.array(points) for name, points in below.items()}}
    found = compare(group_runs([r for name, own in methods.items() for r in runs(tmp_path, name, [own.tolist()])]))
    assert found.tied == ("best", "level")
