"""The client side: LightningModules with their phases, losses and training loop. This package does not use Ray."""
