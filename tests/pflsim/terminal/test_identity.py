"""Colours and marks of methods."""

from pathlib import Path

from pflsim.config.compose import CONFIGS
from pflsim.terminal.identity import DASHES, MARKS, OWN, identity, listed_identities


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
