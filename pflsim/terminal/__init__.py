"""Live displays, results and exit statuses of commands in a terminal."""
