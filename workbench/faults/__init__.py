"""The suite of planted faults: what is planted where, runs of it, and how often the diagnosis names it."""
