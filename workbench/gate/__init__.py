"""The gate: is the head slower than the base, how sure is that, and why. Judges bundles; never imports torch."""
