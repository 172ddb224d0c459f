"""Assigns clients to actors and actors to nodes, and computes the resources that each actor requests."""
