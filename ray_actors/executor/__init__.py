"""The executor on Ray: its actors, how messages travel, and what happens when an actor dies."""
