"""One file per method, named as the method."""
