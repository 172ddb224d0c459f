"""How fast it is: ours against two yardsticks and against the machine, in one run. `python -m benchmarks --help`."""
