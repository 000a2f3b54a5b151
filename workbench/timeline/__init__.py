"""The timeline of a run: any window of it, from the whole run to nanoseconds, in a bounded number of points."""
