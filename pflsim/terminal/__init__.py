"""How runs and methods are shown: live displays, results, names, colours and numbers."""
