"""The performance targets and whether they are met. Most are ratios of two figures of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cases import OURS
from benchmarks.speed.results import Results, growth


@dataclass(frozen=True)
class Verdict:
    """A target and the measured figure.

    Args:
        what: a description.
        target: the target, as text.
        measured: the figure, as text; empty: not measured.
        met: whether the target is met.
        by: the figure relative to the target; below 1.0 the target is missed.
    """

    what: str
    target: str
    measured: str = ""
    met: bool = False
    by: float = 0.0


def verdicts(results: Results) -> list[Verdict]:
    """Return all targets, in the order of the table."""
    return [*_speed(results), *_evenness(results), *_memory(results), *_rest(results)]


def _at_least(what: str, target: float, value: float | None, unit: str = "×", note: str = "") -> Verdict:
    return _verdict(what, "≥", target, value, unit, note)


def _at_most(what: str, target: float, value: float | None, unit: str) -> Verdict:
    return _verdict(what, "≤", target, value, unit)


def _verdict(what: str, sign: str, target: float, value: float | None, unit: str, note: str = "") -> Verdict:
    scale, decimals = (100, 0) if unit == "%" else (1, 2)
    goal = f"{sign} {target * scale:g}{unit}"
    if value is None:
        return Verdict(what, goal)
    by = value / target if sign == "≥" else target / max(value, 1e-9)
    return Verdict(what, goal, f"{value * scale:.{decimals}f}{unit}{note}", by >= 1, by)


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def _speed(results: Results) -> Iterator[Verdict]:
    for name, case, plain, workers in (("MLP", "mlp-20", 7.0, 4.5), ("CNN", "cnn-20", 1.8, 2.0)):
        best = results.fastest(case)
        way, seconds = best or ("", None)
        note = f" ({OURS[way]})" if best else ""
        yield _at_least(
            f"{name}, 20 clients, whole round, against the plain loop",
            plain,
            _over(results.plain(case), seconds),
            note=note,
        )
        other = _over(results.seconds(case, "workers"), seconds)
        yield _at_least(f"{name}, 20 clients, against two plain Ray workers", workers, other, note=note)
        if name == "CNN":
            bf16 = _over(results.seconds(case, "workers"), results.seconds(case, "bf16"))
            yield _at_least("CNN, 20 clients, precision=bf16, against two plain Ray workers in float32", 2.8, bf16)
            share = results.share(case, way, cores=2) if best else None
            yield _at_least("CNN, 20 clients, share of the matrix-product rate of both cores", 0.6, share, "%", note)
    ray = results.way("cnn-20", "ray2")
    alone = results.seconds("cnn-20", "lockstep" if ray and ray["lockstep"] else "loop")
    yield _at_least(
        "CNN, 20 clients, Ray with 2 actors against inline on one thread",
        1.8,
        _over(alone, results.seconds("cnn-20", "ray2")),
    )
    stacked = ("pfedme", "pFedMe, MLP", 2.0), ("perfedavg", "Per-FedAvg, MLP", 2.0), ("lora", "LoRA adapters, ViT", 1.6)
    for case, name, target in stacked:
        gain = _over(results.seconds(case, "loop"), results.seconds(case, "lockstep"))
        yield _at_least(f"{name}, 20 clients, lockstep against loop", target, gain)
    first, later = results.way("mlp-20", "lockstep"), results.seconds("mlp-20", "lockstep")
    extra = first["first"] - later if first and later else None
    yield _at_most("MLP, 20 clients, first round more than a later one, for tracing", 0.25, extra, " s")


def _evenness(results: Results) -> Iterator[Verdict]:
    for name, model in (("MLP", "mlp"), ("CNN", "cnn")):
        few, many = (results.per_example(f"{model}-{n}", "ray2") for n in (20, 100))
        yield _at_most(
            f"{name}, 100 clients against 20, seconds per example, Ray with 2 actors", 1.12, _over(many, few), "×"
        )


def _memory(results: Results) -> Iterator[Verdict]:
    for name, model in (("MLP", "mlp"), ("CNN", "cnn")):
        cases = [(f"{model}-100", way) for way in OURS] + [(f"memory-{model}", "ray2")]
        peaks = [found["peak_mb"] / 1e3 for case, way in cases if (found := results.way(case, way))]
        yield _at_most(
            f"{name}, 100 clients, peak memory of all processes, worst of our ways", 4, max(peaks, default=None), " GB"
        )
    for name, case in (("MLP", "memory-mlp"), ("CNN", "memory-cnn")):
        what, target = f"{name}, 100 clients, memory over 100 rounds", "no slope beyond the noise"
        found = results.way(case, "ray2")
        if found is None:
            yield Verdict(what, target)
            continue
        slope, noise = growth(found["held_mb"])
        shown = f"{slope:+.2f} MB a round, noise {noise:.2f}"
        yield Verdict(what, target, shown, slope <= noise, noise / slope if slope > noise else 1.0)
    thousand = results.way("thousand", "ray2")
    yield _at_most(
        "1,000 clients, MNIST, 100 a round: runs, peak memory",
        6,
        thousand["peak_mb"] / 1e3 if thousand else None,
        " GB",
    )


def _rest(results: Results) -> Iterator[Verdict]:
    pfedla, start = results.way("pfedla", "ray2"), results.way("start", "start")
    share = pfedla["round"]["server"] / pfedla["round"]["total"] if pfedla else None
    yield _at_most("pFedLA, 100 clients, CNN, the server's share of a round", 0.2, share, "%")
    linear = (results.way("per-client", "small") or {}).get("linear")
    for part, also, aim in (("training and reply", "fusion and drift", 0.15), ("evaluation of one model", "", 0.2)):
        found = linear and linear[part] + linear.get(also, 0.0)
        yield _at_most(f"1,000 linear clients, one step, per client: {part}{also and ', '}{also}", aim, found, " ms")
    yield _at_most("`launch.py --help`", 1, start["help"] if start else None, " s")
    first = start["first_round"] if start else None
    yield _at_most("first round of 20 clients on the digits under Ray, from launch", 20, first, " s")
