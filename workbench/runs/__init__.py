"""Folders of runs: which there are, what each says in a line, how a scenario changed over time, a run as it goes."""
