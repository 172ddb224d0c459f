"""A run on its own Ray whose memory monitor kills an actor that eats too much: `python out_of_memory_run.py FOLDER`.

Prints what came of it as JSON: `equal`, `restarts`, `eaten`, the lines of run.log; or only `disturbed`, the bytes by
which other processes of the machine have changed their use of memory, where it can show nothing because of them.
"""

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from failing_clients import EndangeredServer, caught, set_trap
from support import Records, World, plan, same, states, world

from lightning_modules.methods.fedprox import FedProx
from pflsim.config.settings import Placement
from pflsim.data.federated import Shard
from pflsim.engine.simulation import Simulation
from pflsim.records.folder import LOG, run_log

SIZES = (12, 7, 20)
PIECE = 64 * 2**20
MAX_EATEN = 3 * 2**30
"""Bytes that are eaten at most."""
OURS = int(2.4 * 2**30)
"""Room that the run itself needs at most, with some for what else goes on on the machine."""
DISTURBED = int(-1.5 * 2**30), int(0.8 * 2**30)
"""Bytes by which the others may use less and more meanwhile."""
TRAP = "eat"


class Hungry(FedProx):
    """A client that once eats memory until it is killed for it."""

    def __init__(self, *arguments: Any, traps: str, **settings: Any):
        super().__init__(*arguments, mu=0.1, **settings)
        self.traps = Path(traps)

    def before_training(self, shard: Shard) -> None:
        if shard.client == 1 and self.round_number == 2 and caught(self.traps, TRAP):
            eaten: list[bytes] = []
            until = time.monotonic() + 30
            while time.monotonic() < until:
                if len(eaten) < MAX_EATEN // PIECE:
                    eaten.append(b"\1" * PIECE)
                    (self.traps / "eaten").write_text(str(len(eaten) * PIECE))
                else:
                    time.sleep(0.1)
        super().before_training(shard)


def outcome(executor: Any, folder: Path) -> tuple[Any, ...]:
    listener = Records()
    Simulation(executor, plan(len(SIZES), 3), folder, listener).run()
    return states(executor), executor.server_state(), [record.evaluations for record in listener.records]


def on_ray(made: World, folder: Path) -> tuple[tuple[Any, ...], int]:
    from ray_actors import cluster
    from ray_actors.executor import RayExecutor
    from ray_actors.layout import Node, lay_out
    from ray_actors.resources import ActorPool

    files = cluster.start(cpus=1, gpus=0, store_mb=100)
    try:
        layout = lay_out(SIZES, Placement(actors=1), [Node("here", 1, 0, 1e6)], made.factory.stacks)
        executor = RayExecutor(made.on_error("retry(20)"), layout, ActorPool())
        with run_log(folder):
            executor.start()
            set_trap(folder, TRAP)
            return outcome(executor, folder), executor.faults.restarts
    finally:
        cluster.stop(files)


def used_by_others() -> int:
    """Bytes in use, less those of this process and all that it has started; shared pages count to the others."""
    me, own = psutil.Process(), 0
    for one in [me, *me.children(recursive=True)]:
        try:
            own += one.memory_full_info().uss
        except psutil.Error:
            continue
    memory = psutil.virtual_memory()
    return memory.total - memory.available - own


def give_up_if_disturbed(before: int, over: threading.Event) -> None:
    """End this process when the others' use of memory decides what is killed, and not what is eaten here."""
    looks = 0  # one after another: what a process that is just dying had counts to the others for a moment
    while not over.wait(0.2):
        change = used_by_others() - before
        looks = 0 if DISTURBED[0] < change < DISTURBED[1] else looks + 1
        if looks > 15:
            print(json.dumps({"disturbed": change}), flush=True)
            os._exit(0)


def main(folder: Path) -> None:
    made = world(partial(Hungry, traps=str(folder)), EndangeredServer(traps=str(folder)), sizes=SIZES)
    straight = outcome(made.inline(), folder)
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + OURS) / memory.total
    os.environ.update(RAY_memory_usage_threshold=f"{threshold:.4f}", RAY_memory_monitor_refresh_ms="100")
    over = threading.Event()
    threading.Thread(target=give_up_if_disturbed, args=(used_by_others(), over), daemon=True).start()
    found, restarts = on_ray(made, folder)
    over.set()
    equal = same(found[0], straight[0]) and found[2] == straight[2]
    equal = equal and same({0: found[1]["weights"]}, {0: straight[1]["weights"]})
    eaten = int((folder / "eaten").read_text()) if (folder / "eaten").exists() else 0
    lines = (folder / LOG).read_text().splitlines() if (folder / LOG).exists() else []
    print(json.dumps({"equal": equal, "restarts": restarts, "eaten": eaten, "lines": lines}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
