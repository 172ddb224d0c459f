"""How fast pflsim, two baselines and the machine are."""
