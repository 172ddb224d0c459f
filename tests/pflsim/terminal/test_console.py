import io
import re
import shlex
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import stats
from rich.console import Console as Rich

from pflsim.records.evaluation import Measures, Scope
from pflsim.records.history import RoundMetrics, Traffic
from pflsim.records.summary import RunMeta, Summary
from pflsim.terminal.console import Console
from pflsim.terminal.result import resume_command, tensorboard_command
from pflsim.terminal.status import watching

META = RunMeta("pfedcfr", "digits", "label_lognormal", "abc", "mlp", 10, 20, 0)
PERSONAL, GLOBAL = Scope("personal", "test", "trained"), Scope("global", "test", "received")


def metrics(number, accuracy, losses=None, seconds=0.8):
    losses = {"ce": 0.512, "prox": 0.1} if losses is None else losses
    traffic = Traffic(1_200_000, 2_400_000)
    return RoundMetrics(number, 10, losses, accuracy, traffic, Traffic(number, number), {"total": seconds})


FULL = {PERSONAL: stats(0.913), GLOBAL: stats(0.64)}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def run(stream, width=None, meta=META, complete=True):
    console, folder = Console(meta, stream, width), Path("runs/x")
    history = [metrics(number, FULL) for number in range(1, meta.rounds + 1)]
    console.start(folder)
    for entry in history:
        console.round(entry)
    console.end(Summary(meta, history, complete, 20.0, 512.0), folder)
    console.close()
    return stream.getvalue()


def test_a_round_is_one_line_with_what_matters():
    stream = io.StringIO()
    Console(META, stream).round(metrics(3, FULL))
    assert stream.getvalue() == (
        "round  3/20  personal 0.913 (worst 0.81)  global 0.640  ce 0.512  up 1.20 MB  down 2.40 MB  0.8 s  eta 14 s\n"
    )


def test_the_header_says_what_is_evaluated(monkeypatch):
    stream = io.StringIO()
    meta = replace(META, evaluated_on="5", measures=Measures(primary="rmse"))
    console = Console(meta, stream)
    console.start(Path("runs/x"))
    assert "RMSE: mean over 5 clients chosen by the seed, on their test data" in stream.getvalue()
    console.phase(3, "evaluate", 8)
    console.clients_done(2)
    assert "evaluate" not in stream.getvalue()
    monkeypatch.setattr("pflsim.terminal.console.SILENCE", -1.0)
    console.clients_done(3)
    assert stream.getvalue().endswith("round 3/20: evaluate 5 of 8 clients\n")


def test_the_reported_model_comes_first_with_its_worst_decile():
    line = Console(replace(META, reported_model="global"), io.StringIO()).line(metrics(3, FULL))
    assert line.startswith("round  3/20  global 0.640 (worst 0.54)  personal 0.913  ")


@given(
    st.integers(60, 200), st.integers(1, 10**5), st.floats(0, 1e15), st.floats(0, 1e6), st.floats(allow_nan=True)
)  # fmt: skip
def test_no_line_is_wider_than_it_may_be(width, number, count, seconds, loss):
    meta = replace(META, rounds=10**5)
    entry = replace(metrics(number, FULL, {"ce": loss}, seconds), traffic=Traffic(int(count), int(count)))
    stream = io.StringIO()
    Console(meta, stream, width).round(entry)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert len(text.rstrip("\n")) <= width
    assert text.startswith(f"round {number:>6}/100000  personal 0.913 (worst 0.81)")


