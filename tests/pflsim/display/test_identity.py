"""Colours and marks of methods."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from pflsim.config.compose import CONFIGS
from pflsim.display.identity import DASHES, MARKS, OWN, identity, listed_identities

with warnings.catch_warnings(), np.printoptions():  # colour sets options that change the digits of CSV files
    warnings.simplefilter("ignore")
    from colour.models import eotf_sRGB

PAGES = {"light": "#ffffff", "dark": "#15171b"}


def rgb(text: str) -> np.ndarray:
    return np.array([int(text[k : k + 2], 16) for k in (1, 3, 5)]) / 255


def luminance(text: str) -> float:
    return float(eotf_sRGB(rgb(text)) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("page", sorted(PAGES))
def test_colours_stand_out_from_the_page(page: str) -> None:
    ground = luminance(PAGES[page])
    shades = {getattr(i, page) for i in listed_identities().values()} | {pair[page == "dark"] for pair in OWN}
    for shade in sorted(shades):
        high, low = sorted((luminance(shade), ground), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, shade


def test_every_method_has_a_row() -> None:
    known = listed_identities()
    assert {path.stem for path in Path(CONFIGS, "method").glob("*.yaml")} <= {*known}
    assert len({(i.light, i.mark) for i in known.values()}) == len(known)
    assert {i.mark for i in known.values()} <= {*MARKS} and {i.dash for i in known.values()} <= {*DASHES}


def test_methods_without_a_row() -> None:
    own = identity("mine.fedpac.FedPAC")
    assert (own.display, own.family) == ("FedPAC", "own") and own == identity("mine.fedpac.FedPAC")
    assert identity("ditto+fedadam").display == "Ditto+FedAdam"
    looks = {(i.light, i.mark) for i in map(identity, map(str, range(500)))}
    assert len(looks) == len(OWN) * len(MARKS)
