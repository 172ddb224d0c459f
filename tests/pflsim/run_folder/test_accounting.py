from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pflsim.run_folder.accounting import Ledger, Traffic, client_traffic
from pflsim.types import RoundRecord, TrainReport

sizes = st.dictionaries(st.integers(0, 6), st.integers(0, 10**12), max_size=6)


def record(number, up, down):
    reports = tuple(TrainReport(client, 1, 1, up_bytes=count) for client, count in up.items())
    return RoundRecord(number, tuple(sorted(up)), reports, down, (), {})


@given(st.lists(st.tuples(sizes, sizes), max_size=6))
def test_the_ledger_is_the_sum_of_the_rounds_per_client_and_in_all(rounds):
    ledger, up_of, down_of = Ledger(), Counter(), Counter()
    for number, (up, down) in enumerate(rounds, start=1):
        assert ledger.add(record(number, up, down)) == Traffic(sum(up.values()), sum(down.values()))
        up_of.update(up)
        down_of.update(down)
        assert ledger.total == Traffic(up_of.total(), down_of.total())
    for client in range(7):
        assert ledger.clients.get(client, Traffic()) == Traffic(up_of[client], down_of[client])
    assert Ledger(record(n, *sides) for n, sides in enumerate(rounds, start=1)).clients == ledger.clients


def test_who_got_and_sent_nothing_costs_nothing():
    traffic = client_traffic(record(1, {3: 5, 1: 0}, {1: 0, 2: 7}))
    assert traffic == {2: Traffic(0, 7), 3: Traffic(5, 0)}
    assert list(traffic) == [2, 3]
