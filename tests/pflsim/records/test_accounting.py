from hypothesis import given
from hypothesis import strategies as st

from pflsim.records.history import Traffic, client_traffic, round_traffic
from pflsim.types import RoundRecord, TrainReport

sizes = st.dictionaries(st.integers(0, 6), st.integers(0, 10**12), max_size=6)


def record(number, up, down):
    reports = tuple(TrainReport(client, 1, 1, up_bytes=count) for client, count in up.items())
    return RoundRecord(number, tuple(sorted(up)), reports, down, (), {})


@given(sizes, sizes)
def test_the_traffic_of_a_round_is_the_sum_of_its_clients(up, down):
    entry = record(1, up, down)
    assert round_traffic(entry) == Traffic(sum(up.values()), sum(down.values()))
    expected = {client: Traffic(up.get(client, 0), down.get(client, 0)) for client in range(7)}
    assert client_traffic(entry) == {client: both for client, both in expected.items() if both != Traffic()}


def test_who_got_and_sent_nothing_costs_nothing():
    traffic = client_traffic(record(1, {3: 5, 1: 0}, {1: 0, 2: 7}))
    assert traffic == {2: Traffic(0, 7), 3: Traffic(5, 0)}
    assert list(traffic) == [2, 3]
