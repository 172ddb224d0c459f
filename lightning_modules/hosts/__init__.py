"""Plain classes that hold clients and the server and work on them, and the executor without Ray."""
