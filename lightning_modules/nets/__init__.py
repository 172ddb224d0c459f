"""Networks of a body and a head: plain torch modules that know nothing of federated learning."""
