"""The check of `check-method --ray`: results on Ray actors equal those in one process."""

from lightning_modules.contract.checks import Make, equal, inline, require, require_equal, rounds, start, states
from ray_actors import cluster
from ray_actors.executor import RayExecutor
from ray_actors.layout import Layout
from ray_actors.resources import ActorPool


def equal_on_ray(make: Make) -> None:
    """Results on Ray actors equal those in one process, to the bit."""
    folder = cluster.start(cpus=2, gpus=0, store_mb=100)
    try:
        actors_equal_inline(make, ActorPool())
    finally:
        cluster.stop(folder)


def actors_equal_inline(make: Make, pool: ActorPool) -> None:
    """Results on Ray actors equal those in one process, to the bit.

    Args:
        make: prepares the run.
        pool: of the actors.
    """
    made = make()
    layout = Layout(((0, 3), (1, 2)), 1, 0)
    actors = RayExecutor(made, layout, pool)
    start(actors, made)
    alone = inline(made)
    for executor in (actors, alone):
        for t, cohort in ((1, (0, 1, 3)), (2, (0, 2, 3))):
            rounds(executor, (t,), cohort)
    require_equal(states(alone), states(actors), "a client's state differs on an actor")
    require(equal(alone.server_state(), actors.server_state()), "the server's state differs on an actor")
