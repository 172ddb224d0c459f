"""Server rules, one file per method that needs one, named as the method."""
