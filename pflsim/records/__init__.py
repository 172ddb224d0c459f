"""The files of a run folder: how a run writes them, and how it reads them to resume."""
