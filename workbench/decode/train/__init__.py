"""Training of the shipped ``nano`` model and its drafters: ``python -m workbench.decode.train``."""
