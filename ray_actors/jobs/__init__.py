"""Run on a cluster with Ray Jobs: the commands `submit`, `status`, `logs`, `stop` and `fetch`."""