def test_the_end_says_all_of_it_in_80_columns(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = run(io.StringIO(), width=80)
    assert "\x1b" not in text and "\x1b" in run(Terminal())
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in ("personal *", "best by validation", "best test round (oracle)", "worst decile", "0.9130", "0.1000"):
        assert part in text
    for part in ("up 20 B", "down 20 B", "startup 4.0 s", "rounds 16 s", "0.8 s per round", "512 MB", "runs/x"):
        assert part in text
    assert text.rstrip().endswith("--logdir runs/x")
    assert text.count("last round") == 3, "for both models, and what reports take without validation data"
    assert "20 of 20 rounds" in run(io.StringIO(), complete=False)


def test_the_tensorboard_command_can_be_pasted(monkeypatch, here):
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr(sys, "executable", str(here / "venv" / "python"))
    beside = f"{here}/venv/tensorboard"
    assert shlex.split(tensorboard_command(Path("my runs/x"))) == [beside, "--logdir", "my runs/x"]
    (here / "tensorboard").touch(mode=0o755)
    assert tensorboard_command(Path("my runs/x")) == "tensorboard --logdir 'my runs/x'"


def shown(console):
    """What the live display shows at this moment."""
    stream = io.StringIO()
    Rich(file=stream, width=console.width, color_system=None).print(console._shown())
    return stream.getvalue()


def test_the_live_display_says_where_the_run_is():
    validation = {Scope("personal", "val", "trained"): stats(0.8)}
    with closing(Console(META, Terminal())) as console:
        console.start(Path("runs/x"))
        assert "starting" in shown(console)
        console.phase(3, "train", 8)
        console.clients_done(2)
        console.clients_done(3)
        assert "round 3/20" in shown(console)
        assert "train 5 of 8 clients" in shown(console)
        console.round(metrics(3, {**FULL, **validation}), 1234.0)
        console.round(metrics(4, {PERSONAL: stats(0.95), Scope("personal", "val", "trained"): stats(0.7)}), 2000.0)
        text = shown(console)
    assert "personal accuracy 0.950 ▁█ " in text and "worst decile 0.850" in text
    assert "best by validation 0.913 in round 3" in text
    assert "0.8 s a round" in text and "up 4 B, down 4 B" in text and "memory 2.00 GB" in text
    assert " left" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_live_display_fits_the_terminal(width):
    with closing(Console(replace(META, rounds=1000), Terminal(), width)) as console:
        console.start(Path("runs/x"))
        for number in range(1, 301):
            console.round(metrics(number, {PERSONAL: stats(1 - 1 / number)}), 1234.0)
        console.phase(301, "evaluate", 10)
        lines = shown(console).splitlines()
    assert max(map(len, lines)) <= width and all(line.strip() for line in lines)
    assert max(map(len, lines)) >= 0.7 * width
    bars = "".join(re.findall("[▁▂▃▄▅▆▇█]", "".join(lines)))
    assert bars[0] == "▁" and bars[-1] == "█" and len(bars) >= width // 5


def test_the_best_so_far_may_be_of_an_earlier_session():
    with closing(Console(META, Terminal())) as console:
        console.start(Path("runs/x"), 2)
        console.earlier([metrics(1, FULL), metrics(2, {PERSONAL: stats(0.5)})])
        console.round(metrics(3, {PERSONAL: stats(0.7)}))
        assert "best on test data (oracle) 0.913 in round 1" in shown(console)


def test_a_watched_run_prints_only_how_to_resume_it():
    seen, stream = [], io.StringIO()
    token = watching.set(lambda status: seen.append((status.round, *status.values)))
    try:
        console = Console(META, stream)
    finally:
        watching.reset(token)
    console.start(Path("runs/x"))
    console.round(metrics(1, FULL))
    console.end(Summary(META, [metrics(1, FULL)], False, 20.0, 512.0), Path("runs/x"))
    assert seen == [(0,), (1, 0.913)]
    assert re.fullmatch(r"resume with  .*resume=runs/x\n", stream.getvalue())


def test_the_live_display_goes_and_leaves_about_twenty_lines_of_a_long_run():
    text = run(Terminal(), meta=replace(META, rounds=1000))
    assert [n for n in range(1, 1001) if re.search(rf"round +{n}/1000 ", text)] == list(range(50, 1001, 50))
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and is back


def test_a_cluster_job_is_resumed_as_a_job(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("PFLSIM_JOB", "python launch.py submit")
    assert resume_command(Path("run")) == f"python launch.py submit resume={here}/run"
    monkeypatch.delenv("PFLSIM_JOB")
    assert resume_command(here) == f"pflsim resume={here}"


def test_what_a_run_waits_for_is_told() -> None:
    assert Console(META, Terminal()).progress == "live"
    for progress, count in (("auto", 1), ("quiet", 0), ("live", 0)):
        stream = io.StringIO()
        with closing(Console(META, stream, progress=progress)) as console:
            console.start(Path("runs/x"))
            console.waiting("starting Ray")
            assert stream.getvalue().splitlines().count("starting Ray") == count
            assert progress != "live" or "starting Ray" in shown(console)
            console.round(metrics(1, FULL))
            assert progress != "quiet" or not stream.getvalue()
