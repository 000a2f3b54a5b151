"""One run, pass by pass: the parts of ``workbench.runner``."""
