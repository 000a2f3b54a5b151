"""The verbs of the ``workbench`` command, one a file; workbench/cli.py lists them."""
