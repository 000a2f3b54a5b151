"""Two bundles against each other: how much, through what, and how sure."""
