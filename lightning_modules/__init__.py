"""The client side of pflsim: LightningModules, their phases, losses and the one training loop. Knows no Ray."""
