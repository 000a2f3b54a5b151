"""Foreign traces into the bundle's schema."""
